"""What was done for each model, in all: sums over all of its runners, those that have ended too.

A runner reports sums since its model was loaded; what is booked is what they grew by since its last
report. Which runner it is, is told by its process id and the time at which it began: a process id
is used again. Prompt tokens are in memory, restored or recomputed, and each is one of the three; a
report in which they do not add up is not booked. Nor is one in which more requests have a reason
for what they computed than there were.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any, Final, Self

from ollama_tiering.protocol.shortfalls import NONE, Shortfalls
from ollama_tiering.store import DIGEST_BYTES, digest_from_hex
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)

MAX_MODELS: Final = 128  # the one used longest ago goes for a new one
MAX_RUNNERS: Final = 128
_VERSION: Final = 1
_MOST: Final = 1 << 53  # tokens or seconds: what is more is no count
_MAX_NAME: Final = 128  # characters of a model's file name, or of an engine's name

_Runner = tuple[int, float, bytes]  # process id, unix time of its start, namespace


@dataclass(frozen=True, slots=True)
class Counts:
    requests: int = 0
    prompt_tokens: int = 0
    memory_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    restore_seconds: float = 0.0
    shortfalls: Shortfalls = NONE

    @classmethod
    def of(cls, report: pb.RunnerReport) -> Self:
        numbers = {name: getattr(report, name) for name in _COUNTS}
        return cls(**numbers, shortfalls=Shortfalls.of(report.shortfalls))

    @property
    def sound(self) -> bool:
        values = [getattr(self, name) for name in _COUNTS]
        parts = self.memory_tokens + self.restored_tokens + self.recomputed_tokens
        return (
            all(0 <= value < _MOST for value in values)
            and parts == self.prompt_tokens
            and self.shortfalls.fits(self.requests, self.recomputed_tokens)
        )

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        sums = {n: getattr(self, n) + sign * getattr(other, n) for n in _COUNTS}
        return Counts(**sums, shortfalls=self.shortfalls.plus(other.shortfalls, sign))

    def has_fallen(self, before: Counts) -> bool:
        """Whether some sum is less than it was."""
        fallen = any(getattr(self, name) < getattr(before, name) for name in _COUNTS)
        return fallen or self.shortfalls.has_fallen(before.shortfalls)

    def document(self) -> dict[str, Any]:
        """For a file. The reasons lie beside the sums, where an older version does not look."""
        numbers = {name: getattr(self, name) for name in _COUNTS}
        return {"counts": numbers, "shortfalls": self.shortfalls.document()}


_COUNTS: Final = tuple(field.name for field in fields(Counts) if field.name != "shortfalls")


@dataclass(frozen=True, slots=True)
class Entry:
    """Of one namespace. Times are unix seconds of the wall clock."""

    model: str  # file name
    engine: str
    since: float
    last_used: float
    counts: Counts = Counts()


class Ledger:
    """Thread-safe; touches no file."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}  # by namespace; the latest used is last
        self._runners: dict[_Runner, Counts] = {}  # as they last reported; the latest is last
        self._seldom = QuietLog(log)
        self.changes = 0

    def book(self, report: pb.RunnerReport) -> None:
        namespace = bytes(report.namespace)
        if not report.tiered or len(namespace) != DIGEST_BYTES:
            return
        counts = Counts.of(report)
        runner = (report.pid, report.started_unix_seconds, namespace)
        if not counts.sound or not math.isfinite(report.started_unix_seconds):
            said = "report not counted, its sums do not add up: pid=%d"
            self._seldom.warning("unsound", said, report.pid)
            return
        with self._lock:
            before = self._runners.get(runner, Counts())
            if counts.has_fallen(before):
                if report.started_unix_seconds:
                    return  # two reports of it have overtaken each other
                before = Counts()  # one that does not say when it began: it is another
            more = counts.plus(before, -1)
            if more == Counts():
                return
            entry = self._entries.get(namespace) or self._new(report)
            total = entry.counts.plus(more)
            if not total.sound:
                return
            self._runners.pop(runner, None)
            self._runners[runner] = counts
            self._entries.pop(namespace, None)
            self._entries[namespace] = replace(entry, counts=total, last_used=self._wall_clock())
            self._trim()
            self.changes += 1

    def entries(self) -> dict[bytes, Entry]:
        """By namespace, the latest used last."""
        with self._lock:
            return dict(self._entries)

    def document(self) -> dict[str, Any]:
        """For a file; `restore` takes it."""
        with self._lock:
            models = [
                {
                    "namespace": namespace.hex(),
                    "model": one.model,
                    "engine": one.engine,
                    "since": one.since,
                    "last_used": one.last_used,
                    **one.counts.document(),
                }
                for namespace, one in self._entries.items()
            ]
            runners = [
                {"pid": pid, "started": started, "namespace": ns.hex(), **counts.document()}
                for (pid, started, ns), counts in self._runners.items()
            ]
        return {"version": _VERSION, "models": models, "runners": runners}

    def restore(self, document: Any) -> None:
        """ValueError when it is not what `document` gave; then nothing has changed."""
        try:
            if document["version"] != _VERSION:
                raise ValueError(f"version {document['version']!r} is unknown")
            entries = {_namespace(one): _entry(one) for one in document["models"]}
            runners = {
                (int(one["pid"]), _time(one["started"]), _namespace(one)): _counts(one)
                for one in document["runners"]
            }
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a ledger: {error!r}") from None
        with self._lock:
            self._entries, self._runners = entries, runners
            self._trim()

    def _new(self, report: pb.RunnerReport) -> Entry:
        now = self._wall_clock()
        return Entry(file_name(report.model), report.engine[:_MAX_NAME], now, now)

    def _trim(self) -> None:
        while len(self._entries) > MAX_MODELS:
            del self._entries[next(iter(self._entries))]
        while len(self._runners) > MAX_RUNNERS:
            del self._runners[next(iter(self._runners))]


def file_name(model: str) -> str:
    """Of a model, as a runner reports it; bounded."""
    return PurePath(model).name[:_MAX_NAME]


def _namespace(one: Mapping[str, Any]) -> bytes:
    digest = digest_from_hex(one["namespace"])
    if digest is None:
        raise ValueError(f"{one['namespace']!r} is no namespace")
    return digest


def _entry(one: Mapping[str, Any]) -> Entry:
    texts = one["model"], one["engine"]
    if not all(isinstance(text, str) and len(text) <= _MAX_NAME for text in texts):
        raise ValueError(f"{texts!r} are no names")
    times = _time(one["since"]), _time(one["last_used"])
    return Entry(*texts, *times, _counts(one))


def _counts(one: Mapping[str, Any]) -> Counts:
    """An older version wrote no reasons."""
    reasons = Shortfalls.of_document(one.get("shortfalls", {}))
    found = Counts(**one["counts"], shortfalls=reasons)
    for name in _COUNTS:
        if type(getattr(found, name)) not in (int, type(getattr(Counts(), name))):
            raise ValueError(f"{name} is {getattr(found, name)!r}")
    if not found.sound:
        raise ValueError("counts that do not add up")
    return found


def _time(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{value!r} is no time")
    return seconds
