"""The main loop serves other slots while one slot's rows are looked up, read and copied; and what
happens to a slot that waits.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine_llama_server.between import OtherVersion, SlowSidecar
from tests.engine_llama_server.server import Answer, LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import (
    PROMPT,
    WAYS,
    blocks_of,
    report,
    text,
    wait_stored,
)
from tests.places import short_directory
from tests.sidecar import SidecarProcess

LATE = 0.07  # seconds: a look-up that is just in time
TRIES = 6  # the machine may be busy with something else in some of them
OPTIONS = (*WAYS["two slots"], "-c", "8192")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(12)


@pytest.fixture
def slow(sidecar: SidecarProcess) -> Iterator[SlowSidecar]:
    with (
        short_directory() as folder,
        SlowSidecar(folder / "s", sidecar.socket.with_name("s.engine")) as between,
    ):
        yield between


@pytest.fixture
def behind(
    patched: Path, model: Callable[[str], Path], tmp_path: Path, slow: SlowSidecar
) -> Iterator[LlamaServer]:
    """llama-server whose sidecar is `slow`."""
    shape, *options = OPTIONS
    with LlamaServer(patched, model(shape), tmp_path / "l", *options, sidecar=slow.path) as server:
        yield server


class Neighbour:
    """A stream in the first slot. A context manager; then it has begun."""

    def __init__(self, server: LlamaServer, prompt: list[int]) -> None:
        self._tokens = server.stream(prompt, 3000, id_slot=0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._began = threading.Event()
        self._ending = False
        self.times: list[float] = []

    def __enter__(self) -> Neighbour:
        self._thread.start()
        assert self._began.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._thread.join(60)

    def _read(self) -> None:
        for at in self._tokens:
            self.times.append(at)
            if len(self.times) > 20:
                self._began.set()
            if self._ending:
                return

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens that came then."""
        gaps = [later - at for at, later in pairwise(self.times) if later > begin and at < end]
        assert gaps, "the stream has ended"
        return gaps


def test_a_neighbour_streams_while_a_prompt_is_looked_up(
    behind: LlamaServer, slow: SlowSidecar, rng: random.Random
) -> None:
    behind.complete(text(rng, 100), id_slot=1)
    longest = []
    with Neighbour(behind, text(rng, 100, first=3)) as neighbour:
        slow.seconds = LATE
        for first in range(TRIES):
            begin = time.monotonic()
            behind.complete(text(rng, 100, first=5 + first), 1, id_slot=1)
            took = time.monotonic() - begin
            assert took > LATE  # it was looked up
            longest.append(max(neighbour.gaps(begin, begin + LATE)))
        slow.seconds = 0
    print(f"longest gaps while a look-up takes {1e3 * LATE:.0f} ms: {longest}")
    assert min(longest) < LATE


def test_a_neighbour_streams_while_rows_come_back(start: Starter, rng: random.Random) -> None:
    """Out of files on a disk, which threads read and check meanwhile. That and copying would take
    the main loop longer than any gap between two tokens.
    """
    with (
        short_directory() as root,
        SidecarProcess(root, ram_gb=1.0, local_gb=1.0) as sidecar,
    ):
        longest_gaps(start, sidecar, rng)


def longest_gaps(start: Starter, sidecar: SidecarProcess, rng: random.Random) -> None:
    options = ("kv-wide", "-fa", "on", "-np", "2", "--no-kv-unified", "-c", "8192")
    prompt = text(rng, 2000)
    tiered = start(*options, sidecar=sidecar)
    tiered.complete(prompt, 1)
    wait_stored(sidecar, tiered, blocks_of(2000))
    tiered.kill()
    tiered = start(*options, sidecar=sidecar)
    spared = []
    with Neighbour(tiered, text(rng, 100, first=3)) as neighbour:
        for first in range(5, 5 + TRIES):
            begin = time.monotonic()
            cached = tiered.complete([*prompt, first], 1, id_slot=1).cached
            end = time.monotonic()
            assert cached == 2000
            tiered.complete([first], 1, id_slot=1)  # the slot forgets it
            copied = re.findall(r"reading ([\d.]+) ms, copying ([\d.]+) ms", tiered.log.read_text())
            gaps = neighbour.gaps(begin, end)
            spared.append(sum(map(float, copied[-1])) / 1e3 - max(gaps))
            print(
                f"125 MiB came back: reading {copied[-1][0]} ms, copying {copied[-1][1]} ms; "
                f"longest gap {1e3 * max(gaps):.0f} ms, median {1e3 * statistics.median(gaps):.0f}"
            )
    assert max(spared) > 0


