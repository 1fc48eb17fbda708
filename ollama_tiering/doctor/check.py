"""One line of `tiering doctor`: what was looked at, how it is, the cure where it is not well."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ollama_tiering.errors import TieringError


class State(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as well as it could
    FAIL = "fail"  # something a person asked for cannot work


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: State
    finding: str
    cure: str = ""


def ok(name: str, finding: str) -> Check:
    return Check(name, State.OK, finding)


def warn(name: str, finding: str, cure: str = "") -> Check:
    return Check(name, State.WARN, finding, cure)


def fail(name: str, finding: str, cure: str = "") -> Check:
    return Check(name, State.FAIL, finding, cure)


def guarded(name: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    """A check that cannot be made is a failed one; the others go on."""
    try:
        return list(look())
    except TieringError as error:
        return [fail(name, error.message, error.hint or "")]
    except OSError as error:
        return [fail(name, f"cannot be looked at: {error}")]
