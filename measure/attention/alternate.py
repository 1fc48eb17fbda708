"""Measures sides in turns, so that other work on the machine affects all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Turn = Callable[[], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds of every repetition of one side."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def alternate(sides: Mapping[str, Turn], rounds: int) -> dict[str, Series]:
    """In each round every side has one turn; a turn returns the seconds of its repetitions."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, turn in sides.items():
            seconds[name] += turn()
    return {name: Series(tuple(values)) for name, values in seconds.items()}
