"""What was done for each model: sums over all of its runners, including those that have ended.

A runner reports sums since its model was loaded. The ledger books by how much they grew since its
last report. Process id and start time together identify a runner, because process ids are used
again. Each prompt token is in memory, restored or recomputed; a report in which these do not add up
is not booked. Neither is a report in which more requests have a reason for what they computed than
there were requests.
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

from ollama_tiering.config import count
from ollama_tiering.protocol.seconds_saved import Saved
from ollama_tiering.protocol.shortfalls import NONE, Shortfalls
from ollama_tiering.protocol.shortfalls import name as reason_name
from ollama_tiering.sidecar.days import MOST, MOST_NAME, Days, DaySums
from ollama_tiering.store import DIGEST_BYTES, digest_from_hex
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)

MAX_MODELS: Final = 128  # the one used longest ago goes for a new one
MAX_RUNNERS: Final = 128
_VERSION: Final = 1

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
        numbers = {key: getattr(report, key) for key in _COUNTS}
        return cls(**numbers, shortfalls=Shortfalls.of(report.shortfalls))

    @property
    def sound(self) -> bool:
        values = [getattr(self, name) for name in _COUNTS]
        parts = self.memory_tokens + self.restored_tokens + self.recomputed_tokens
        return (
            all(0 <= value < MOST for value in values)
            and parts == self.prompt_tokens
            and self.shortfalls.fits(self.requests, self.recomputed_tokens)
        )

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        sums = {n: getattr(self, n) + sign * getattr(other, n) for n in _COUNTS}
        return Counts(**sums, shortfalls=self.shortfalls.plus(other.shortfalls, sign))

    def has_fallen(self, before: Counts) -> bool:
        """Whether some sum is smaller than it was."""
        fallen = any(getattr(self, name) < getattr(before, name) for name in _COUNTS)
        return fallen or self.shortfalls.has_fallen(before.shortfalls)

    def document(self) -> dict[str, Any]:
        """The sums as a document for a file. The reasons are in a field of their own, which an
        older version ignores.
        """
        numbers = {name: getattr(self, name) for name in _COUNTS}
        return {"counts": numbers, "shortfalls": self.shortfalls.document()}


_COUNTS: Final = tuple(field.name for field in fields(Counts) if field.name != "shortfalls")


@dataclass(frozen=True, slots=True)
class Entry:
    """The sums of one namespace. Times are Unix seconds of the wall clock."""

    model: str  # file name
    engine: str
    since: float
    last_used: float
    counts: Counts = Counts()


class Ledger:
    """Thread-safe. It touches no file."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}  # by namespace; the latest used is last
        self._runners: dict[_Runner, Counts] = {}  # as they last reported; the latest is last
        self._seldom = QuietLog(log)
        self.days = Days(wall_clock)
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
            self.days.book(entry.model, _of_day(more, total))
            self.changes += 1
        _log(report, entry.model, more)

    def book_today(self, model: str, sums: DaySums) -> None:
        """What no runner reports. `model` is a file name; empty where it is not known."""
        self.days.book(file_name(model), sums)
        with self._lock:
            self.changes += 1

    def entries(self) -> dict[bytes, Entry]:
        """The entries by namespace, the last used one last."""
        with self._lock:
            return dict(self._entries)

    def document(self) -> dict[str, Any]:
        """The ledger as a document for a file; `restore` reads it."""
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
        days, more = self.days.document(), self.days.document(later=True)
        tables = {"models": models, "runners": runners, "days": days, "days_more": more}
        return {"version": _VERSION, **tables}

    def restore(self, document: Any) -> None:
        """ValueError if this is not what `document` gave; then nothing was changed."""
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
        # An older version wrote none of the one, or of the other.
        self.days.restore(document.get("days", {}), document.get("days_more", {}))
        with self._lock:
            self._entries, self._runners = entries, runners
            self._trim()

    def _new(self, report: pb.RunnerReport) -> Entry:
        now = self._wall_clock()
        return Entry(file_name(report.model), report.engine[:MOST_NAME], now, now)

    def _trim(self) -> None:
        while len(self._entries) > MAX_MODELS:
            del self._entries[next(iter(self._entries))]
        while len(self._runners) > MAX_RUNNERS:
            del self._runners[next(iter(self._runners))]


def _log(report: pb.RunnerReport, model: str, more: Counts) -> None:
    """One line for a request that has ended; a runner may report of several at once."""
    if not more.requests:
        return
    short = more.recomputed_tokens > more.requests  # the last token of each is always computed
    log.info(
        "%s ended: model=%s pid=%d prompt=%d in_memory=%d restored=%d computed=%d why=%s",
        count(more.requests, "request"),
        *(model, report.pid, more.prompt_tokens, more.memory_tokens, more.restored_tokens),
        more.recomputed_tokens,
        reason_name(report.last_request.shortfall) if short else "-",
    )


def _of_day(more: Counts, total: Counts) -> DaySums:
    """What was done since the last report, by the speed of all that was measured."""
    computed, seconds = total.prefill_tokens, total.prefill_seconds
    saved = Saved.of([replace(more, prefill_tokens=computed, prefill_seconds=seconds)]).seconds
    return DaySums(
        more.requests,
        more.prompt_tokens,
        more.memory_tokens,
        more.restored_tokens,
        more.recomputed_tokens,
        more.restore_seconds,
        0.0 if saved is None else saved,
    )


def file_name(model: str) -> str:
    """The file name of a model, as a runner reports it, cut to a bounded length."""
    return PurePath(model).name[:MOST_NAME]


def _namespace(one: Mapping[str, Any]) -> bytes:
    digest = digest_from_hex(one["namespace"])
    if digest is None:
        raise ValueError(f"{one['namespace']!r} is no namespace")
    return digest


def _entry(one: Mapping[str, Any]) -> Entry:
    texts = one["model"], one["engine"]
    if not all(isinstance(text, str) and len(text) <= MOST_NAME for text in texts):
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
