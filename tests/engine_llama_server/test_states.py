"""Models of which rows alone are not enough: recurrent layers, and windows that drop rows. What a
killed server knew comes back where its own cache would have gone on, bit for bit.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.blockfile import BlockMeta, buffer_reader, read_meta
from tests.engine_llama_server.server import Answer, LlamaServer, Starter, alike
from tests.engine_llama_server.test_llama_server import WAYS, report, text
from tests.places import TMPFS
from tests.sidecar import SidecarProcess

PROMPT = 700
COUNT = 12  # tokens of an answer
QUIET = 32  # looks, 20 ms apart: on a busy machine the saver pauses, too

HYBRID = {
    "lfm2": ("lfm2-tiny", "-fa", "on", "-np", "1"),
    "lfm2, V transposed": ("lfm2-tiny", "-fa", "off", "-np", "1"),
    "lfm2, q8_0": ("lfm2-tiny", "-fa", "on", "-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
    "nemotron-h": ("nemotron-h-tiny", "-fa", "on", "-np", "1"),
    "lfm2, two slots": ("lfm2-tiny", "-fa", "on", "-np", "2", "--no-kv-unified"),
}
WINDOWS = {
    "gemma3": ("gemma3-tiny", "-fa", "on", "-np", "1"),
    "gemma3, V transposed": ("gemma3-tiny", "-fa", "off", "-np", "1"),
    "gemma3, q8_0": ("gemma3-tiny", "-fa", "on", "-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
    "gemma3, two slots": ("gemma3-tiny", "-fa", "on", "-np", "2", "--no-kv-unified"),
    "gemma2": ("gemma2-tiny", "-fa", "on", "-np", "1"),
    "cohere2": ("cohere2-tiny", "-fa", "on", "-np", "1"),
}
ALL = HYBRID | WINDOWS


@pytest.fixture
def rng() -> random.Random:
    return random.Random(23)


def settled(sidecar: SidecarProcess, server: LlamaServer) -> None:
    """Until what was answered is stored: nothing more comes."""
    seen: list[int] = []

    def same(stat: adm.StatResponse) -> bool:
        seen.append(sum(one.blocks for one in stat.namespaces))
        return len(seen) > QUIET and seen[-1] > 0 and len(set(seen[-QUIET:])) == 1

    sidecar.wait(same, f"all is stored\n{server.log.read_text()[-3000:]}", 30)


@pytest.mark.parametrize("way", ALL)
def test_a_conversation_goes_on_after_a_kill_as_if_it_were_resident(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, way: str
) -> None:
    options = (*ALL[way], "-c", "4096")
    prompt, more, again = text(rng, PROMPT), text(rng, 40, first=3), text(rng, 30, first=4)

    def turns(server: LlamaServer, between: Callable[[LlamaServer], LlamaServer]) -> list[Answer]:
        said = [server.complete(prompt, COUNT)]
        second = prompt + list(said[0].tokens) + more
        server = between(server)
        said.append(server.complete(second, COUNT))
        server = between(server)
        said.append(server.complete(second + list(said[1].tokens) + again, COUNT))
        return said

    resident = start(*options)
    wanted = turns(resident, lambda server: server)
    resident.kill()
    assert wanted[1].cached == PROMPT + COUNT - 1

    restored: list[int] = []

    def killed(server: LlamaServer) -> LlamaServer:
        settled(sidecar, server)
        restored.append(report(sidecar, server, 1).restored_tokens)
        server.kill()
        return start(*options, sidecar=sidecar)

    said = turns(start(*options, sidecar=sidecar), killed)
    assert said == wanted  # also as many tokens from the cache
    assert restored[1] >= PROMPT


@pytest.mark.parametrize("way", ["llama", "lfm2", "gemma3"])
def test_out_of_files_on_a_disk(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, way: str
) -> None:
    """Not in memory any more, as after a reboot: they are not read into cells, but copied."""
    options = (*(ALL | {"llama": WAYS["flash attention"]})[way], "-c", "4096")
    prompt = text(rng, PROMPT)
    turns = {True: text(rng, 40, first=3), False: text(rng, 40, first=4)}
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompt, 1)
    settled(sidecar, tiered)
    tiered.kill()
    for in_memory, more in turns.items():
        resident = start(*options)
        resident.complete(prompt, 1)
        wanted = resident.complete(prompt + more, COUNT)
        resident.kill()
        if not in_memory:
            sidecar.wait_written()
            sidecar.stop()
            shutil.rmtree(sidecar.ram_dir)
            sidecar.start()
        tiered = start(*options, sidecar=sidecar)
        assert tiered.complete(prompt + more, COUNT) == wanted
        assert report(sidecar, tiered, 1).restored_tokens == wanted.cached
        log = tiered.log.read_text()
        tiered.kill()
        if sidecar.ram_dir.is_relative_to(TMPFS) and way == "llama":
            assert ("reading 0.0 ms" in log) == in_memory


LFM2 = ("lfm2-tiny", "-fa", "on", "-np", "1", "-c", "4096")
GEMMA3 = ("gemma3-tiny", "-fa", "on", "-np", "1", "-c", "4096")
BOTH = pytest.mark.parametrize("options", [LFM2, GEMMA3], ids=["lfm2", "gemma3"])


def state_files(sidecar: SidecarProcess) -> list[Path]:
    """Also those of windows."""
    return [path for path in files(sidecar) if header(path).cells]


def files(sidecar: SidecarProcess) -> list[Path]:
    return [*sidecar.ram_dir.rglob("*.kvb"), *sidecar.local_dir.rglob("*.kvb")]


def header(path: Path) -> BlockMeta:
    data = path.read_bytes()
    return read_meta(buffer_reader(data), len(data))


def spoil(path: Path) -> None:
    """One bit of what it holds."""
    at = header(path).payload_offset + 64
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


def stored(
    start: Starter, sidecar: SidecarProcess, options: tuple[str, ...], prompt: list[int]
) -> Answer:
    """A server answered the prompt, everything is stored, and it is killed."""
    tiered = start(*options, sidecar=sidecar)
    answer = tiered.complete(prompt, COUNT)
    settled(sidecar, tiered)
    sidecar.wait_written()
    tiered.kill()
    return answer


def cold(start: Starter, options: tuple[str, ...], prompt: list[int]) -> Answer:
    server = start(*options)
    answer = server.complete(prompt, COUNT)
    server.kill()
    return answer


def test_a_prompt_that_shares_a_part_goes_on_at_a_checkpoint_within_it(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, PROMPT)
    one, other = text(rng, 40, first=3), text(rng, 40, first=4)
    resident = start(*LFM2)
    resident.complete(prompt + one, COUNT)
    hit = resident.complete(prompt + other, COUNT)
    resident.kill()
    stored(start, sidecar, LFM2, prompt + one)
    again = start(*LFM2, sidecar=sidecar)
    assert again.complete(prompt + other, COUNT) == hit
    assert 64 < hit.cached < PROMPT


@pytest.mark.parametrize("shared", [640, 688, PROMPT])
def test_windows_let_a_prompt_go_on_wherever_the_resident_cache_could(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, shared: int
) -> None:
    """No checkpoint lies there, and no block ends there."""
    prompt = text(rng, PROMPT)
    one, other = text(rng, 40, first=3), text(rng, 40, first=4)
    resident = start(*GEMMA3)
    resident.complete(prompt + one, COUNT)
    hit = resident.complete(prompt[:shared] + other, COUNT)
    resident.kill()
    assert hit.cached == shared
    stored(start, sidecar, GEMMA3, prompt + one)
    again = start(*GEMMA3, sidecar=sidecar)
    assert again.complete(prompt[:shared] + other, COUNT) == hit
    # And from there as the server would: within what has come back, and not before it.
    early = prompt[:300] + other
    assert alike(again.complete(early, COUNT), cold(start, GEMMA3, early))


@BOTH
def test_a_damaged_state_is_a_miss(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, options: tuple[str, ...]
) -> None:
    prompt = text(rng, PROMPT)
    first = stored(start, sidecar, options, prompt)
    states = state_files(sidecar)
    assert len(states) >= 3
    for path in states:
        spoil(path)
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(prompt, COUNT) == first
    assert report(sidecar, tiered, 1).restored_tokens == 0


def test_with_a_damaged_block_below_it_a_state_is_a_miss(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """The rows before it have come already, and reach beyond all that the slot held."""
    prompt = text(rng, PROMPT)
    mine = prompt[:300] + text(rng, 20, first=6)
    first = stored(start, sidecar, LFM2, prompt)
    tiered = start(*LFM2, sidecar=sidecar)
    tiered.complete(mine, COUNT)
    settled(sidecar, tiered)
    sidecar.wait_written()
    before = report(sidecar, tiered, 1).restored_tokens
    below = [path for path in files(sidecar) if header(path).first_position == 448]
    for path in {*below} - {*state_files(sidecar)}:
        spoil(path)
    said = tiered.complete(prompt, COUNT)
    assert alike(said, first)
    assert said.cached <= 300
    assert report(sidecar, tiered, 2).restored_tokens == before


@BOTH
def test_without_its_states_a_conversation_is_computed(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, options: tuple[str, ...]
) -> None:
    prompt = text(rng, PROMPT)
    first = stored(start, sidecar, options, prompt)
    for path in state_files(sidecar):
        path.unlink()
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(prompt, COUNT) == first
    assert report(sidecar, tiered, 1).restored_tokens == 0


def test_a_state_before_the_end_of_what_the_slot_holds(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """The slot holds the rows and has gone on: only the store knows the state in between."""
    options = (*LFM2, "--ctx-checkpoints", "1")
    prompt, more, other = text(rng, 693), text(rng, 90, first=3), text(rng, 90, first=4)
    resident = start(*options)
    answer = prompt + list(resident.complete(prompt, COUNT).tokens)
    hit = resident.complete(answer + other, COUNT)
    resident.kill()
    assert hit.cached == len(answer) - 1 == 704  # a state on a block that stays
    env = {"OLLAMA_KV_TIER_MIN_TOKENS": "1", "OLLAMA_KV_TIER_GATE": "restore"}
    tiered = start(*options, sidecar=sidecar, env=env)
    tiered.complete(prompt, COUNT)
    tiered.complete(answer + more, COUNT)
    settled(sidecar, tiered)
    assert tiered.complete(answer + other, COUNT) == hit
    assert report(sidecar, tiered, 3).restored_tokens == 704


def test_the_end_of_an_answer_stays_when_the_conversation_goes_on(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """The state hangs on a block that is not whole, and a longer one takes its place."""
    prompt, more, other = text(rng, PROMPT), text(rng, 90, first=3), text(rng, 90, first=4)
    tiered = start(*LFM2, sidecar=sidecar)
    answer = prompt + list(tiered.complete(prompt, COUNT).tokens)
    settled(sidecar, tiered)
    tiered.complete(answer + more, COUNT)
    settled(sidecar, tiered)
    hit = tiered.complete(answer + other, COUNT)
    assert hit.cached == PROMPT + COUNT - 1
    settled(sidecar, tiered)
    tiered.kill()
    again = start(*LFM2, sidecar=sidecar)
    assert again.complete(answer + other[:1] + more, COUNT).cached == hit.cached


@BOTH
def test_checkpoints_of_what_the_slot_held_before_are_not_those_of_what_comes(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, options: tuple[str, ...]
) -> None:
    options = (
        *options,
        "--checkpoint-min-step",
        "1",
    )  # or the server forgets most of them by itself
    shared = text(rng, 300)
    prompt = shared + text(rng, 600, first=5)
    short = shared + text(rng, 250, first=6)
    stored(start, sidecar, options, prompt)
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(short, COUNT)  # its last checkpoint lies behind what both share
    assert tiered.complete(prompt, COUNT).cached > 850
    branch = prompt[:700] + text(rng, 30, first=7)
    said = tiered.complete(branch, COUNT)
    if "lfm2-tiny" in options:  # it goes on where it has a state of this prompt
        assert alike(said, cold(start, options, branch))
        assert said.cached == 384
        return
    # gemma3 has the rows: those of the prompt's history, and not of what the slot held before.
    resident = start(*options)
    for _ in range(2):
        resident.complete(prompt, COUNT)
    assert said == resident.complete(branch, COUNT)
    assert said.cached == 700


def test_behind_a_context_shift_no_state_is_stored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    options = (*LFM2[:-1], "512", "--context-shift", "--keep", "4")
    prompt = text(rng, 400)
    tiered = start(*options, sidecar=sidecar)
    said = tiered.complete(prompt, 600)
    assert len(said.tokens) == 600
    settled(sidecar, tiered)
    tiered.kill()
    again = start(*options, sidecar=sidecar)
    before = again.complete(prompt + list(said.tokens[:60]), 4)
    assert before.cached > 390  # what came before it is stored as it was
    for keep in (4, 5):
        shifted = prompt[:keep] + list(said.tokens[106 + keep : 599])
        assert again.complete(shifted, 4).cached <= 5


@BOTH
def test_beside_the_servers_own_cache_of_prompts(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, options: tuple[str, ...]
) -> None:
    env = {"LLAMA_ARG_CACHE_RAM": "64"}
    one, other = text(rng, PROMPT, first=5), text(rng, PROMPT, first=6)
    tail = text(rng, 30, first=7)

    def turns(server: LlamaServer) -> list[Answer]:
        return [server.complete(p, COUNT) for p in (one, other, one + tail, other + tail)]

    resident = start(*options, env=env)
    wanted = turns(resident)
    assert min(answer.cached for answer in wanted[2:]) > 600
    resident.kill()
    tiered = start(*options, env=env, sidecar=sidecar)
    assert turns(tiered) == wanted
    settled(sidecar, tiered)
    tiered.kill()
    again = start(*options, env=env, sidecar=sidecar)
    for prompt, answer in zip((one, other), wanted[2:], strict=True):
        said = again.complete(prompt + tail, COUNT)
        assert said.cached >= answer.cached - 1
        assert alike(said, answer)


def test_a_sidecar_that_dies_in_between_changes_no_answer(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, PROMPT)
    first = stored(start, sidecar, LFM2, prompt)
    tiered = start(*LFM2, sidecar=sidecar)
    tiered.complete(text(rng, 100, first=5), COUNT)
    sidecar.kill()
    assert tiered.complete(prompt, COUNT) == first


def test_a_server_that_cuts_batches_otherwise_finds_no_state(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, PROMPT)
    stored(start, sidecar, LFM2, prompt)
    for more in (("-ub", "128"), ("-fa", "off")):
        other = start(*LFM2, *more, sidecar=sidecar)
        assert other.complete(prompt, COUNT).cached == 0, more
        other.kill()
    assert start(*LFM2, sidecar=sidecar).complete(prompt, COUNT).cached > 600


def test_no_state_is_stored_twice(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, PROMPT)
    tiered = start(*LFM2, sidecar=sidecar)
    said = tiered.complete(prompt, COUNT)
    settled(sidecar, tiered)
    names = {path.name for path in state_files(sidecar)}
    assert len(names) == 3  # two checkpoints of the prompt, and the end
    assert alike(tiered.complete(prompt, COUNT), said)
    settled(sidecar, tiered)
    assert {path.name for path in state_files(sidecar)} == names


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--swa-full",), "sliding windows that are kept whole (--swa-full)"),
        (("--ctx-checkpoints", "0"), "checkpoints are turned off (--ctx-checkpoints 0)"),
    ],
    ids=["windows kept whole", "no checkpoints"],
)
def test_what_no_state_can_serve_is_refused_by_name(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    options: tuple[str, ...],
    reason: str,
) -> None:
    tiered = start(*GEMMA3, *options, sidecar=sidecar)
    tiered.complete(text(rng, 100))
    stat = sidecar.wait(lambda s: any(not one.tiered for one in s.runners), "it says why not")
    assert stat.runners[0].reason == reason
