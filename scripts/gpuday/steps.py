"""Steps of scripts/gpu_day: what one is, what came of it, and the loop that runs them.

The loop goes on after a step that failed, never runs a step whose time cannot be had, and writes
the state after each, so that a command that is killed loses one step. Standard library only: it has
to start on a machine where nothing of ours is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FORMAT = 1
DONE, FAILED, LACKING, TIMEOUT, BEGUN = "done", "failed", "lacking", "timeout", "begun"
MOST_BEGUN = 2  # a step that took its command with it so often is not begun again


@dataclass(frozen=True, slots=True)
class Bound:
    """`value` None: nobody has measured it, and so it neither holds nor fails."""

    name: str
    value: float | None
    limit: float
    at_least: bool = True

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def of(self, value: float | None) -> Bound:
        return replace(self, value=value)


@dataclass(slots=True)
class Outcome:
    """What came of a step. `lines` are its part of the report; `figures` are for later steps."""

    status: str
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    bounds: list[Bound] = field(default_factory=list)
    why: str = ""  # it failed, or what it lacks
    cure: str = ""
    seconds: float = 0.0
    begun: int = 1  # how often

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Outcome:
        bounds = [Bound(**bound) for bound in document.get("bounds", [])]
        return cls(**{**document, "bounds": bounds})


@dataclass(frozen=True, slots=True)
class Step:
    """`needs`: steps without which it says nothing. `products`: files without which it has to be
    done again, on another machine. `beside`: it may run while the step before it runs.
    """

    name: str
    title: str
    limit_s: float
    least_s: float  # it is not begun if less is left
    needs: tuple[str, ...] = ()
    products: tuple[Path, ...] = ()
    beside: bool = False
    always: bool = False  # seconds, and what it sees may have changed


@dataclass(slots=True)
class State:
    """What is known so far; `about` says of which machine and settings, and no other's is used."""

    about: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def is_done(self, name: str) -> bool:
        return name in self.outcomes and self.outcomes[name].status == DONE

    def write(self, path: Path) -> None:
        document = {
            "format": FORMAT,
            "about": self.about,
            "steps": {name: one.as_json() for name, one in self.outcomes.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(json.dumps(document, indent=1), encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> State:
        """Empty where there is none, or none that this version wrote whole."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                return cls()
            steps = {name: Outcome.of_json(one) for name, one in document["steps"].items()}
            return cls(document["about"], steps)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()


def pending(step: Step, state: State, again: Iterable[str]) -> bool:
    """Whether it has to be run. What failed is not tried again unless it is named: its time may be
    what later steps need.
    """
    old = state.outcomes.get(step.name)
    if old is None or step.always or step.name in again or old.status == LACKING:
        return True
    if old.status == BEGUN:
        return old.begun < MOST_BEGUN
    return old.status == DONE and not all(path.exists() for path in step.products)


def groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps that may run at the same time, together."""
    made: list[list[Step]] = []
    for step in steps:
        if step.beside and made:
            made[-1].append(step)
        else:
            made.append([step])
    return made


Launch = Callable[[Step, float], Outcome]  # the step, and its limit in seconds


def run(
    steps: Sequence[Step],
    state: State,
    launch: Launch,
    *,
    seconds_left: Callable[[], float],
    written: Callable[[], None],
    again: Iterable[str] = (),
) -> list[str]:
    """Runs what is pending, in order, and calls `written` before and after each step. Returns the
    names of the steps that were not begun because the time was over.
    """
    again, late = set(again), []
    for group in groups(steps):
        ready = []
        for step in group:
            if not pending(step, state, again):
                continue
            lacks = next((name for name in step.needs if not state.is_done(name)), None)
            if lacks and lacks not in late:
                state.outcomes[step.name] = not_possible(lacks, state)
            elif lacks or seconds_left() < step.least_s:
                late.append(step.name)
            else:
                old = state.outcomes.get(step.name)
                count = old.begun + 1 if old and old.status == BEGUN else 1
                state.outcomes[step.name] = Outcome(BEGUN, begun=count)
                ready.append(step)
        written()
        if not ready:
            continue
        limits = [min(step.limit_s, seconds_left()) for step in ready]
        with ThreadPoolExecutor(len(ready)) as pool:
            for step, outcome in zip(ready, pool.map(launch, ready, limits), strict=True):
                outcome.begun = state.outcomes[step.name].begun
                state.outcomes[step.name] = outcome
        written()
    return late


def not_possible(lacks: str, state: State) -> Outcome:
    """Why a step cannot be done without another one."""
    other = state.outcomes.get(lacks)
    if other is None or other.status == BEGUN:
        return Outcome(LACKING, why=f"the step `{lacks}` was not finished")
    return Outcome(LACKING, why=other.why or f"the step `{lacks}` {other.status}", cure=other.cure)
