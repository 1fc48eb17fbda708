"""An engine of a new build reads what the build before has stored, once both have computed the same
texts with the same bits (docs/design.md, "Another build").

Decided when a model is loaded, once for each process: what is compared is what both builds have
stored, so nothing is computed for it. What a process stores that reads another build's blocks has a
name of its own, so that it can be told from what either build has computed alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import psutil

from ollama_tiering.sidecar.engine.adoption_record import Adoption, AdoptionRecord, BuildVerdict
from ollama_tiering.sidecar.engine.identity import Identity
from ollama_tiering.store import Namespace, NamespaceId, TieredStore
from ollama_tiering.store.tools.builds import ADOPTS, Builds, SameRows

log = logging.getLogger(__name__)

LEAST_TOKENS: Final = 4096  # with the same rows, all layers of each
LEAST_DEPTH_TOKENS: Final = 2048  # of one of them: several batches, and sums over many rows
_MOST_CANDIDATES: Final = 8
_MOST_PROCESSES: Final = 256
_MOST_STEPS: Final = 16  # builds before the one that asks
_ONE_ANSWER: Final = "one_answer"  # what an engine says of rows whose bits its tokens decide
_NOBODY: Final = "nobody"


Decided = dict[tuple[int, float, NamespaceId], Identity]


def started(pid: int) -> float:
    """Unix seconds, all of them too small by the same part of one; 0 if nobody knows."""
    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, OSError, ValueError):
        return 0.0


class Adoptions:
    """Thread-safe. `of` may block for some milliseconds."""

    def __init__(
        self,
        store: TieredStore,
        record: AdoptionRecord,
        *,
        enabled: bool,
        clock: Callable[[], float] = time.time,
        started: Callable[[int], float] = started,
        decided: Decided | None = None,
    ) -> None:
        """`decided`: of the processes that this one has served before the store was opened."""
        self.record = record
        self._builds = Builds(store)
        self._enabled = enabled
        self._clock = clock
        self._started = started
        self._since = started(os.getpid())
        self._lock = threading.Lock()
        self._decided = decided if decided is not None else {}

    def of(self, pid: int, identity: Identity) -> Identity:
        """What this process stores under, and may read. It stays what it is as long as the process
        and the sidecar live.
        """
        if not gives_one_answer(identity):
            return identity
        process = pid, self._started(pid), identity.namespace
        with self._lock:
            known = self._decided.get(process)
        if known is not None:
            return known
        decided = self._decide(identity, process[1])
        with self._lock:  # connections of one process are all told the same
            known = self._decided.setdefault(process, decided)
            while len(self._decided) > _MOST_PROCESSES:
                del self._decided[next(iter(self._decided))]
        return known

    def differ(self, identity: Identity) -> None:
        """Rows that it reads are not what its build computes: nobody reads them any more, from the
        next load on.
        """
        for one in self.record.holding():
            if one.joined == identity.namespace:
                self._note(replace(one, unix_seconds=self._clock()), BuildVerdict.DIFFERENT)

    def _decide(self, identity: Identity, started: float) -> Identity:
        mine = identity.namespace
        concerned = not self.record.readable or self.record.concerns(mine)
        if concerned and started < self._since:
            # A sidecar of before may have given it another build's rows: in its slots they would
            # pass for its own.
            return _named(identity, f"{_NOBODY}.{started:.6f}")
        if not self._enabled or not self.record.readable:
            return identity
        adopted = self.record.adopted_by(mine)
        if adopted is not None:
            return self._joined(identity, adopted) if self._still(adopted) else identity
        for other in self._builds.others(mine, identity.fields)[:_MOST_CANDIDATES]:
            if self.record.decided(mine, other) or not self._is_sound(other):
                continue
            same = self._builds.same_rows(mine, other)
            found = self._found(identity, other, same)
            if same.differ:
                self._note(found, BuildVerdict.DIFFERENT)
            elif _is_enough(same) and self._note(found, BuildVerdict.ADOPTED):
                return self._joined(identity, found)
        return identity

    def _still(self, adopted: Adoption) -> bool:
        """Whether nothing that was computed since differs."""
        if not self._is_sound(adopted.other):
            return False
        for own in (adopted.mine, adopted.joined):
            if self._builds.same_rows(own, adopted.other).differ:
                self._note(replace(adopted, unix_seconds=self._clock()), BuildVerdict.DIFFERENT)
                return False
        return True

    def _is_sound(self, namespace: NamespaceId) -> bool:
        """Whether it has what one build computed, or also read where its adoption holds."""
        if ADOPTS not in _parts(dict(self._builds.description(namespace)).get("extra", "")):
            return self.record.adopted_by(namespace) is None  # else nobody stores there any more
        return any(one.joined == namespace for one in self.record.holding())

    def _found(self, identity: Identity, other: NamespaceId, same: SameRows) -> Adoption:
        return Adoption(
            mine=identity.namespace,
            other=other,
            joined=_named(identity, other.hex()).namespace,
            model=identity.model,
            engine=identity.engine,
            other_engine=dict(self._builds.description(other)).get("engine", ""),
            blocks=same.blocks,
            deepest_tokens=same.deepest_tokens,
            unix_seconds=self._clock(),
            verdict=BuildVerdict.DIFFERENT,
        )

    def _joined(self, identity: Identity, adopted: Adoption) -> Identity:
        also = dict.fromkeys((adopted.mine, *self._behind(adopted.other)))
        return replace(_named(identity, adopted.other.hex()), also=tuple(also))

    def _behind(self, other: NamespaceId) -> Iterator[NamespaceId]:
        """What is read with a namespace: of one that has adopted, what that reads."""
        left = [other]
        for _ in range(_MOST_STEPS):
            if not left:
                return
            one = left.pop()
            yield one
            left += [
                part
                for pair in self.record.holding()
                if pair.joined == one
                for part in (pair.other, pair.mine)
            ]

    def _note(self, found: Adoption, verdict: BuildVerdict) -> bool:
        noted = self.record.note(replace(found, verdict=verdict))
        said = "another build's blocks: model=%s verdict=%s blocks_alike=%d deepest=%d of=%s for=%s"
        level = logging.INFO if verdict is BuildVerdict.ADOPTED else logging.WARNING
        numbers = found.blocks, found.deepest_tokens
        log.log(level, said, found.model, verdict, *numbers, found.other_engine, found.engine)
        return noted


def _is_enough(same: SameRows) -> bool:
    return same.tokens >= LEAST_TOKENS and same.deepest_tokens >= LEAST_DEPTH_TOKENS


def _named(identity: Identity, adopts: str) -> Identity:
    """The same, under a name that says what it reads."""
    described = Namespace(**dict(identity.fields))
    named = replace(described, extra=f"{described.extra};{ADOPTS}={adopts}")
    return replace(identity, namespace=named.digest(), fields=tuple(named.fields()))


def gives_one_answer(identity: Identity) -> bool:
    """Whether the tokens alone decide the bits of its rows, as its engine says."""
    parts = _parts(dict(identity.fields)["extra"])
    return bool(parts.get(_ONE_ANSWER)) and "states" not in parts and not identity.window_row_bytes


def _parts(extra: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in extra.split(";"))
