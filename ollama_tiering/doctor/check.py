"""One line of `tiering doctor`: what was checked, the result, and the cure if
something is wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ollama_tiering.doctor.system_errors import cause_and_cure
from ollama_tiering.errors import TieringError


class CheckState(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as well as it could
    FAIL = "fail"  # something a person asked for cannot work


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: CheckState
    finding: str
    cure: str = ""


def ok(name: str, finding: str) -> Check:
    return Check(name, CheckState.OK, finding)


def warn(name: str, finding: str, cure: str = "") -> Check:
    return Check(name, CheckState.WARN, finding, cure)


def fail(name: str, finding: str, cure: str = "") -> Check:
    return Check(name, CheckState.FAIL, finding, cure)


def guarded(name: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    """A check that cannot be made counts as failed; the others go on."""
    try:
        return list(look())
    except TieringError as error:
        return [fail(name, error.message, error.hint or "")]
    except OSError as error:
        said, cure = cause_and_cure(error)
        return [fail(name, f"cannot be checked: {said}", cure)]
