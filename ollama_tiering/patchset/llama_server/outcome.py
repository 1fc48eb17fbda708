"""What the self-test of a tree found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class SelfTestOutcome:
    """`checks`: how many passed. `refused`: kinds of models or settings that failed theirs, by the
    words that llama-server's part knows (kvt_kinds.cpp), and why; they are served as stock.
    `not_exact`: why the tree goes without exact attention; empty where that passed, or is not
    there.
    """

    checks: int
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    not_exact: str = ""

    def __str__(self) -> str:
        passed = f"{self.checks} check{'' if self.checks == 1 else 's'} passed"
        return f"{passed}; as stock: {', '.join(self.refused)}" if self.refused else passed
