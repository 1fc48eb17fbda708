"""Removes what a rule forbids to keep: every block of the namespace in every tier, pinned or not.

A person's rule is newer than a person's pin: the pins are lifted. What is being read stays until it
is not. Damaged files that were put aside go too: nobody can say whose tokens are in them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ollama_tiering.config import format_size
from ollama_tiering.store.block.key import NamespaceId
from ollama_tiering.store.books import reading
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.upkeep import removal, unusable
from ollama_tiering.store.upkeep.graveyard import Graveyard
from ollama_tiering.store.upkeep.pinbook import PinBook

log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 10.0  # after a try that could not remove all of it
_CHAINS_PER_PIECE: Final = 256


class Withdrawal:
    """Is not thread-safe: one driver. Does nothing, at no cost, as long as no rule forbids."""

    def __init__(
        self,
        state: StoreState,
        pins: PinBook,
        graveyard: Graveyard,
        scrub_index: Callable[[], None],
    ) -> None:
        self._state = state
        self._pins = pins
        self._graveyard = graveyard
        self._scrub_index = scrub_index
        self._tried: frozenset[NamespaceId] = frozenset()
        self._again = 0.0
        self._left: dict[NamespaceId, list[BlockRecord]] = {}  # ends of chains, of this round
        self._removed = False  # ... any block

    def run(self) -> bool:
        """One piece of it, for the driver has other work too; whether there may be more."""
        if not self._left and not self._begin():
            return False
        while self._left:
            namespace, ends = next(iter(self._left.items()))
            piece = ends[-_CHAINS_PER_PIECE:]
            del ends[-_CHAINS_PER_PIECE:]
            if not ends:
                del self._left[namespace]
            if namespace in self._state.terms.forbidden:  # the rules may have changed meanwhile
                self._remove(namespace, piece)
                break
            self._tried = frozenset()  # should they change back
        if not self._left:
            self._finish()
        return bool(self._left) or self._removed

    def _begin(self) -> bool:
        """Finds what there is; whether it is to be removed now."""
        state = self._state
        forbidden = state.terms.forbidden
        damaged = self._damaged() if forbidden else frozenset()
        held = reading.held_of(state, forbidden)
        found, now = forbidden & (held | damaged), state.clock()
        if not found or (found == self._tried and now < self._again):
            self._tried = found
            return False
        self._tried, self._again, self._removed = found, now + _AGAIN_SECONDS, False
        for namespace in found:
            self._lift_pins(namespace)
        for record in reading.records(state):
            if record.namespace in found and state.tree.is_end(record):
                self._left.setdefault(record.namespace, []).append(record)
        return True

    def _finish(self) -> None:
        state = self._state
        if self._removed or self._damaged() & state.terms.forbidden:
            for level in state.levels:
                if level.shared is None:
                    unusable.purge_quarantine(state, level, keep_blocks=0)
        if self._removed:
            self._scrub_index()

    def _damaged(self) -> frozenset[NamespaceId]:
        """Whose damaged files lie on this host's tiers."""
        tiers = [level.tier for level in self._state.levels if level.shared is None]
        return frozenset().union(*(t.quarantined() for t in tiers if isinstance(t, FsTier)))

    def _remove(self, namespace: NamespaceId, ends: list[BlockRecord]) -> None:
        state = self._state
        done = removal.remove_chains(state, ends, self._graveyard, dry_run=False)
        if not done.blocks:
            return
        self._removed = True
        terms = state.terms.of(namespace)
        log.warning(
            "removed by a rule: model=%s blocks=%d size=%s left=%d why=%s",
            terms.name or state.terms.model(namespace),
            done.blocks,
            format_size(done.stored_bytes),
            sum(done.kept.values()),
            terms.refusal,
        )

    def _lift_pins(self, namespace: NamespaceId) -> None:
        for key in reading.pinned_chains(self._state, namespace):
            try:
                self._pins.unpin(key)
            except OSError as error:
                log.warning("pin not lifted: chain=%s error=%s", key.hex()[:16], error)
            else:
                log.warning("pin lifted by a rule: chain=%s", key.hex()[:16])
