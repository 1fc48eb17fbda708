"""Sums of each day, by model: what was asked, where its tokens came from, the seconds that
restoring saved, what was written to the disk, and how many prompts parted from what is stored. A
day is one of this machine's calendar.

Seconds saved are counted when they are: by the speed of computing that was measured for the same
namespace until then. Before any was measured, nothing is counted.
"""

from __future__ import annotations

import datetime
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

MOST_DAYS: Final = 400  # the oldest goes for a new one
MOST_MODELS: Final = 8  # of one day; the others are one, OTHERS
OTHERS: Final = ""
MOST: Final = 1 << 53  # tokens or seconds: what is more is no count
MOST_NAME: Final = 128  # characters of a model's file name, or of an engine's name


@dataclass(slots=True)
class DaySums:
    """Of one model in one day."""

    requests: int = 0
    prompt_tokens: int = 0
    memory_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    restore_seconds: float = 0.0
    saved_seconds: float = 0.0  # may be negative
    written_bytes: int = 0  # to disks of this machine; not what a neighbour or a person copied
    partings: int = 0  # prompts that had to be computed again though something like them is stored

    def add(self, other: DaySums) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NAMES: Final = tuple(field.name for field in fields(DaySums))
_LATER: Final = ("written_bytes", "partings")  # in a table of their own, which older versions skip
_FIRST: Final = tuple(name for name in _NAMES if name not in _LATER)


class Days:
    """Thread-safe. It touches no file."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._days: dict[str, dict[str, DaySums]] = {}  # by date and model

    def book(self, model: str, sums: DaySums) -> None:
        """`model` is a file name."""
        date = self._day(0)
        with self._lock:
            models = self._days.setdefault(date, {})
            if model not in models and len(models) >= MOST_MODELS:
                model = OTHERS
            models.setdefault(model, DaySums()).add(sums)
            self._trim()

    def last(self, most: int = MOST_DAYS) -> list[tuple[str, str, DaySums]]:
        """(date, model's file name, sums) of the last `most` days of the calendar, today's last."""
        first = self._day(most - 1)
        with self._lock:
            return [
                (date, model, replace(sums))
                for date, models in sorted(self._days.items())
                if date >= first
                for model, sums in models.items()
            ]

    def today(self) -> str:
        """Its date."""
        return self._day(0)

    def document(self, *, later: bool = False) -> dict[str, Any]:
        """For a file; `restore` reads it. `later`: the sums that older versions did not know."""
        names = _LATER if later else _FIRST
        with self._lock:
            return {
                date: {m: [getattr(sums, name) for name in names] for m, sums in models.items()}
                for date, models in self._days.items()
            }

    def restore(self, document: Any, later: Any) -> None:
        """`later`: what `document` gave with `later`; older versions wrote none, and a newer one
        may write more in a row, which is passed over. ValueError if this is not what `document`
        gave; then nothing was changed.
        """
        try:
            days = {
                _date(date): {
                    _model(m): _sums(numbers, later.get(date, {}).get(m, ()))
                    for m, numbers in models.items()
                }
                for date, models in document.items()
            }
        except (AttributeError, TypeError) as error:
            raise ValueError(f"no sums of days: {error!r}") from None
        with self._lock:
            self._days = days
            self._trim()

    def _day(self, ago: int) -> str:
        today = datetime.datetime.fromtimestamp(self._wall_clock()).date()
        return str(today - datetime.timedelta(ago))

    def _trim(self) -> None:
        while len(self._days) > MOST_DAYS:
            del self._days[min(self._days)]


def _date(text: str) -> str:
    return time.strftime("%Y-%m-%d", time.strptime(text, "%Y-%m-%d"))


def _model(name: str) -> str:
    if len(name) > MOST_NAME:
        raise ValueError(f"{name!r} is no name")
    return name


def _sums(first: list[Any], later: Sequence[Any]) -> DaySums:
    if len(first) != len(_FIRST):
        raise ValueError(f"{first!r} are no sums")
    named = [*zip(_FIRST, first, strict=True), *zip(_LATER, later, strict=False)]
    found = DaySums(**dict(named))
    for name, plain in asdict(DaySums()).items():
        value = getattr(found, name)
        whole = isinstance(plain, int)
        if type(value) is not int and (whole or type(value) is not float):
            raise ValueError(f"{name} is {value!r}")
        if not math.isfinite(value) or abs(value) >= MOST or (value < 0 and whole):
            raise ValueError(f"{name} is {value!r}")
    return found
