"""An engine of a new build reads what the build before has stored, once both have computed the same
texts with the same bits (docs/design.md, "Another build").

Decided when a model is loaded, once for each process: what is compared is what both builds have
stored, so nothing is computed for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ollama_tiering.sidecar.engine.adoption_record import Adoption, AdoptionRecord, BuildVerdict
from ollama_tiering.sidecar.engine.identity import Identity
from ollama_tiering.store import NamespaceId, TieredStore
from ollama_tiering.store.tools.builds import Builds, SameRows

log = logging.getLogger(__name__)

LEAST_BLOCKS: Final = 64  # with the same rows: 4,096 tokens, all layers of each
LEAST_DEPTH_TOKENS: Final = 2048  # of one of them: several batches, and sums over many rows
_MOST_CANDIDATES: Final = 8
_MOST_PROCESSES: Final = 256
_ONE_ANSWER: Final = "one_answer"  # what an engine says of rows whose bits its tokens decide


class Adoptions:
    """Thread-safe. `of` may block for some milliseconds."""

    def __init__(
        self,
        store: TieredStore,
        record: AdoptionRecord,
        *,
        enabled: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.record = record
        self._builds = Builds(store)
        self._enabled = enabled
        self._clock = clock
        self._lock = threading.Lock()
        self._decided: dict[tuple[int, NamespaceId], Identity] = {}

    def of(self, pid: int, identity: Identity) -> Identity:
        """The identity under which this process stores and finds: its own, or that of the build
        before. It stays what it is as long as the process lives.
        """
        if not self._enabled or not self.record.readable or not gives_one_answer(identity):
            return identity
        with self._lock:
            known = self._decided.get((pid, identity.namespace))
            if known is None:
                known = self._decided[pid, identity.namespace] = self._decide(identity)
                while len(self._decided) > _MOST_PROCESSES:
                    del self._decided[next(iter(self._decided))]
            return known

    def watch(self, identity: Identity) -> None:
        """After rows were stored: a text with two sets of rows ends all adoptions of its namespace,
        for the next process that loads the model.
        """
        if not self._enabled or not self._builds.has_histories(identity.namespace):
            return
        for one in self.record.adopters(identity.namespace):
            self._note(replace(one, unix_seconds=self._clock()), BuildVerdict.DIFFERENT)

    def _decide(self, identity: Identity) -> Identity:
        mine = identity.namespace
        adopted = self.record.adopted_by(mine)
        if adopted is not None:
            return self._under(identity, adopted.other)
        if self.record.adopters(mine):  # what they stored is here, too
            return identity
        for other in self._builds.others(mine, identity.fields)[:_MOST_CANDIDATES]:
            if self.record.of(mine, other) or self.record.adopted_by(other):
                continue  # it is decided, or nobody stores there any more
            if self._builds.has_histories(other):
                continue
            same = self._builds.same_rows(mine, other)
            found = self._found(identity, other, same)
            if same.differ:
                self._note(found, BuildVerdict.DIFFERENT)
            elif _is_enough(same) and self._note(found, BuildVerdict.ADOPTED):
                return self._under(identity, other)
        return identity

    def _found(self, identity: Identity, other: NamespaceId, same: SameRows) -> Adoption:
        return Adoption(
            mine=identity.namespace,
            other=other,
            model=identity.model,
            engine=identity.engine,
            other_engine=dict(self._builds.description(other)).get("engine", ""),
            blocks=same.blocks,
            deepest_tokens=same.deepest_tokens,
            unix_seconds=self._clock(),
            verdict=BuildVerdict.DIFFERENT,
        )

    def _under(self, identity: Identity, other: NamespaceId) -> Identity:
        fields = self._builds.description(other)
        if not fields:  # nothing of it is left
            return identity
        return replace(identity, namespace=other, fields=fields)

    def _note(self, found: Adoption, verdict: BuildVerdict) -> bool:
        noted = self.record.note(replace(found, verdict=verdict))
        said = "another build's blocks: model=%s verdict=%s blocks_alike=%d deepest=%d of=%s for=%s"
        level = logging.INFO if verdict is BuildVerdict.ADOPTED else logging.WARNING
        numbers = found.blocks, found.deepest_tokens
        log.log(level, said, found.model, verdict, *numbers, found.other_engine, found.engine)
        return noted


def _is_enough(same: SameRows) -> bool:
    return same.blocks >= LEAST_BLOCKS and same.deepest_tokens >= LEAST_DEPTH_TOKENS


def gives_one_answer(identity: Identity) -> bool:
    """Whether the tokens alone decide the bits of its rows, as its engine says."""
    parts = dict(part.partition("=")[::2] for part in dict(identity.fields)["extra"].split(";"))
    return (
        parts.get(_ONE_ANSWER) == "yes" and "states" not in parts and not identity.window_row_bytes
    )
