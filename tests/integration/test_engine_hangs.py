"""A disk that hangs costs llama-server one wait in all, a few threads, and not its end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fake_engine import engine_socket
from tests.integration.engine_program import SANITIZERS, SECONDS, Talk, compiled
from tests.places import short_directory, tmpfs_directory
from tests.sidecar import SidecarProcess

STALL_MS = 1500
BLOCKS = 10
ROWS = 64 * BLOCKS
HANGING = "have 0 restored 0 reason 15"  # SHORTFALL_HANGING
MOST_MIB = 128  # that may be kept
MANY = 20  # requests: each of them would wait, and leave threads behind
READS = ["open", "pread", "close"]
WRITES = ["open", "pwrite", "close"]


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_slots", request.param, tmp_path_factory.mktemp("kvt"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    with (
        short_directory() as root,
        tmpfs_directory() as fast,
        SidecarProcess(root, ram_gb=0.5, fast=fast) as running,
    ):
        yield running


def speaking(program: Path, daemon: SidecarProcess, state_mib: int = 0) -> Talk:
    options = "128", str(MOST_MIB), str(state_mib), str(STALL_MS)
    return Talk(program, engine_socket(daemon.socket), *options)


def threads(talk: Talk) -> int:
    return int(talk.say("threads").split()[0])


def leases(daemon: SidecarProcess) -> int:
    return daemon.stat().open_leases


@pytest.mark.parametrize("state_mib", [0, 1])
@pytest.mark.parametrize("call", READS)
def test_a_read_that_hangs_is_waited_for_once(
    program: Path, daemon: SidecarProcess, call: str, state_mib: int
) -> None:
    first = random.randrange(1 << 30)
    with speaking(program, daemon, state_mib) as talk:
        talk.say("answer", 0, first, ROWS)
        talk.say("settle", BLOCKS + state_mib)
        talk.say("hang", call)
        said = talk.say("prompt", 1, first, ROWS + 1)
        assert said.endswith("reason 12")
        left, held = threads(talk), leases(daemon)
        began = time.monotonic()
        for _ in range(MANY):
            talk.say("lose", 1)
            assert talk.say("prompt", 1, first, ROWS + 1) == HANGING
        assert time.monotonic() - began < MANY * STALL_MS / 1000 / 2
        assert threads(talk) <= left
        assert leases(daemon) <= held
        talk.say("go", "on")
        deadline = time.monotonic() + SECONDS
        while talk.say("prompt", 1, first, ROWS + 1) != f"have 0 restored {ROWS} reason 0":
            assert time.monotonic() < deadline, "it goes on when the disk does"
            talk.say("lose", 1)
            time.sleep(0.1)


@pytest.mark.parametrize("call", [*READS, "statfs"])
def test_a_read_that_hangs_does_not_keep_the_program(
    program: Path, daemon: SidecarProcess, call: str
) -> None:
    first = random.randrange(1 << 30)
    with speaking(program, daemon) as talk:
        talk.say("answer", 0, first, ROWS)
        talk.say("settle", BLOCKS)
        if call == "statfs":
            talk.say("direct", 0)  # asked before blocks are read into cells
        talk.say("hang", call)
        assert "restored" in talk.say("prompt", 1, first, ROWS + 1)
        began = time.monotonic()
    assert time.monotonic() - began < SECONDS / 2


def test_prompts_that_are_given_up_leave_few_threads_on_a_disk_that_hangs(
    program: Path, daemon: SidecarProcess
) -> None:
    """Their clients go before it is known that it hangs."""
    first = random.randrange(1 << 30)
    with Talk(program, engine_socket(daemon.socket)) as talk:
        talk.say("answer", 0, first, ROWS)
        talk.say("settle", BLOCKS)
        talk.say("hang", "pread")
        before = threads(talk)
        for _ in range(3 * MANY):
            talk.say("begin", 1, first, ROWS + 1)
            talk.say("drop", 1)
        assert threads(talk) - before <= 16 * 4


@pytest.mark.parametrize("call", WRITES)
def test_a_write_that_hangs_takes_no_more_and_does_not_keep_the_program(
    program: Path, daemon: SidecarProcess, call: str
) -> None:
    first = random.randrange(1 << 30)
    other = first + (1 << 29)
    with speaking(program, daemon, 1) as talk:
        talk.say("hang", call)
        talk.say("answer", 0, first, ROWS)
        talk.say("answer", 1, other, ROWS)
        talk.say("shift", 1, 0)
        kept = MOST_MIB - 2 * BLOCKS - 3  # two states with their heads, and the second one's rows
        assert talk.say("room") == f"{kept} MiB"
        deadline = time.monotonic() + SECONDS
        while talk.say("room") != f"{MOST_MIB - 2} MiB":  # the thread reads its own job's state
            assert time.monotonic() < deadline
            talk.say("answer", 1, other, ROWS)
            talk.say("shift", 1, 0)
            time.sleep(0.05)
        talk.say("answer", 1, other, ROWS)
        assert talk.say("room") == f"{MOST_MIB - 2} MiB"  # nothing more is taken
        began = time.monotonic()
    assert time.monotonic() - began < SECONDS / 2
