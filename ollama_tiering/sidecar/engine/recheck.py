"""An engine that never restores (`OLLAMA_KV_TIER_GATE=recompute`) computes everything itself: what
it offers of a text is compared with what others have stored of it. Other rows are put aside.

That says something only where tokens decide the bits of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ollama_tiering.protocol.engine.messages import GateMode
from ollama_tiering.sidecar.engine.adoption import gives_one_answer
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, Identity
from ollama_tiering.sidecar.rechecks import Rechecks
from ollama_tiering.store import BlockKey, TieredStore
from ollama_tiering.store.tools.compared import ComputedAgain


class Recheck:
    """Of one engine. Used by one thread at a time."""

    def __init__(self, store: TieredStore, rechecks: Rechecks, identity: Identity) -> None:
        self._again = ComputedAgain(store)
        self._rechecks = rechecks
        self._identity = identity
        self._known: set[BlockKey] = set()  # its own, or compared already

    def look(self, tokens: bytes, fingerprints: Sequence[bytes]) -> None:
        identity = self._identity
        found = self._again.compare(identity.namespace, tokens, BLOCK_TOKENS, fingerprints)
        fresh = [key for key in found.alike if key not in self._known]
        if fresh:
            self._known.update(fresh)
            self._rechecks.alike(identity.model, len(fresh))
        other = [one for one in found.other if one.key not in self._known]
        if other:
            self._known.update(one.key for one in other)
            self._rechecks.differ(identity.model, identity.engine, identity.namespace, other)
            for one in other:
                self._again.put_aside(identity.namespace, one.key)
        if fresh or other:
            self._rechecks.save()

    def stored(self, keys: Iterable[BlockKey]) -> None:
        self._known.update(keys)


def recheck_of(
    store: TieredStore, rechecks: Rechecks, identity: Identity, gate: GateMode
) -> Recheck | None:
    """None of an engine that may restore, or whose rows depend on more than tokens."""
    if gate is not GateMode.RECOMPUTE or not gives_one_answer(identity):
        return None
    return Recheck(store, rechecks, identity)
