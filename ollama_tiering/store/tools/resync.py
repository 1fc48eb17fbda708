"""Finds where two sequences of tokens that part are the same again. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from ollama_tiering.store.block.key import TOKEN_BYTES
from ollama_tiering.store.books.tree import common_rows

RUN_TOKENS: Final = 16  # fewer in a row are the same by chance, or by the chat template
_EACH: Final = 256  # offsets that are all tried; those behind only
_STRIDE: Final = 8  # ... one in this number
_FAR_TOKENS: Final = 8192  # behind a place where the two differ
MOST_RUNS: Final = 16


class Resync(NamedTuple):
    """Tokens up to the first run that both have, on either side; and how many are the same in all
    runs, which come in the same order on both sides.
    """

    skipped_asked: int
    skipped_stored: int
    same_tokens: int


def resync(asked: bytes, stored: bytes, most_runs: int = MOST_RUNS) -> Resync | None:
    """Both int32 tokens, from where they part. None if they have nothing in common again. Each run
    takes some milliseconds to find.
    """
    first: tuple[int, int] | None = None
    a = s = same = 0
    for _ in range(most_runs):
        found = _next_run(asked[a * TOKEN_BYTES :], stored[s * TOKEN_BYTES :])
        if found is None:
            break
        skipped_asked, skipped_stored = found
        a, s = a + skipped_asked, s + skipped_stored
        first = first or (a, s)
        run = common_rows(asked[a * TOKEN_BYTES :], stored[s * TOKEN_BYTES :])
        a, s, same = a + run, s + run, same + run
    return Resync(*first, same) if first else None


def _next_run(asked: bytes, stored: bytes) -> tuple[int, int] | None:
    """The first tokens of `asked` that are a run of `stored`, too, and where on both sides."""
    anchors: dict[bytes, int] = {}
    size = RUN_TOKENS * TOKEN_BYTES
    last = min(len(asked) // TOKEN_BYTES, _FAR_TOKENS) - RUN_TOKENS
    for at in (*range(0, min(_EACH, last + 1)), *range(_EACH, last + 1, _STRIDE)):
        anchors.setdefault(asked[at * TOKEN_BYTES : at * TOKEN_BYTES + size], at)
    best: tuple[int, int] | None = None
    for at in range(0, len(stored) - size + 1, TOKEN_BYTES):
        offset = anchors.get(stored[at : at + size])
        if offset is not None and (best is None or offset < best[0]):
            best = offset, at // TOKEN_BYTES
            if not offset:
                break
    if best is None:
        return None
    return _back(asked, stored, *best)


def _back(asked: bytes, stored: bytes, a: int, s: int) -> tuple[int, int]:
    """The beginning of the run, of which the anchor may be the middle."""
    step = TOKEN_BYTES
    while a and s and asked[(a - 1) * step : a * step] == stored[(s - 1) * step : s * step]:
        a, s = a - 1, s - 1
    return a, s
