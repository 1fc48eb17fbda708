"""The report of a day with a GPU never says more than was measured."""

from __future__ import annotations

from scripts.gpuday import bounds, report
from scripts.gpuday.steps import BEGUN, DONE, FAILED, LACKING, Outcome, State, Step

TODO = [Step(name, f"the step {name}", 10, 1) for name in ("look", "stock", "graphs", "suite")]


def state(**outcomes: Outcome) -> State:
    return State({"gpu": "A card", "machine": "a machine"}, outcomes)


def rows(text: str, about: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {about}")]


def test_a_bound_that_was_not_measured_is_open() -> None:
    text = report.text(TODO, state(), bounds.WANTED)
    for bound in bounds.WANTED:
        [row] = rows(text, bound.name)
        assert row.endswith("| - | open: not measured |")
    assert "holds" not in text


def test_a_measured_bound_holds_or_not() -> None:
    measured = [bounds.ALL_HOT.of(0.991), bounds.STEP_TIME.of(1.2), bounds.STAGING]
    text = report.text(TODO, state(graphs=Outcome(DONE, bounds=measured)), bounds.WANTED)
    assert rows(text, bounds.ALL_HOT.name) == [
        f"| {bounds.ALL_HOT.name} | ≥ 0.98 | 0.991 | holds |"
    ]
    assert rows(text, bounds.STEP_TIME.name) == [
        f"| {bounds.STEP_TIME.name} | ≤ 1.1 | 1.200 | **does not hold** |"
    ]
    [row] = rows(text, bounds.STAGING.name)  # the step could not measure this one
    assert row.endswith("open: not measured |")


def test_where_something_stands_in_for_a_gpu_nothing_is_judged() -> None:
    shown = state(graphs=Outcome(DONE, bounds=[bounds.ALL_HOT.of(0.991)]))
    shown.about["stand_in"] = "/tests/ollama"
    text = report.text(TODO, shown, bounds.WANTED)
    assert "**No GPU was used.**" in text
    assert rows(text, bounds.ALL_HOT.name)[0].endswith("| 0.991 | not judged: no GPU |")
    assert " holds |" not in text


def test_every_step_has_its_result() -> None:
    text = report.text(
        TODO,
        state(
            look=Outcome(DONE, ["- a machine"], seconds=2.4),
            stock=Outcome(FAILED, why="a | b", cure="read the log"),
            suite=Outcome(LACKING, why="no GPU: nvidia-smi does not answer"),
            graphs=Outcome(BEGUN),
        ),
        bounds.WANTED,
    )
    assert rows(text, "look") == ["| look | the step look | done | 2 |"]
    assert rows(text, "stock") == ["| stock | the step stock | FAILED: a \\| b |  |"]
    assert rows(text, "suite")[0].count("not possible: no GPU") == 1
    assert rows(text, "graphs") == ["| graphs | the step graphs | begun, not ended |  |"]
    assert "Cure: read the log." in text
    assert "- a machine" in text
    assert "- Gpu: A card" in text
    assert "not begun" in report.text(TODO, state(), bounds.WANTED)
