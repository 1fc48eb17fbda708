"""An engine that never restores (`OLLAMA_KV_TIER_GATE=recompute`) computes everything itself: what
it offers of a text is compared with what others have stored of it. Other rows are put aside.

That says something only where tokens decide the bits of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ollama_tiering.protocol.engine.messages import GateMode
from ollama_tiering.sidecar.engine.adoption import Adoptions, gives_one_answer
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, Identity
from ollama_tiering.sidecar.rechecks import Rechecks
from ollama_tiering.store import BlockKey, NamespaceId, TieredStore
from ollama_tiering.store.tools.compared import ComputedAgain


class Recheck:
    """Of one engine. Used by one thread at a time."""

    def __init__(
        self, store: TieredStore, rechecks: Rechecks, adoptions: Adoptions, identity: Identity
    ) -> None:
        self._again = ComputedAgain(store)
        self._rechecks = rechecks
        self._adoptions = adoptions
        self._identity = identity
        self._known: set[BlockKey] = set()  # its own, or compared already

    def look(self, tokens: bytes, fingerprints: Sequence[bytes]) -> None:
        changed = [
            self._compared(namespace, tokens, fingerprints)
            for namespace in (self._identity.namespace, *self._identity.also)
        ]
        if any(changed):
            self._rechecks.save()

    def _compared(
        self, namespace: NamespaceId, tokens: bytes, fingerprints: Sequence[bytes]
    ) -> bool:
        """Whether there was anything that was not compared before."""
        identity = self._identity
        found = self._again.compare(namespace, tokens, BLOCK_TOKENS, fingerprints)
        fresh = [key for key in found.alike if key not in self._known]
        other = [one for one in found.other if one.key not in self._known]
        self._known.update(fresh, (one.key for one in other))
        if fresh:
            self._rechecks.alike(identity.model, len(fresh))
        if not other:
            return bool(fresh)
        if namespace not in identity.also[:1]:  # another build's rows, or such among them
            self._adoptions.differ(identity)
        if namespace in (identity.namespace, *identity.also[:1]):  # what is stored is not right
            self._rechecks.differ(identity.model, identity.engine, namespace, other)
            self._rechecks.condemn(one.key for one in other)
            for one in other:
                self._again.put_aside(namespace, one.key)
        return True

    def stored(self, keys: Iterable[BlockKey]) -> None:
        self._known.update(keys)


def recheck_of(
    store: TieredStore,
    rechecks: Rechecks,
    adoptions: Adoptions,
    identity: Identity,
    gate: GateMode,
) -> Recheck | None:
    """None of an engine that may restore, or whose rows depend on more than tokens."""
    if gate is not GateMode.RECOMPUTE or not gives_one_answer(identity):
        return None
    return Recheck(store, rechecks, adoptions, identity)