def test_a_stopped_sidecar_costs_one_request_a_timeout_and_the_next_nothing(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    tiered = start(*OPTIONS, sidecar=sidecar)

    def seconds() -> float:
        begin = time.monotonic()
        tiered.complete(text(rng, 100, first=rng.randrange(1, 90)), 1)
        return time.monotonic() - begin

    firsts, others = [], []
    for requests in range(TRIES):
        usual = statistics.median(seconds() for _ in range(3))
        report(sidecar, tiered, 1 + 3 * requests)
        sidecar.send_signal(signal.SIGSTOP)
        try:
            firsts.append(seconds() - usual)
            others.append(statistics.median(seconds() for _ in range(3)) - usual)
        finally:
            sidecar.send_signal(signal.SIGCONT)
        time.sleep(0.5)  # it is connected again
    print(f"more than usual: {firsts}, then {others}")
    assert min(firsts) < 0.1
    assert min(others) < 0.02


def test_a_sidecar_that_is_absent_or_of_another_version_changes_nothing(
    start: Starter,
    rng: random.Random,
    patched: Path,
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    prompt = text(rng, 300)
    resident = start(*OPTIONS)
    wanted = [resident.complete(prompt), resident.complete([*prompt, 5, 6])]
    resident.kill()
    shape, *options = OPTIONS
    with short_directory() as folder, OtherVersion(folder / "s") as other:
        for name, path in {"absent": folder / "nobody", "version": other.path}.items():
            log = tmp_path / name
            with LlamaServer(patched, model(shape), log, *options, sidecar=path) as server:
                assert [server.complete(prompt), server.complete([*prompt, 5, 6])] == wanted


def leave(server: LlamaServer, slow: SlowSidecar, prompt: list[int]) -> None:
    """A client goes away while its slot waits for rows, and the server has noticed."""
    before = server.log.read_text().count("cancel task")
    slow.waiting.clear()
    slow.pending = True
    server.ask_and_leave(prompt, slow.waiting)
    end = time.monotonic() + 30
    while server.log.read_text().count("cancel task") == before:
        assert time.monotonic() < end
        time.sleep(0.02)
    slow.pending = False


def test_a_client_that_leaves_while_its_slot_waits(
    behind: LlamaServer, slow: SlowSidecar, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """The slot goes on with whatever comes next; what it held is still what it was."""
    held, prompt = text(rng, PROMPT, first=5), text(rng, PROMPT, first=6)
    behind.complete(prompt, id_slot=1)
    behind.complete(held, id_slot=1)
    wait_stored(sidecar, behind, 2 * blocks_of(PROMPT))
    wanted = behind.complete([*prompt, 7], id_slot=1)
    assert wanted.cached == PROMPT
    again = behind.complete([*held, 7], id_slot=1)
    assert again.cached == PROMPT
    leave(behind, slow, [*prompt, 8])
    assert behind.complete([*held, 7], id_slot=1) == again
    assert behind.complete([*prompt, 7], id_slot=1) == wanted


def test_rows_of_unknown_origin_are_not_stored_when_the_next_client_leaves(
    patched: Path,
    start: Starter,
    model: Callable[[str], Path],
    slow: SlowSidecar,
    sidecar: SidecarProcess,
    rng: random.Random,
    tmp_path: Path,
) -> None:
    """A slot that only waited still holds what it held, which is no better known than before."""
    shape, *usual = WAYS["flash attention"]
    options = (*usual, "-c", "2048", "--slot-save-path", f"{tmp_path}/")
    prompt = text(rng, 300)
    foreign = start(shape, *options, "--rope-freq-base", "9000")
    foreign.complete(prompt)
    foreign.slot_file("save", "slot.bin")
    foreign.kill()
    with LlamaServer(patched, model(shape), tmp_path / "l", *options, sidecar=slow.path) as tiered:
        tiered.complete(text(rng, 100, first=5))
        wait_stored(sidecar, tiered, blocks_of(100))
        tiered.slot_file("restore", "slot.bin")
        leave(tiered, slow, text(rng, 200, first=6))
        again = text(rng, 64 * 3, first=7)
        tiered.complete([*prompt, 8])
        tiered.complete(again)
        wait_stored(sidecar, tiered, blocks_of(100) + 3)
    fresh = start(shape, *options, sidecar=sidecar)
    assert fresh.complete(prompt).cached == 0


@pytest.mark.parametrize("several", [{"n_cmpl": 2}, {}])
def test_several_answers_and_several_prompts(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, several: dict[str, int]
) -> None:
    """The slot of a second answer waits for the first one's prompt, with stock's own state."""
    prompt, tail = text(rng, PROMPT), text(rng, 30)

    def ask(server: LlamaServer) -> list[Answer]:
        if several:
            return server.complete_all(prompt + tail, **several)
        return server.complete_all([prompt + tail, text(random.Random(1), 80, first=3)])

    resident = start(*OPTIONS)
    resident.complete(prompt, id_slot=0)
    wanted = ask(resident)
    resident.kill()
    tiered = start(*OPTIONS, sidecar=sidecar)
    tiered.complete(prompt, id_slot=0)
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    tiered.kill()
    tiered = start(*OPTIONS, sidecar=sidecar)
    said = ask(tiered)
    assert [one.cached for one in said] == [one.cached for one in wanted]
    assert [one.tokens for one in said] == [one.tokens for one in wanted]
    assert PROMPT in [one.cached for one in said]


def test_a_prompt_that_is_too_long_is_refused_as_in_stock(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    tiered = start(*WAYS["flash attention"], "-c", "512", sidecar=sidecar)
    prompt = text(rng, 400)
    tiered.complete(prompt)
    with pytest.raises(AssertionError, match="exceeds the available context size"):
        tiered.complete(prompt * 2)
    assert tiered.complete([*prompt, 5]).cached == 400
