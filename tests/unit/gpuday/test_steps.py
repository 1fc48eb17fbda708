"""The loop of scripts/gpu_day: it resumes, keeps time, and goes on after what failed. Its report
never says more than was measured.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path

from scripts.gpuday import command, report, steps
from scripts.gpuday.report import BOUNDS
from scripts.gpuday.steps import BEGUN, DONE, FAILED, LACKING, Day, Outcome, Step


def step(name: str, *needs: str) -> Step:
    return Step(name, "a module", f"the step {name}", 100, 10, needs)


GROUPS = ((step("a"),), (step("b", "a"), step("c", "a")), (step("d", "b"),))
STEPS = [one for group in GROUPS for one in group]


@dataclass
class Machine:
    """Steps take a second each of its clock, or what `seconds` says."""

    left: float = 1000.0
    day: Day = field(default_factory=lambda: Day(Path("out"), Path("work")))
    results: dict[str, Outcome] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    seen: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        """The limit of each step that was begun."""
        ran: dict[str, float] = {}

        def launch(one: Step, limit_s: float) -> Outcome:
            ran[one.name] = limit_s
            self.left -= self.seconds.get(one.name, 1)
            return self.results.get(one.name, Outcome(DONE))

        def written() -> None:
            self.seen.append(self.statuses())

        steps.run(self.day, GROUPS, launch, lambda: self.left, written)
        return ran

    def statuses(self) -> dict[str, str]:
        return {name: one.status for name, one in self.day.outcomes.items()}


def test_the_state_is_written_before_and_after_each_step_and_groups_run_together() -> None:
    machine = Machine()
    assert set(machine.run()) == set("abcd")
    assert machine.statuses() == dict.fromkeys("abcd", DONE)
    assert machine.seen[:2] == [{"a": BEGUN}, {"a": DONE}]
    assert machine.seen[2] == {"a": DONE, "b": BEGUN, "c": BEGUN}
    assert not machine.run()  # what is done is not done again


def test_a_step_that_fails_ends_no_other_and_is_not_tried_again() -> None:
    machine = Machine(results={"b": Outcome(FAILED, why="no luck", cure="pray")})
    machine.run()
    assert machine.statuses() == {"a": DONE, "b": FAILED, "c": DONE, "d": LACKING}
    lacking = machine.day.outcomes["d"]
    assert (lacking.why, lacking.cure) == ("no luck", "pray")
    assert not machine.run()


def test_a_step_without_its_time_is_not_begun_and_comes_first_the_next_time() -> None:
    machine = Machine(left=30, seconds={"a": 25})
    machine.run()
    assert machine.statuses() == {"a": DONE}
    machine.left = 60
    assert machine.run()["b"] == 60  # its limit would be 100


def test_a_step_whose_command_was_killed_is_begun_once_more() -> None:
    machine = Machine()
    machine.day.outcomes = {"a": Outcome(DONE), "b": Outcome(BEGUN)}
    assert set(machine.run()) == {"b", "c", "d"}


def test_each_step_exists_and_needs_steps_before_it() -> None:
    before: set[str] = set()
    for group in command.GROUPS:
        for one in group:
            module = importlib.import_module(f"scripts.gpuday.{one.module}")
            assert callable(getattr(module, one.name))
            assert set(one.needs) <= before
            assert 0 < one.least_s <= one.limit_s < 600
        before |= {one.name for one in group}


def test_a_bound_holds_or_not_or_was_not_measured() -> None:
    measured: dict[str, float | None] = {"all hot": 0.981, "step": 1.2, "staging": None}
    day = Day(Path("out"), Path("work"), None, {"a": Outcome(DONE, bounds=measured)})
    text = report.text(day, STEPS)
    assert f"| {BOUNDS['all hot'][0]} | ≥ 0.98 | 0.981 | holds |" in text
    assert f"| {BOUNDS['step'][0]} | ≤ 1.1 | 1.200 | **does not hold** |" in text
    assert text.count("| - | open: not measured |") == 5
    day.stand_in = Path("ollama")
    text = report.text(day, STEPS)
    assert "**No GPU was used.**" in text
    assert "| 0.981 | not judged: no GPU |" in text
    assert "hold" not in text


def test_every_step_has_its_result() -> None:
    day = Day(Path("out"), Path("work"))
    day.outcomes = {
        "a": Outcome(DONE, ["- a fact"], seconds=2.4),
        "b": Outcome(FAILED, why="a | b", cure="read the log"),
        "c": Outcome(BEGUN),
    }
    text = report.text(day, STEPS)
    assert "| a | the step a | done | 2 |" in text
    assert "| b | the step b | FAILED: a \\| b | 0 |" in text
    assert "| c | the step c | begun, not ended | 0 |" in text
    assert "| d | the step d | not begun |  |" in text
    assert "\nResult: FAILED: a | b.\nCure: read the log.\n" in text
    assert "\n- a fact\n" in text
