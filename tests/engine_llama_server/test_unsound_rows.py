"""Rows that are not what computing their tokens gives, under tokens that say they are: of another
answer's slot, out of the server's own cache of prompts, or rotated with a factor. None is stored.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_llama_server.between import SlowSidecar
from tests.engine_llama_server.server import LlamaServer, Starter, alike
from tests.engine_llama_server.test_llama_server import WAYS, blocks_of, text, wait_stored
from tests.engine_llama_server.test_states import COUNT, cold, settled
from tests.places import short_directory
from tests.sidecar import SidecarProcess

TWO = (*WAYS["two slots"], "-c", "4096")
ELSEWHERE = ("--rope-freq-base", "9000")  # other rows for the same tokens
LATE = 1.5  # seconds
FILE = "slot.bin"


@pytest.fixture
def rng() -> random.Random:
    return random.Random(41)


def stored(sidecar: SidecarProcess) -> int:
    return sum(one.blocks for one in sidecar.stat().namespaces)


def test_what_a_slot_has_to_store_is_not_read_from_another_answers_rows(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    patched: Path,
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """The second answer to a prompt gets the rows of the first one's slot. Here they are of unknown
    origin, and the slot that gets them had the same tokens, and has not stored them yet.
    """
    shape, *options = (*TWO, "--slot-save-path", f"{tmp_path}/")
    prompt, tail = text(rng, 300, first=5), text(rng, 20, first=6)
    resident = start(*TWO)
    resident.complete(prompt, 1)
    wanted = resident.complete([*prompt, 7], 4)
    resident.kill()
    foreign = start(*TWO, *ELSEWHERE, "--slot-save-path", f"{tmp_path}/")
    foreign.complete(prompt, 1, id_slot=0)
    foreign.slot_file("save", FILE)
    foreign.kill()
    real = sidecar.socket.with_name("s.engine")
    with (
        short_directory() as folder,
        SlowSidecar(folder / "s", real) as slow,
        LlamaServer(patched, model(shape), tmp_path / "l", *options, sidecar=slow.path) as tiered,
    ):
        tiered.complete(text(rng, 64, first=8), 1, id_slot=1)
        wait_stored(sidecar, tiered, 1)
        slow.seconds = LATE
        tiered.complete(prompt, 1, id_slot=1)
        tiered.slot_file("restore", FILE)
        said = tiered.complete_all(prompt + tail, 1, id_slot=0, n_cmpl=2)
        assert [one.cached for one in said] == [300, 300]
        assert stored(sidecar) == 1  # else there was nothing to go wrong
        slow.seconds = 0
        wait_stored(sidecar, tiered, 1 + blocks_of(300))
        settled(sidecar, tiered)
    fresh = start(*TWO, sidecar=sidecar)
    assert fresh.complete([*prompt, 7], 4) == wanted
    assert wanted.cached == 300


def test_rows_that_the_servers_own_cache_gives_a_slot_are_of_unknown_origin(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, tmp_path: Path
) -> None:
    """Also where the slot held the same tokens before, with rows that it had computed."""
    env = {"LLAMA_ARG_CACHE_RAM": "64"}
    options = (*TWO, "--slot-save-path", f"{tmp_path}/")
    prompt = text(rng, 300, first=5)
    short, long = prompt + text(rng, 60, first=6), prompt + text(rng, 700, first=7)
    foreign = start(*options, *ELSEWHERE)
    foreign.complete(short, 1, id_slot=0)
    foreign.slot_file("save", FILE)
    foreign.kill()

    sidecar.stop()
    tiered = start(*options, sidecar=sidecar, env=env)
    tiered.slot_file("restore", FILE)
    # Computed here, and not stored. Idle slots go into the server's own cache meanwhile.
    tiered.complete(long, 1, id_slot=1)
    sidecar.start()
    end = time.monotonic() + 30
    while not sidecar.stat().runners:
        assert time.monotonic() < end, tiered.log.read_text()[-2000:]
        tiered.complete(text(rng, 20, first=8), 1, id_slot=0)
        time.sleep(0.2)
    assert tiered.complete([*short, 9], 1, id_slot=1).cached == len(short)  # of them, not of `long`
    tiered.complete(text(rng, 64 * 3, first=10), 1, id_slot=0)  # behind it in the queue
    settled(sidecar, tiered)
    tiered.kill()
    asked = [*prompt, 9]
    said = start(*options, sidecar=sidecar).complete(asked, COUNT)
    assert alike(said, cold(start, TWO, asked))
    assert said.cached == 0


def test_a_shift_with_yarn_changes_the_rows_of_all_slots(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """It multiplies by a factor, also what it does not move."""
    yarn = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "128")
    options = (*WAYS["two slots"], "-c", "1024", "--context-shift", *yarn)
    prompt, tail = text(rng, 200, first=5), text(rng, 100, first=6)
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompt, 1, id_slot=1)
    wait_stored(sidecar, tiered, blocks_of(200))
    tiered.complete(text(rng, 400, first=7), 200, id_slot=0)
    assert "slot context shift" in tiered.log.read_text()
    assert tiered.complete(prompt + tail, 1, id_slot=1).cached == 200  # rows that were multiplied
    tiered.complete(text(rng, 64 * 3, first=8), 1, id_slot=0)
    settled(sidecar, tiered)
    tiered.kill()
    asked = [*prompt, *tail, 9]
    said = start(*options, sidecar=sidecar).complete(asked, COUNT)
    assert alike(said, cold(start, options, asked))
    assert said.cached == 200
