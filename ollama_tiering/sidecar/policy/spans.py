"""Runs of rows that are computed in one batch, such as those of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RowSpan(NamedTuple):
    """Nobody goes on after a row of it but the last: what is left would be computed in parts."""

    first: int
    last: int


def resumable(spans: Sequence[RowSpan], at: int) -> int:
    """The last position up to `at` from which an engine may go on. `spans` are ordered by their
    first rows; they may overlap.
    """
    for span in reversed(spans):
        if span.first < at <= span.last:
            at = span.first
    return at
