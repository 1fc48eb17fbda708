"""What the steps that restore call a success, with answers made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.engines.demo import COLD, RESTARTED, UNLOADED, DemoOutcome, DemoRow
from ollama_tiering.engines.drivers import Answer
from ollama_tiering.launch.ollama import Generated
from ollama_tiering.store import block_store_pb2 as pb
from scripts.gpuday import restoring
from scripts.gpuday.asking import sizes_of
from scripts.gpuday.steps import DONE, FAILED, Day, Outcome

PINNED = 10e9
DAY = Day(Path("out"), Path("work"), Path("ollama"))
DAY.outcomes = {"rates": Outcome(DONE, figures={"pinned_bytes_per_s": PINNED})}
COST = pb.RestoreReport(bytes=6 << 30, lookup_seconds=0.1, fetch_seconds=0.1, copy_seconds=0.7)


def row(label: str, restored: int, *, same: bool = True) -> DemoRow:
    answer = Answer(("a",), (), 0.5, 700, 0, restored, 700 - restored)
    must = label in (UNLOADED, RESTARTED)
    return DemoRow(label, answer, same, same, restored=must, must_agree=must)


def found(restored: int = 699, *, same: bool = True) -> restoring.Run:
    rows = (
        row(COLD, 0, same=False),
        *(row(label, restored, same=same) for label in (UNLOADED, RESTARTED)),
    )
    costs = [pb.RestoreReport(), *[COST if restored else pb.RestoreReport()] * 2]
    return restoring.Run(700, DemoOutcome("x", rows, one_answer=False), costs)


def given(monkeypatch: pytest.MonkeyPatch, run: restoring.Run, differ: int = 0) -> None:
    monkeypatch.setattr(restoring, "run", lambda *_: (run, differ))


def test_a_restore_into_vram_is_judged_by_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, found())
    outcome = restoring.restore(DAY)
    assert (outcome.status, outcome.why) == (DONE, "")
    assert outcome.bounds == {"restore": pytest.approx((6 << 30) / 0.7 / PINNED)}
    line = next(line for line in outcome.lines if UNLOADED in line)
    assert "| 6,144 | 100.0 | 100.0 | 700.0 | 9.20 | 0.92 | 7.16 |" in line


@pytest.mark.parametrize("step", [restoring.restore, restoring.tiering])
def test_another_answer_or_nothing_restored_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, step: object
) -> None:
    assert callable(step)
    for run, why in ((found(same=False), "differs"), (found(0), "nothing was restored")):
        given(monkeypatch, run)
        assert step(DAY).status == FAILED
        assert why in step(DAY).why


def test_the_gate_may_leave_what_is_stored_but_not_answer_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch, found(0))
    assert restoring.gate(DAY).status == DONE
    given(monkeypatch, found(same=False))
    assert restoring.gate(DAY).status == FAILED


def test_a_race_that_differs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, found(), 3)
    outcome = restoring.tiering(DAY)
    assert (outcome.status, outcome.why) == (FAILED, "3 answers differ in a race")


def test_two_conversations_in_a_race_are_answered_as_before() -> None:
    class Driver:
        asked = 0

        def generate(self, prompt: str, _: int) -> Generated:
            self.asked += 1
            return Generated(["another" if self.asked in (1, 9) else prompt[:9]])

    driver, sizes = Driver(), sizes_of(DAY)
    assert restoring.race(driver, sizes) == 1  # type: ignore[arg-type]
    assert driver.asked == sizes.race + 6
