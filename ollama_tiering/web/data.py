"""What the page shows and does, as its server asks for it."""

from __future__ import annotations

from typing import Any, Protocol

Document = dict[str, Any]


class PageData(Protocol):
    """Each method gives what JSON can say, as the command of its name prints it. TieringError where
    that command would end with one. Called from several threads at once.
    """

    def live(self) -> Document:
        """`status`: tiers, models, runners; `requests`: the last ones, the latest first, as `top`
        shows them.
        """
        ...

    def conversations(self, most: int | None = None) -> Document:
        """Those that were used last, at most `most` of them; `summary` is of all."""
        ...

    def why(self) -> Document: ...
    def report(self, days: int) -> Document: ...
    def doctor(self) -> Document: ...
    def config(self) -> Document: ...

    def pin(self, chain_id: str, *, unpin: bool) -> Document:
        """`sentence`: what was done."""
        ...

    def remove(self, chain_id: str, *, dry_run: bool) -> Document:
        """`sentence`: what was removed; with `dry_run` what would be."""
        ...
