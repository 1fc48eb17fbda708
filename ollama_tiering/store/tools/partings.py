"""Partings: where a prompt stopped being what is stored, and what both sides go on with.

The store notes in passing which look-ups fell short (books/watch.py). Here one of these notes
becomes what a person wants to know. That takes milliseconds, so it is done when nobody waits. A
look-up that found all that is stored of its prompt did not part from anything, and neither did one
that found nothing: these have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ollama_tiering.store.block.key import TOKEN_BYTES, NamespaceId
from ollama_tiering.store.books import following
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.watch import ShortLookUp
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tools.resync import Resync, resync

MOST_BEFORE: Final = 32 << 10  # tokens: they tell in which turn it is
MOST_BEHIND: Final = 16 << 10  # ... of either side: an order is told by all of it
LEAST_LOST: Final = 64  # tokens: fewer are not restored, so nothing is lost with them
MOST_WITHOUT_LOSS: Final = 4 << 10  # tokens on each side, where nothing was lost


class PartingKind(IntEnum):
    """Numbers are those of the protocol."""

    DIFFERS = 1
    EVICTED = 2
    DAMAGED = 3
    OTHER_SETTINGS = 4


@dataclass(frozen=True, slots=True)
class Parting:
    """`at_token` is the first token that is not the stored one. `lost_tokens`: how many were
    stored, and could not be used because of this.
    """

    kind: PartingKind
    unix_seconds: float
    namespace: NamespaceId
    prompt_tokens: int
    at_token: int
    lost_tokens: int
    before: bytes = b""  # int32 tokens up to the place, at most MOST_BEFORE
    asked: bytes = b""  # of the prompt from there on, at most MOST_BEHIND
    stored: bytes = b""
    skipped_asked: int = 0  # tokens up to where both sides are the same again, if anywhere
    skipped_stored: int = 0
    evicted_unix_seconds: float = 0.0
    elsewhere: NamespaceId | None = None  # where it is stored under other settings


class PartingFinder:
    """Makes the store take notes. May be called in any thread, by one at a time."""

    def __init__(self, store: TieredStore) -> None:
        self._state: StoreState = store.state
        self._state.watch.listening = True

    def next(self) -> tuple[ShortLookUp, Parting | None] | None:
        """Returns the oldest note's; None if there is no note."""
        asked = self._state.watch.take()
        return None if asked is None else (asked, self._parting(asked))

    def text_allowed(self, namespace: NamespaceId) -> bool:
        """Whether a rule of the settings lets its tokens be shown."""
        return self._state.terms.of(namespace).text

    def model(self, namespace: NamespaceId) -> str:
        """File name; empty where it is not known."""
        return self._state.terms.model(namespace)

    def _parting(self, asked: ShortLookUp) -> Parting | None:
        lost, since = following.evicted(self._state, asked)
        if lost >= LEAST_LOST:
            return _made(asked, PartingKind.EVICTED, lost, evicted_unix_seconds=since)
        rows, other = following.elsewhere(self._state, asked)
        differing, best = self._best(asked)
        if rows - asked.matched_tokens >= max(LEAST_LOST, best.same_tokens if best else 0):
            lost = rows - asked.matched_tokens
            return _made(asked, PartingKind.OTHER_SETTINGS, lost, elsewhere=other)
        if differing is None:
            return None
        same = best or Resync(0, 0, 0)
        return _made(
            *(asked, PartingKind.DIFFERS, same.same_tokens, differing),
            skipped_asked=same.skipped_asked,
            skipped_stored=same.skipped_stored,
        )

    def _best(self, asked: ShortLookUp) -> tuple[bytes | None, Resync | None]:
        """The stored path with which the prompt has most in common behind the parting."""
        behind = asked.tokens[asked.matched_tokens * TOKEN_BYTES :][: MOST_BEHIND * TOKEN_BYTES]
        paths = following.continuations(self._state, asked, MOST_BEHIND)
        if not paths:
            return None, None
        first = [(resync(behind, path, most_runs=1), path) for path in paths]
        best = max(first, key=lambda one: one[0].same_tokens if one[0] else 0)[1]
        return best, resync(behind, best)


def _made(
    asked: ShortLookUp,
    kind: PartingKind,
    lost_tokens: int,
    stored: bytes = b"",
    **more: object,
) -> Parting:
    at = asked.matched_tokens * TOKEN_BYTES
    most_before, most_behind = MOST_BEFORE, MOST_BEHIND
    if lost_tokens < LEAST_LOST:
        most_before = most_behind = MOST_WITHOUT_LOSS
    first = max(0, at - most_before * TOKEN_BYTES)
    return Parting(
        kind=kind,
        unix_seconds=asked.unix_seconds,
        namespace=asked.namespace,
        prompt_tokens=len(asked.tokens) // TOKEN_BYTES,
        at_token=asked.matched_tokens,
        lost_tokens=lost_tokens,
        before=asked.tokens[first:at],
        asked=asked.tokens[at : at + most_behind * TOKEN_BYTES],
        stored=stored[: most_behind * TOKEN_BYTES],
        **more,  # type: ignore[arg-type]
    )
