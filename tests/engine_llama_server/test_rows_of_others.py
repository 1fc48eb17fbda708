"""Rows that came into a slot by another way than by computing its tokens there, and a model that is
loaded again: nothing of it is stored under a name that it has not, and nothing is lost by it.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_llama_server.server import LlamaServer, Starter, alike
from tests.engine_llama_server.test_llama_server import WAYS, blocks_of, report, text, wait_stored
from tests.engine_llama_server.test_states import COUNT, GEMMA3, cold, settled
from tests.sidecar import SidecarProcess

ONE = (*WAYS["flash attention"], "-c", "2048")
TWO = (*WAYS["two slots"], "-c", "4096")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(31)


def test_a_slots_file_with_the_very_tokens_of_the_slot_is_of_unknown_origin(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, tmp_path: Path
) -> None:
    options = (*ONE, "--slot-save-path", f"{tmp_path}/")
    prompt, tail = text(rng, 300), text(rng, 60, first=5)
    foreign = start(*options, "--rope-freq-base", "9000")
    foreign.complete(prompt, 1)
    foreign.slot_file("save", "slot.bin")
    foreign.kill()
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompt, 1)
    wait_stored(sidecar, tiered, blocks_of(300))
    tiered.slot_file("restore", "slot.bin")
    assert tiered.complete(prompt + tail, 1).cached == 300
    again = text(rng, 64 * 3, first=6)
    tiered.complete(again)  # behind it in the queue: stored when that is settled
    wait_stored(sidecar, tiered, blocks_of(300) + 3)
    tiered.kill()
    fresh = start(*options, sidecar=sidecar)
    assert fresh.complete([*prompt, *tail, 7], 1).cached == 300
    assert fresh.complete([*again, 7], 1).cached == 64 * 3


@pytest.mark.parametrize("slot", [0, 1])
def test_rows_that_one_slot_is_to_get_of_another_come_before_those_that_are_restored(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, slot: int
) -> None:
    """Of a second answer to one prompt, llama.cpp copies the rows with the next batch only."""
    prompt, tail = text(rng, 300), text(rng, 30, first=5)
    other = text(rng, 400, first=7)
    resident = start(*TWO)
    resident.complete(prompt, 1, id_slot=slot)
    wanted = resident.complete(prompt + tail, 4, id_slot=slot)
    resident.kill()
    assert wanted.cached == 300
    tiered = start(*TWO, sidecar=sidecar)
    tiered.complete(prompt, 1, id_slot=slot)
    wait_stored(sidecar, tiered, blocks_of(300))
    tiered.kill()
    tiered = start(*TWO, sidecar=sidecar)
    assert len(tiered.complete_all(other, 1, n_cmpl=2)) == 2  # both have ended with their prompt
    assert tiered.complete(prompt + tail, 4, id_slot=slot) == wanted
    assert alike(tiered.complete(prompt + tail, 4, id_slot=1 - slot), wanted)


def test_rows_that_came_from_another_slot_are_not_stored_as_this_ones(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """What a slot had to store when it became that of a second answer is of its own rows."""
    first, second = text(rng, 64 * 6), text(rng, 64 * 5, first=6)
    tiered = start(*TWO, sidecar=sidecar)
    for slot in (0, 1):
        tiered.complete([*first[: 64 * 4], slot + 3, *first], 1, id_slot=slot)
    tiered.complete_all(second, 1, n_cmpl=2)
    settled(sidecar, tiered)
    tiered.kill()
    fresh, cold = start(*TWO, sidecar=sidecar), start(*TWO)
    for slot in (0, 1):
        prompt = [*first[: 64 * 4], slot + 3, *first]
        said = fresh.complete([*prompt, 9], 4, id_slot=slot)
        cold.complete(prompt, 1, id_slot=slot)
        assert said.bits == cold.complete([*prompt, 9], 4, id_slot=slot).bits
        assert said.cached >= 64 * 4


def test_a_conversation_shorter_than_a_window_goes_on_as_if_it_were_resident(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """There the server goes on at a checkpoint, whatever rows its windows hold. Stock makes none at
    the end of an answer, so that its own cache goes on a little earlier.
    """
    prompt, more = text(rng, 90), text(rng, 12, first=3)
    resident = start(*GEMMA3)
    first = resident.complete(prompt, 6)
    second = [*prompt, *first.tokens, *more]
    wanted = resident.complete(second, COUNT)
    resident.kill()

    tiered = start(*GEMMA3, sidecar=sidecar)
    assert tiered.complete(prompt, 6) == first
    settled(sidecar, tiered)
    tiered.kill()
    tiered = start(*GEMMA3, sidecar=sidecar)
    said = tiered.complete(second, COUNT)
    assert said.cached >= wanted.cached > 64
    assert report(sidecar, tiered, 1).restored_tokens >= said.cached
    assert alike(said, wanted)
    assert alike(said, cold(start, GEMMA3, second))


def test_windows_of_as_many_slots_only(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """llama.cpp reads a state of windows only into a cache of as many streams as it came from."""
    shape, *options = GEMMA3
    prompt = text(rng, 300)
    for slots in ("1", "2"):
        given = [slots if one == "1" else one for one in options]
        tiered = start(shape, *given, "--no-kv-unified", sidecar=sidecar)
        assert tiered.complete([*prompt, 7], 1).cached == 0
        settled(sidecar, tiered)
        tiered.kill()
    assert len(sidecar.stat().namespaces) == 2


def test_where_nothing_can_be_moved_prompts_are_stored_and_come_back(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """With `--cache-reuse` the server moves rows behind those that a prompt begins with."""
    options, prompt = (*ONE, "--cache-reuse", "64"), text(rng, 300)
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompt, 1)
    wait_stored(sidecar, tiered, blocks_of(300))
    tiered.kill()
    resident = start(*options)
    resident.complete(prompt, 1)
    wanted = resident.complete([*prompt, 7, 8], 4)
    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete([*prompt, 7, 8], 4) == wanted
    assert wanted.cached == 300


@pytest.mark.parametrize("how", ["replaced", "gone"])
def test_a_models_file_that_is_another_one_than_when_it_was_loaded(
    patched: Path,
    model: Callable[[str], Path],
    sidecar: SidecarProcess,
    rng: random.Random,
    tmp_path: Path,
    how: str,
) -> None:
    shape, *options = ONE
    file = tmp_path / "model.gguf"
    shutil.copyfile(model(shape), file)
    engine = sidecar.socket.with_name("s.engine")
    with LlamaServer(patched, file, tmp_path / "log", *options, sidecar=engine) as server:
        file.unlink()
        if how == "replaced":
            shutil.copyfile(model(shape), file)
        assert server.complete(text(rng, 100), 1).cached == 0
        stat = sidecar.wait(lambda s: any(not one.tiered for one in s.runners), "it says why not")
        reasons = {one.reason for one in stat.runners}
        assert reasons == {"the model's file is another one than when it was loaded"}
        assert not stat.namespaces


def test_a_server_that_has_slept_goes_on_from_the_store(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """Asleep it has no model; then it loads it again, and knows nothing of its rows."""
    prompt, tail = text(rng, 300), text(rng, 20, first=5)
    resident = start(*ONE)
    resident.complete(prompt, 1)
    wanted = resident.complete(prompt + tail, 4)
    resident.kill()
    tiered = start(*ONE, "--sleep-idle-seconds", "2", sidecar=sidecar)
    tiered.complete(prompt, 1)
    wait_stored(sidecar, tiered, blocks_of(300))
    for _ in range(2):
        asleep = tiered.log.read_text().count("entering sleeping state")
        end = time.monotonic() + 30
        while tiered.log.read_text().count("entering sleeping state") == asleep:
            assert time.monotonic() < end, tiered.log.read_text()[-2000:]
            time.sleep(0.1)
        said = tiered.complete(prompt + tail, 4)
        assert said.cached >= 300
        assert alike(said, wanted)
        assert said.cached > 300 or said == wanted
        settled(sidecar, tiered)


def test_another_option_or_variable_that_chooses_kernels_finds_nothing(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, 300)
    ways: list[tuple[tuple[str, ...], dict[str, str | None]]] = [
        ((), {}),
        (("--no-repack",), {}),
        (("--no-op-offload",), {}),
        ((), {"GGML_CPU_DISABLE_FUSION": "1"}),
    ]
    for options, env in ways:
        tiered = start(*ONE, *options, sidecar=sidecar, env=env)
        assert tiered.complete([*prompt, 7], 1).cached == 0
        settled(sidecar, tiered)
        tiered.kill()
    again = start(*ONE, sidecar=sidecar, env={"GGML_BACKEND_PATH": "/nowhere"})
    assert again.complete([*prompt, 7], 1).cached == 300
