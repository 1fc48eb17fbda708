"""llama-server with the tiering: what a killed server knew comes back, bit for bit as stock's own
cache in memory would have had it; and what is not sure is not stored.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.engine_llama_server.server import Answer, LlamaServer, Starter, alike
from tests.sidecar import SidecarProcess

PROMPT = 700
WORDS = range(1, 90)  # tokens that are text

WAYS = {
    "flash attention": ("llama-tiny", "-fa", "on", "-np", "1"),
    "V transposed": ("llama-tiny", "-fa", "off", "-np", "1"),
    "q8_0": ("llama-tiny", "-fa", "on", "-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
    "q4_0": ("llama-tiny", "-fa", "on", "-np", "1", "-ctk", "q4_0", "-ctv", "q4_0"),
    "flash attention if it can": ("llama-tiny", "-fa", "auto", "-np", "4", "--no-kv-unified"),
    "two slots": ("llama-tiny", "-fa", "on", "-np", "2", "--no-kv-unified"),
    "shared cells": ("llama-tiny", "-fa", "on", "-np", "2", "-kvu"),
    "as many slots as llama-server likes": ("llama-tiny", "-fa", "on"),
    "drafts of n-grams": ("llama-tiny", "-fa", "on", "-np", "1", "--spec-type", "ngram-simple"),
    "biases": ("qwen2-tiny", "-fa", "on", "-np", "1"),
    "positions of several dimensions": ("qwen2vl-tiny", "-fa", "on", "-np", "1"),
    "latent": ("mla-tiny", "-fa", "on", "-np", "1"),
    "latent, no flash attention": ("mla-tiny", "-fa", "off", "-np", "1"),
    "latent, q8_0": ("mla-tiny", "-fa", "on", "-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
    "latent, two slots": ("mla-tiny", "-fa", "on", "-np", "2", "--no-kv-unified"),
}


@pytest.fixture
def rng() -> random.Random:
    return random.Random(11)


def text(rng: random.Random, count: int, *, first: int | None = None) -> list[int]:
    """`first`: so that two of them differ from their first token on."""
    tokens = [rng.choice(WORDS) for _ in range(count)]
    return tokens if first is None else [first, *tokens[1:]]


def blocks_of(rows: int) -> int:
    return -(-rows // 64)


def wait_stored(sidecar: SidecarProcess, server: LlamaServer, blocks: int) -> None:
    """Until so many are stored, of all servers."""

    def stored(stat: adm.StatResponse) -> bool:
        return sum(one.blocks for one in stat.namespaces) >= blocks

    sidecar.wait(stored, f"{blocks} blocks are stored\n{server.log.read_text()[-3000:]}", 30)


def report(sidecar: SidecarProcess, server: LlamaServer, requests: int) -> pb.RunnerReport:
    assert server.process is not None
    pid = server.process.pid

    def told(stat: adm.StatResponse) -> bool:
        return any(one.pid == pid and one.requests >= requests for one in stat.runners)

    stat = sidecar.wait(told, "the request is reported")
    return next(one for one in stat.runners if one.pid == pid)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_kill_the_answer_is_that_of_the_resident_cache(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, way: str
) -> None:
    options = (*WAYS[way], "-c", "4096")
    prompt = text(rng, PROMPT)
    one, other = text(rng, 40, first=3), text(rng, 40, first=4)

    resident = start(*options)
    first = resident.complete(prompt + one)
    hit = resident.complete(prompt + other)
    longer = resident.complete(prompt + other + list(hit.tokens) + one)
    assert hit.cached == PROMPT
    resident.kill()

    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(prompt + one) == first
    wait_stored(sidecar, tiered, blocks_of(PROMPT + 40))
    tiered.kill()

    again = start(*options, sidecar=sidecar)
    assert again.complete(prompt + other) == hit  # also as many tokens from the cache
    told = report(sidecar, again, 1)
    assert (told.restored_tokens, told.prompt_tokens) == (PROMPT, PROMPT + 40)
    wait_stored(sidecar, again, blocks_of(PROMPT + 40) + 2)
    again.kill()

    third = start(*options, sidecar=sidecar)
    assert third.complete(prompt + other + list(hit.tokens) + one) == longer
    assert longer.cached > PROMPT + 40


def test_the_same_prompt_again_computes_its_last_token(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, 256)  # whole blocks
    tiered = start(*WAYS["flash attention"], "-c", "2048", sidecar=sidecar)
    tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(256))
    again = tiered.complete(prompt)  # stock's own hit
    assert again.cached == 255
    tiered.kill()
    tiered = start(*WAYS["flash attention"], "-c", "2048", sidecar=sidecar)
    assert tiered.complete(prompt) == again


def test_a_conversation_that_loses_its_slot_at_once_is_stored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """The losing case of one slot and two users: nobody waits between two prompts."""
    options = (*WAYS["flash attention"], "-c", "4096")
    conversations = [text(rng, PROMPT, first=first) for first in (5, 6, 7)]
    tiered = start(*options, sidecar=sidecar)
    for conversation in conversations:
        tiered.complete(conversation)
    wait_stored(sidecar, tiered, len(conversations) * blocks_of(PROMPT))
    for conversation in conversations:
        assert tiered.complete([*conversation, 8, 9]).cached == PROMPT


def test_beside_the_servers_own_cache_of_prompts(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """It swaps whole slots; what it swaps in is not stored again, and nothing else changes."""
    options = (*WAYS["flash attention"], "-c", "4096")
    env = {"LLAMA_ARG_CACHE_RAM": "64"}
    one, other = text(rng, PROMPT, first=5), text(rng, PROMPT, first=6)
    tail = text(rng, 30, first=7)

    def turns(server: LlamaServer) -> list[Answer]:
        return [server.complete(prompt) for prompt in (one, other, one + tail, other + tail)]

    resident = start(*options, env=env)
    wanted = turns(resident)
    assert [answer.cached for answer in wanted[2:]] == [PROMPT, PROMPT]
    resident.kill()
    tiered = start(*options, env=env, sidecar=sidecar)
    assert turns(tiered) == wanted
    wait_stored(sidecar, tiered, 2 * blocks_of(PROMPT))
    tiered.kill()
    again = start(*options, env=env, sidecar=sidecar)
    assert [again.complete(prompt + tail) for prompt in (one, other)] == wanted[2:]


def test_with_two_slots_each_gets_its_own_rows(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    options = (*WAYS["two slots"], "-c", "4096")
    prompts = [text(rng, PROMPT, first=first) for first in (5, 6)]
    tails = text(rng, 30, first=7), text(rng, 30, first=8)
    resident = start(*options)
    for slot, prompt in enumerate(prompts):
        resident.complete(prompt + tails[0], id_slot=slot)
    hits = [resident.complete(p + tails[1], id_slot=slot) for slot, p in enumerate(prompts)]
    resident.kill()
    tiered = start(*options, sidecar=sidecar)
    for slot, prompt in enumerate(prompts):
        tiered.complete(prompt + tails[0], id_slot=slot)
    wait_stored(sidecar, tiered, 2 * blocks_of(PROMPT + 30))
    tiered.kill()
    tiered = start(*options, sidecar=sidecar)
    # Into the other slot than it came from.
    said = [tiered.complete(p + tails[1], id_slot=1 - slot) for slot, p in enumerate(prompts)]
    assert said == hits


def test_a_client_that_wants_no_cache_gets_none(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, PROMPT)
    tiered = start(*WAYS["flash attention"], "-c", "2048", sidecar=sidecar)
    cold = tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    tiered.kill()
    tiered = start(*WAYS["flash attention"], "-c", "2048", sidecar=sidecar)
    assert tiered.complete(prompt, cache_prompt=False) == cold
    assert cold.cached == 0


def test_behind_a_context_shift_nothing_is_stored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """The rows behind it were computed with other tokens before them, and rotated. What came before
    it is stored as it was.
    """
    options = (*WAYS["flash attention"], "-c", "512", "--context-shift", "--keep", "4")
    prompt = text(rng, 400)
    resident = start(*options)
    resident.complete(prompt + text(rng, 20, first=5), 4)
    tail = text(rng, 20, first=6)
    hit = resident.complete(prompt + tail, 4)
    resident.kill()

    tiered = start(*options, sidecar=sidecar)
    # Long enough for two shifts, and then a good part of the context again.
    said = tiered.complete(prompt, 600)
    assert len(said.tokens) == 600
    wait_stored(sidecar, tiered, blocks_of(511))
    tiered.kill()

    again = start(*options, sidecar=sidecar)
    assert again.complete(prompt + tail, 4) == hit
    assert hit.cached == 400
    # What the slot held in the end: n_keep tokens, and all that came behind the second shift. One
    # more is kept where the model's prompts begin with a special token.
    for keep in (4, 5):
        shifted = prompt[:keep] + list(said.tokens[106 + keep : 599])
        assert again.complete(shifted, 4).cached <= 5
    assert report(sidecar, again, 3).restored_tokens <= 401


def test_rows_of_unknown_origin_are_not_stored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, tmp_path: Path
) -> None:
    """A file of a slot that computed other bits: its tokens say nothing of its rows."""
    options = (*WAYS["flash attention"], "-c", "2048", "--slot-save-path", f"{tmp_path}/")
    prompt = text(rng, 300)
    foreign = start(*options, "--rope-freq-base", "9000")
    foreign.complete(prompt)
    foreign.slot_file("save", "slot.bin")
    foreign.kill()
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(text(rng, 100, first=5))  # the slot is known, with other rows
    wait_stored(sidecar, tiered, blocks_of(100))
    tiered.slot_file("restore", "slot.bin")
    assert tiered.complete(prompt + text(rng, 30)).cached == 300
    again = text(rng, 64 * 3, first=6)
    tiered.complete(again)  # behind it in the queue: stored when that is settled
    wait_stored(sidecar, tiered, blocks_of(100) + 3)
    tiered.kill()
    fresh = start(*options, sidecar=sidecar)
    assert fresh.complete(prompt).cached == 0
    assert fresh.complete([*again, 7]).cached == 64 * 3


def test_rows_that_the_server_moves_are_not_stored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """Stock moves what it has of a prompt without its beginning (`n_cache_reuse`)."""
    options = (*WAYS["flash attention"], "-c", "2048")
    prompt = text(rng, 300, first=5)
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(300))
    assert tiered.complete(prompt[100:], n_cache_reuse=64).cached > 100
    again = text(rng, 64 * 3, first=6)
    tiered.complete(again)
    wait_stored(sidecar, tiered, blocks_of(300) + 3)
    tiered.kill()
    fresh = start(*options, sidecar=sidecar)
    assert fresh.complete(prompt[100:]).cached == 0
    assert fresh.complete([*again, 7]).cached == 64 * 3


def test_a_cache_of_another_kind_is_refused_by_name(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    options = ("gemma3-tiny", "--swa-full", "-fa", "on", "-np", "1", "-c", "2048")
    prompt = text(rng, 300)
    resident = start(*options)
    cold = resident.complete(prompt)
    resident.kill()
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(prompt) == cold
    stat = sidecar.wait(lambda s: any(not one.tiered for one in s.runners), "it says why not")
    assert [one.reason for one in stat.runners] == [
        "sliding windows that are kept whole (--swa-full)"
    ]


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (("gemma3-tiny", "-fa", "on"), "sliding windows"),
        (("llama-tiny", "--context-shift"), "a context shift"),
        (("llama-tiny", "--cache-reuse", "64"), "--cache-reuse"),
    ],
    ids=["windows", "shift", "reuse"],
)
def test_slots_that_share_cells_are_refused_with(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, way: tuple[str, ...], why: str
) -> None:
    tiered = start(*way, "-np", "2", "--kv-unified", "-c", "2048", sidecar=sidecar)
    tiered.complete(text(rng, 100))
    stat = sidecar.wait(lambda s: any(not one.tiered for one in s.runners), "it says why not")
    assert stat.runners[0].reason == f"slots that share cells (-kvu), with {why}"


def test_slots_that_share_cells_get_their_own_rows(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """Cells of the other slot lie between, and may cut attention otherwise: last bits differ."""
    prompts = [text(rng, PROMPT, first=first) for first in (5, 6)]
    tail = text(rng, 30, first=9)

    def ask(server: LlamaServer, *more: int) -> list[Answer]:
        return [server.complete([*p, *more], id_slot=slot) for slot, p in enumerate(prompts)]

    options = (*WAYS["shared cells"], "-c", "2048")
    resident = start(*options)
    ask(resident)
    hits = ask(resident, *tail)
    resident.kill()
    tiered = start(*options, sidecar=sidecar)
    ask(tiered)
    wait_stored(sidecar, tiered, 2 * blocks_of(PROMPT))
    tiered.kill()
    said = ask(start(*options, sidecar=sidecar), *tail)
    assert [one.cached for one in said] == [one.cached for one in hits] == [PROMPT, PROMPT]
    assert all(map(alike, said, hits))


def test_drafts_of_a_model_with_states_are_refused(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    way = ("lfm2-tiny", "-fa", "on", "-np", "1", "--spec-type", "ngram-simple", "-c", "2048")
    start(*way, sidecar=sidecar).complete(text(rng, 100))
    stat = sidecar.wait(lambda s: any(not one.tiered for one in s.runners), "it says why not")
    assert stat.runners[0].reason == "speculative decoding"


def test_rows_of_an_answer_that_was_drafted_come_back(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """Drafts of n-grams: a tiny model repeats itself, so they are made. What was not accepted is no
    row of the conversation.
    """
    options = (*WAYS["drafts of n-grams"], "-c", "2048")
    prompt, more = text(rng, 20) * 15, text(rng, 20, first=4)

    resident = start(*options)
    first = resident.complete(prompt, 200)
    assert first.drafted > 0
    turn = [*prompt, *first.tokens, *more]
    hit = resident.complete(turn)
    assert hit.cached > 450
    resident.kill()
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(prompt, 200) == first
    wait_stored(sidecar, tiered, blocks_of(499))
    tiered.kill()
    again = start(*options, sidecar=sidecar)
    assert again.complete(turn) == hit


def test_what_another_slot_leaves_of_shared_cells_is_filled(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """llama-server takes the other slot's cells when the rest of the prompt needs them. The same
    rows in the same cells of a stock server give the answer that is compared with.
    """
    options = (*WAYS["shared cells"], "-c", "2048")
    other, prompt = (text(rng, 1430, first=first) for first in (7, 8))
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompt, id_slot=1)
    wait_stored(sidecar, tiered, blocks_of(1430))
    tiered.kill()
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(other, 1, id_slot=0)
    said = tiered.complete(prompt, id_slot=1)
    assert 0 < said.cached < 1400
    resident = start(*options)
    resident.complete(other, 1, id_slot=0)
    resident.complete(prompt[: said.cached], 1, id_slot=1)
    hit = resident.complete(prompt, id_slot=1)
    assert hit.cached == said.cached
    assert alike(said, hit)


def test_of_latent_attention_one_row_of_each_layer_is_stored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """K and V are one row (MLA): llama.cpp has no tensor of V."""
    tiered = start(*WAYS["latent"], "-c", "2048", sidecar=sidecar)
    tiered.complete(text(rng, 300))
    wait_stored(sidecar, tiered, blocks_of(300))
    paths = list(sidecar.ram_dir.rglob("*.kvb"))
    assert len(paths) == blocks_of(300)
    for path in paths:
        data = path.read_bytes()
        meta = read_meta(buffer_reader(data), len(data))
        assert [one.kind for one in meta.segments] == [pb.SEGMENT_KIND_K] * 4
    (description,) = sidecar.ram_dir.rglob("namespace.json")
    layers = json.loads(description.read_text())["layers"].split(";")
    assert {layer.rpartition(":")[2] for layer in layers} == {"0"}, "V has no dimension"


def damage(sidecar: SidecarProcess) -> int:
    """One bit of the last segment of each file."""
    paths = [*sidecar.ram_dir.rglob("*.kvb"), *sidecar.local_dir.rglob("*.kvb")]
    for path in paths:
        path.chmod(0o600)
        with path.open("r+b") as opened:
            opened.seek(-4000, 2)
            byte = opened.read(1)[0]
            opened.seek(-4000, 2)
            opened.write(bytes([byte ^ 0x10]))
        path.chmod(0o400)
    return len(paths)


def test_a_damaged_block_is_a_miss(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    options = (*WAYS["flash attention"], "-c", "2048")
    prompt = text(rng, 640)
    tiered = start(*options, sidecar=sidecar)
    cold = tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(640))
    sidecar.wait_written()
    tiered.kill()
    assert damage(sidecar) >= 10
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(prompt) == cold
    assert report(sidecar, tiered, 1).restored_tokens == 0


def test_another_setting_that_changes_bits_finds_nothing(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, 300)
    tiered = start(*WAYS["flash attention"], "-c", "2048", sidecar=sidecar)
    tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(300))
    tiered.kill()
    settings = (("-fa", "off"), ("--rope-freq-base", "9000"), ("-ctk", "q8_0"), ("-ub", "128"))
    threads = (("-t", "2", "-tb", "1"), ("-tb", "2"))
    for more in settings + threads:
        other = start(*WAYS["flash attention"], *more, "-c", "2048", sidecar=sidecar)
        assert other.complete(prompt).cached == 0, more
        other.kill()
    same = start(*WAYS["flash attention"], "-c", "1024", sidecar=sidecar)  # the size changes none
    assert same.complete(prompt).cached == 299


def test_another_salt_finds_nothing_and_the_same_one_everything(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, 300)
    options = (*WAYS["flash attention"], "-c", "2048")

    def cached(salt: str, namespaces: int) -> int:
        server = start(*options, sidecar=sidecar, env={"OLLAMA_KV_TIER_SALT": salt})
        found = server.complete(prompt).cached
        wait_stored(sidecar, server, namespaces * blocks_of(300))
        server.kill()
        return found

    assert cached("pepper", 1) == 0
    assert cached("", 2) == 0
    assert cached("pepper", 2) == 299
    kept = [p for p in sidecar.root.rglob("*") if p.is_file() and b"pepper" in p.read_bytes()]
    assert kept == []


def test_a_stopped_sidecar_costs_one_timeout(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    options = (*WAYS["flash attention"], "-c", "2048")
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(text(rng, 100))
    report(sidecar, tiered, 1)
    sidecar.send_signal(signal.SIGSTOP)
    try:
        seconds = []
        for first in (5, 6, 7):
            began = time.monotonic()
            tiered.complete(text(rng, 100, first=first))
            seconds.append(time.monotonic() - began)
    finally:
        sidecar.send_signal(signal.SIGCONT)
    # A bound that holds beside other tests; the exact 80 ms are test_engine_client's.
    assert max(seconds) < 5


def test_without_the_variable_the_sidecar_never_hears_of_it(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    patched: Path,
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    prompt = text(rng, 300)
    resident = start(*WAYS["flash attention"], "-c", "2048")
    answers: list[Answer] = [resident.complete(prompt), resident.complete(prompt)]
    resident.kill()
    shape, *options = WAYS["flash attention"]
    with LlamaServer(patched, model(shape), tmp_path / "log", *options, "-c", "2048") as off:
        assert [off.complete(prompt), off.complete(prompt)] == answers
    assert not sidecar.stat().runners
    assert "kv tiering" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("no-flash-attention", WAYS["V transposed"]),
        ("quantised", WAYS["q4_0"]),
        ("slots", WAYS["two slots"]),
        ("latent", WAYS["latent"]),
        ("shared-cells", WAYS["shared cells"]),
        ("axes", WAYS["positions of several dimensions"]),
        ("context-shift", (*WAYS["flash attention"], "--context-shift")),
        ("windows", ("gemma3-tiny", "-fa", "on", "-np", "1")),
        ("states", ("lfm2-tiny", "-fa", "on", "-np", "1")),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_kind_that_failed_the_self_test_is_refused_and_no_other(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, kind: str, way: tuple[str, ...]
) -> None:
    prompt = text(rng, 200)
    env = {"OLLAMA_KV_TIER_REFUSED_KINDS": f"other,{kind}"}
    refused = start(*way, "-c", "2048", sidecar=sidecar, env=env)
    refused.complete(prompt)
    stat = sidecar.wait(lambda s: any(not one.tiered for one in s.runners), "it says why not")
    assert {one.reason for one in stat.runners} == {
        f"{kind} failed the self-test with this llama.cpp"
    }
    assert not stat.namespaces
    refused.kill()
    tiered = start(*WAYS["flash attention"], "-c", "2048", sidecar=sidecar, env=env)
    tiered.complete(prompt)
    wait_stored(sidecar, tiered, blocks_of(200))
