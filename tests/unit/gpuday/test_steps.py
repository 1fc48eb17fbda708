"""The loop of scripts/gpu_day: it resumes, keeps time, and goes on after what failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.gpuday import steps
from scripts.gpuday.steps import (
    BEGUN,
    DONE,
    FAILED,
    LACKING,
    TIMEOUT,
    Bound,
    Outcome,
    State,
    Step,
)


def step(name: str, *needs: str, limit: float = 100, least: float = 10, **more: object) -> Step:
    return Step(name, f"the step {name}", limit, least, needs, **more)  # type: ignore[arg-type]


@dataclass
class Machine:
    """Steps take a second each of its clock, or what `seconds` says."""

    left: float = 1000.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    seen: list[dict[str, str]] = field(default_factory=list)

    def day(self, todo: list[Step], state: State, again: Iterable[str] = ()) -> list[str]:
        def launch(one: Step, limit_s: float) -> Outcome:
            self.ran.append(one.name)
            self.limits[one.name] = limit_s
            self.left -= self.seconds.get(one.name, 1)
            return self.outcomes.get(one.name, Outcome(DONE))

        def written() -> None:
            self.seen.append({name: one.status for name, one in state.outcomes.items()})

        return steps.run(
            todo, state, launch, seconds_left=lambda: self.left, written=written, again=again
        )


THREE = [step("a"), step("b", "a"), step("c", "b")]


def statuses(state: State) -> dict[str, str]:
    return {name: one.status for name, one in state.outcomes.items()}


def test_steps_run_in_order_and_the_state_is_written_before_and_after_each() -> None:
    machine, state = Machine(), State()
    assert machine.day(THREE, state) == []
    assert machine.ran == ["a", "b", "c"]
    assert statuses(state) == dict.fromkeys("abc", DONE)
    assert machine.seen[:3] == [{"a": BEGUN}, {"a": DONE}, {"a": DONE, "b": BEGUN}]


def test_what_is_done_is_not_done_again() -> None:
    machine, state = Machine(), State()
    machine.day(THREE, state)
    machine.day([*THREE, step("d")], state)
    assert machine.ran == ["a", "b", "c", "d"]
    machine.day(THREE, state, again=["b"])
    assert machine.ran[4:] == ["b"]


def test_a_step_that_fails_ends_no_other_and_is_not_tried_again_by_itself() -> None:
    todo = [step("a"), step("b", "a"), step("c", "a"), step("d", "b")]
    machine, state = Machine(outcomes={"b": Outcome(FAILED, why="no luck", cure="pray")}), State()
    machine.day(todo, state)
    assert machine.ran == ["a", "b", "c"]
    assert statuses(state) == {"a": DONE, "b": FAILED, "c": DONE, "d": LACKING}
    assert (state.outcomes["d"].why, state.outcomes["d"].cure) == ("no luck", "pray")
    machine.day(todo, state)
    assert machine.ran == ["a", "b", "c"]
    machine.outcomes.clear()
    machine.day(todo, state, again=["b"])
    assert machine.ran[3:] == ["b", "d"]  # and what lacked it


def test_a_step_without_its_time_is_not_begun_and_comes_first_the_next_time() -> None:
    machine, state = Machine(left=30, seconds={"a": 25}), State()
    assert machine.day(THREE, state) == ["b", "c"]
    assert statuses(state) == {"a": DONE}
    machine.left = 1000
    assert machine.day(THREE, state) == []
    assert machine.ran == ["a", "b", "c"]


def test_no_step_may_take_longer_than_the_command_has() -> None:
    machine, state = Machine(left=60), State()
    machine.day([step("a", limit=40), step("b", limit=500)], state)
    assert machine.limits == {"a": 40, "b": 59}


def test_a_step_that_took_its_command_with_it_is_begun_once_more_only() -> None:
    machine, state = Machine(), State(outcomes={"a": Outcome(BEGUN)})
    machine.day(THREE, state)
    assert machine.ran == ["a", "b", "c"]
    assert state.outcomes["a"].begun == 2
    state = State(outcomes={"a": Outcome(BEGUN, begun=2)})
    machine = Machine()
    machine.day(THREE, state)
    assert machine.ran == []
    assert state.outcomes["b"].why == "the step `a` was not finished"


def test_what_lacked_something_is_looked_at_again() -> None:
    machine, state = Machine(outcomes={"a": Outcome(LACKING, why="no GPU")}), State()
    machine.day(THREE, state)
    assert {one.why for one in state.outcomes.values()} == {"no GPU"}
    machine.outcomes.clear()
    machine.day(THREE, state)
    assert statuses(state) == dict.fromkeys("abc", DONE)


def test_what_another_machine_made_is_made_again(tmp_path: Path) -> None:
    made = tmp_path / "library"
    todo = [step("a", products=(made,)), step("b", "a")]
    made.touch()
    machine, state = Machine(), State()
    machine.day(todo, state)
    machine.day(todo, state)
    assert machine.ran == ["a", "b"]
    made.unlink()
    machine.day(todo, state)
    assert machine.ran == ["a", "b", "a"]  # b's figures stay what they are


def test_two_steps_run_beside_each_other() -> None:
    todo = [step("a"), step("b", "a"), step("c", "a", beside=True), step("d", "b")]
    assert [[one.name for one in group] for group in steps.groups(todo)] == [
        ["a"],
        ["b", "c"],
        ["d"],
    ]
    machine, state = Machine(), State()
    machine.day(todo, state)
    assert {"a": BEGUN} in machine.seen
    assert {"a": DONE, "b": BEGUN, "c": BEGUN} in machine.seen
    assert statuses(state) == dict.fromkeys("abcd", DONE)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    outcome = Outcome(TIMEOUT, ["a line"], {"rate": 1.5}, [Bound("x", None, 0.9)], why="slow")
    state = State({"gpu": "A card"}, {"a": outcome})
    state.write(tmp_path / "new" / "state.json")
    assert State.read(tmp_path / "new" / "state.json") == state


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 0, "about": {"gpu": "x"}, "steps": {}}']
)
def test_a_state_that_is_not_whole_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert State.read(tmp_path / "state.json") == State()
    assert State.read(tmp_path / "absent.json") == State()


def test_a_bound_that_nobody_measured_neither_holds_nor_fails() -> None:
    bound = Bound("x", None, 1.1, at_least=False)
    assert bound.holds is None
    assert bound.of(1.1).holds
    assert not bound.of(1.11).holds
    assert not Bound("y", 0.69, 0.7).holds
