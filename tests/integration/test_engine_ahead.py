"""What llama-server's library stores of a request that is still computed (llama_server/), with
slots made up, against a real sidecar: without the main loop, and none of it twice.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.contract.fake_engine import engine_socket
from tests.integration.engine_program import SANITIZERS, Talk, compiled
from tests.sidecar import SidecarProcess

PLANES = 4
STEP_MS = 20


def blocks(daemon: SidecarProcess) -> int:
    return sum(one.blocks for one in daemon.stat().namespaces)


def test_whole_blocks_are_stored_without_the_main_loop(talk: Talk, first: int) -> None:
    assert talk.say("compute", 0, first, 700, 0) == "handed 640"
    assert talk.say("written", 10) == "10 blocks"
    assert talk.say("prompt", 1, first, 641) == "have 0 restored 640 reason 0"


def test_nothing_is_handed_over_before_a_block_is_whole(talk: Talk, first: int) -> None:
    assert talk.say("compute", 0, first, 63, 0) == "handed 0"
    assert talk.say("compute", 0, first, 127, 64) == "handed 64"
    assert talk.say("done") == "0 blocks"


def test_parts_and_the_answer_are_stored_once_under_one_name(
    talk: Talk, daemon: SidecarProcess, first: int
) -> None:
    before = blocks(daemon)
    assert talk.say("compute", 0, first, 300, 0) == "handed 256"
    assert talk.say("compute", 0, first, 650, 256) == "handed 640"  # the first is not stored yet
    talk.say("answer", 0, first, 700)
    assert talk.say("settle", 11).startswith("11 blocks")
    assert talk.say("done") == "11 blocks"
    assert blocks(daemon) == before + 11
    assert talk.say("prompt", 1, first, 701) == "have 0 restored 700 reason 0"


def test_parts_go_on_behind_what_was_restored(
    talk: Talk, daemon: SidecarProcess, first: int
) -> None:
    talk.say("answer", 0, first, 640)
    talk.say("settle", 10)
    before = blocks(daemon)
    assert talk.say("prompt", 1, first, 641) == "have 0 restored 640 reason 0"
    assert talk.say("compute", 1, first, 1000, 640) == "handed 960"
    assert talk.say("written", 15) == "15 blocks"
    assert blocks(daemon) == before + 5


def test_what_was_handed_over_outlives_a_kill(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    with Talk(program, engine_socket(daemon.socket)) as talk:
        talk.say("compute", 0, first, 640, 0)
        talk.say("written", 10)
        talk.kill()
        talk.process.wait()
    with Talk(program, engine_socket(daemon.socket)) as talk:
        assert talk.say("prompt", 1, first, 641) == "have 0 restored 640 reason 0"


def test_a_part_takes_the_main_loop_a_block_at_a_time(talk: Talk, first: int) -> None:
    talk.say("slow", 6)  # a segment: a block takes longer than a step
    assert talk.say("compute", 0, first, 640, 0, STEP_MS) == "handed 64 more"
    assert talk.say("compute", 0, first, 640, 64, STEP_MS) == "handed 128 more"
    talk.say("slow", 0)
    assert talk.say("compute", 0, first, 640, 128) == "handed 640"
    assert talk.say("written", 10) == "10 blocks"
    assert talk.say("prompt", 1, first, 641) == "have 0 restored 640 reason 0"


def test_half_of_what_may_be_kept_is_left_to_slots_that_lose_rows(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    """Four blocks of 2 MiB may be kept, two of them of what is still computed."""
    with Talk(program, engine_socket(daemon.socket), "128", "8") as talk:
        assert talk.say("compute", 0, first, 640, 0) == "handed 128"
        assert talk.say("written", 2) == "2 blocks"
        assert talk.say("done") == "2 blocks"
        assert talk.say("room") == "8 MiB"


def test_parts_are_stored_as_they_were_when_they_were_handed_over(talk: Talk, first: int) -> None:
    """The slot has other rows at once: a context shift of another request."""
    assert talk.say("compute", 0, first, 640, 0) == "handed 640"
    talk.say("forget", 0, 0)
    assert talk.say("written", 10) == "10 blocks"
    assert talk.say("prompt", 1, first, 641) == "have 0 restored 640 reason 0"


@pytest.mark.parametrize("stored", [False, True])
def test_rows_that_were_computed_anew_are_another_history(
    talk: Talk, daemon: SidecarProcess, first: int, stored: bool
) -> None:
    """The same tokens; of what is stored of the first ones, only what comes before stays."""
    before = blocks(daemon)
    assert talk.say("compute", 0, first, 640, 0) == "handed 640"
    if stored:
        assert talk.say("done") == "10 blocks"
    talk.say("shift", 0, 330)
    assert talk.say("compute", 0, first, 640, 320) == "handed 640"
    assert talk.say("written", 15) == "15 blocks"
    assert talk.say("done") == "15 blocks"
    assert blocks(daemon) == before + 15


def test_without_memory_for_a_block_those_before_it_are_stored(talk: Talk, first: int) -> None:
    talk.say("throws", 2 * PLANES + 1)
    assert talk.say("compute", 0, first, 640, 0) == "handed 128"
    talk.say("throws", 1 << 20)
    assert talk.say("written", 2) == "2 blocks"
    assert talk.say("compute", 0, first, 640, 128) == "handed 640"
    assert talk.say("written", 10) == "10 blocks"


def test_rows_that_the_slot_does_not_hold_are_not_handed_over(talk: Talk, first: int) -> None:
    assert talk.say("compute", 0, first, 640, 0) == "handed 640"
    talk.say("written", 10)
    talk.say("lose", 0)
    assert talk.say("compute", 0, first, 0, 640) == "handed 640"
    assert talk.say("done") == "10 blocks"


def test_a_disk_that_hangs_is_given_nothing_more(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    with Talk(program, engine_socket(daemon.socket), "128", "128", "0", "200") as talk:
        talk.say("hang", "pwrite")
        assert talk.say("compute", 0, first, 640, 0) == "handed 640"
        for _ in range(20):  # there is room for as many
            said = talk.say("compute", 1, first + (1 << 29), 64, 0)
            if said == "handed 0":
                break
            time.sleep(0.05)
        talk.say("go", "on")
        assert said == "handed 0"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_parts", SANITIZERS[0], tmp_path_factory.mktemp("kvt"))


def simulated(program: Path, after: str, turn_ms: float, copy_ms: float, all_ms: int) -> list[int]:
    """How many parts, rows that were handed over, rows, cost, longest step, when the first one."""
    command = [str(program), after, str(turn_ms), str(copy_ms), str(all_ms)]
    said = subprocess.check_output(command, text=True)
    numbers = [int(one) for one in re.findall(r"\d+", said)]
    assert len(numbers) == 7, said
    parts, handed, rows, cost, _all, longest, first = numbers
    return [parts, handed, rows, cost, longest, first]


@pytest.mark.parametrize("seconds", [4, 10, 60, 600])
def test_a_hundredth_of_the_time_is_spent_and_little_is_behind(parts: Path, seconds: int) -> None:
    """A row each 20 ms, which takes 0.1 ms to copy."""
    count, handed, rows, cost, longest, first = simulated(parts, "", 20, 0.1, 1000 * seconds)
    assert cost <= 10 * seconds + 20
    assert longest <= 20
    assert handed >= 0.9 * rows
    assert count <= 64 * 10
    assert 2000 <= first < 2100


def test_where_copying_is_dear_little_is_copied(parts: Path) -> None:
    """A row takes as long to copy as to compute: a hundredth of them is."""
    _, handed, rows, cost, longest, _ = simulated(parts, "0", 5, 5, 60_000)
    assert cost <= 605
    assert longest <= 20 + 5
    assert 0.005 * rows < handed <= 0.011 * rows


@pytest.mark.parametrize(
    ("said", "wanted"), [("0", 0), ("0.5", 500), ("", 2000), ("soon", 2000), ("-1", 2000)]
)
def test_the_variable_says_when_the_first_part_is_due(parts: Path, said: str, wanted: int) -> None:
    first = simulated(parts, said, 10, 0.01, 5000)[-1]
    assert wanted <= first <= wanted + 20


def test_a_short_request_is_left_alone(parts: Path) -> None:
    assert simulated(parts, "", 20, 0.1, 1900)[0] == 0
