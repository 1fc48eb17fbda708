"""Results as Markdown: a heading, their origin, one table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ollama_tiering.bench.machine import Machine


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; `notes` say how they were measured."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self, machine: Machine, engine: str, command: str) -> str:
        lines = [f"# {self.title}", "", *machine.lines(engine)]
        lines += [f"- Command: `{command}`", "", *self.lines()]
        return "\n".join(lines).rstrip() + "\n"

    def lines(self) -> list[str]:
        """The table and its notes."""
        lines = [_row(self.headings), _row(["---"] * len(self.headings))]
        lines += [_row(row) for row in self.rows]
        return [*lines, "", *(f"- {note}" for note in self.notes)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.3f} s"


def ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"


def rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"
