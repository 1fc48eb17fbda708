"""A number beside what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ollama_tiering.bench.table import Table

HEADINGS = ["what", "measured", "against", "ratio", "bound", ""]


@dataclass(frozen=True, slots=True)
class Ratio:
    """`bound` is the least that `value` should be, or the most with `at_most`."""

    what: str
    measured: str
    against: str
    value: float
    bound: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool:
        if self.bound is None:
            return True
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def row(self) -> list[str]:
        bound = "" if self.bound is None else f"{'≤' if self.at_most else '≥'} {self.bound:g}"
        verdict = "" if self.bound is None else "met" if self.met else "not met"
        return [self.what, self.measured, self.against, f"{self.value:.3g}", bound, verdict]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


@dataclass(frozen=True, slots=True)
class Section:
    """The contents of one table and one plot. `axis` says what the ratio is of."""

    name: str  # of the plot's file
    title: str
    axis: str
    ratios: Sequence[Ratio]
    notes: Sequence[str] = ()
    log_axis: bool = False  # of the plot: the ratios are of different orders
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # every run, by side

    def table(self) -> Table:
        return Table(self.title, HEADINGS, [ratio.row() for ratio in self.ratios], self.notes)

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "section": self.name,
            "ratios": [ratio.as_json() for ratio in self.ratios],
        }
        if self.seconds:
            document["seconds"] = {name: list(values) for name, values in self.seconds.items()}
        return document
