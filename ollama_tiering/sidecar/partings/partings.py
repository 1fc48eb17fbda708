"""From look-ups that fell short, and from what engines report of their requests afterwards, to the
partings of the last time.

Both come at moments at which nobody may be kept waiting, so both are only noted then. `digest`,
which takes milliseconds, makes partings of them: every second, and when somebody asks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, NamedTuple, TypeVar

from ollama_tiering.protocol.shortfalls import NOT_THERE, OF_LOOK_UP
from ollama_tiering.sidecar.partings.record import KeptParting, PartingRecord, kept
from ollama_tiering.store import DIGEST_BYTES, NamespaceId, as_namespace
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.tools.partings import LEAST_LOST, Parting, PartingFinder, PartingKind

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

_DIGEST_SECONDS: Final = 1.0
_DAY_SECONDS: Final = 86400.0
_MOST_NOTED: Final = 256
_MOST_RUNNERS: Final = 256
_LATE_SECONDS: Final = 3600.0  # a request that ends later is not put down to a look-up


class _Ended(NamedTuple):
    """What a runner said of the last request that ended."""

    unix_seconds: float
    pid: int
    namespace: NamespaceId
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    shortfall: int
    num_ctx: int  # of a slot; 0: not known

    @property
    def computed_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.memory_tokens - self.restored_tokens)


class Lost(NamedTuple):
    requests: int
    tokens: int
    seconds: float


class Partings:
    """Thread-safe."""

    def __init__(
        self,
        finder: PartingFinder,
        wall_clock: Callable[[], float] = time.time,
        count: Callable[[str], None] = lambda model: None,
    ) -> None:
        """`count` is called with the model's file name for each that cost something."""
        self._finder = finder
        self._count = count
        self._wall_clock = wall_clock
        self._ended: deque[_Ended] = deque(maxlen=_MOST_NOTED)
        self._noting = threading.Lock()
        self._requests: dict[tuple[int, bytes], int] = {}  # that a runner has counted so far
        self._rates: dict[bytes, float] = {}  # tokens/s of prefill, by namespace
        self._digesting = threading.Lock()
        self._lock = threading.Lock()  # of the record; held for no time to speak of
        self._record = PartingRecord()

    def reported(self, report: pb.RunnerReport) -> None:
        """A runner's report, of either wire. Takes no time."""
        if len(report.namespace) != DIGEST_BYTES or not report.HasField("last_request"):
            return
        namespace, last = as_namespace(report.namespace), report.last_request
        with self._noting:
            if report.prefill_tokens_per_second > 0:
                _put(self._rates, bytes(namespace), report.prefill_tokens_per_second)
            runner = report.pid, bytes(namespace)
            if self._requests.get(runner) == report.requests:
                return  # says nothing new
            _put(self._requests, runner, report.requests)
        self._ended.append(
            _Ended(
                *(self._wall_clock(), report.pid, namespace, last.prompt_tokens),
                *(last.memory_tokens, last.restored_tokens, last.shortfall),
                report.settings.context_tokens,
            )
        )

    def rate(self, namespace: bytes) -> float:
        """Tokens/s of prefill, as its runner last measured it; 0: not yet."""
        return self._rates.get(namespace, 0.0)

    def digest(self) -> None:
        """Makes partings of what was noted. May take long after many look-ups."""
        with self._digesting:
            while (noted := self._finder.next()) is not None:
                if (parting := noted[1]) is None:
                    continue
                one = kept(parting, tokens=self._finder.text_allowed(parting.namespace))
                with self._lock:
                    self._record.add(one)
            while self._ended:
                ended = self._ended.popleft()
                with self._lock:
                    self._settle(ended)

    async def keep_up(self, pool: Executor) -> None:
        """Digests now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(_DIGEST_SECONDS)
            try:
                await asyncio.get_running_loop().run_in_executor(pool, self.digest)
            except Exception:
                log.exception("partings of prompts not looked at")

    def latest(self, wanted: Callable[[KeptParting], bool], most: int) -> list[KeptParting]:
        """The latest first. May take long, as `digest`."""
        self.digest()
        with self._lock:
            found = [one for one in self._record if wanted(one)]
        return found[:most] if most else found

    def shown(self, one: KeptParting) -> tuple[Parting, bool]:
        """With its tokens, if a rule does not forbid to show them; whether one does."""
        allowed = self._finder.text_allowed(one.parting.namespace)
        return (one.unpacked() if allowed else one.parting), not allowed

    def model(self, one: KeptParting) -> str:
        """File name of its model; empty where it is not known."""
        return self._finder.model(one.parting.namespace)

    def lost_in_a_day(self) -> Lost:
        """Of what costs something, as far as it is digested."""
        since = self._wall_clock() - _DAY_SECONDS
        requests = tokens = 0
        seconds = 0.0
        with self._lock:
            for one in self._record:
                lost = one.lost_tokens
                if one.parting.unix_seconds < since or lost < LEAST_LOST:
                    continue
                requests, tokens = requests + 1, tokens + lost
                rate = self.rate(bytes(one.parting.namespace))
                seconds += lost / rate if rate else 0.0
        return Lost(requests, tokens, seconds)

    def _settle(self, ended: _Ended) -> None:
        """What became of a request whose look-up fell short, or whose blocks could not be read."""
        one = next((kept for kept in self._record if _is_of(kept, ended)), None)
        if ended.shortfall in NOT_THERE:
            if one is not None:
                self._record.drop(one)
            one = KeptParting(_not_there(ended), (b"", b"", b""), ended.computed_tokens)
            self._record.add(one)
            self._counted(one)
            return
        if one is None:
            return
        more_in_memory = ended.memory_tokens > one.parting.at_token
        for_this = ended.computed_tokens > 1 and ended.shortfall in OF_LOOK_UP
        if more_in_memory or not for_this:
            self._record.drop(one)  # it was not why the prompt was computed
            return
        one.computed_tokens, one.num_ctx = ended.computed_tokens, ended.num_ctx
        self._counted(one)

    def _counted(self, one: KeptParting) -> None:
        if one.lost_tokens >= LEAST_LOST:
            self._count(self.model(one))


def _is_of(one: KeptParting, ended: _Ended) -> bool:
    return (
        one.computed_tokens is None
        and one.parting.namespace == ended.namespace
        and one.parting.prompt_tokens == ended.prompt_tokens
        and 0 <= ended.unix_seconds - one.parting.unix_seconds < _LATE_SECONDS
    )


def _not_there(ended: _Ended) -> Parting:
    """The look-up found blocks that could not be used."""
    damaged = ended.shortfall != pb.SHORTFALL_BLOCKS_GONE
    return Parting(
        kind=PartingKind.DAMAGED if damaged else PartingKind.EVICTED,
        unix_seconds=ended.unix_seconds,
        namespace=ended.namespace,
        prompt_tokens=ended.prompt_tokens,
        at_token=ended.memory_tokens + ended.restored_tokens,
        lost_tokens=ended.computed_tokens,
        evicted_unix_seconds=0.0 if damaged else ended.unix_seconds,
    )


def _put(table: dict[K, V], key: K, value: V) -> None:
    """As the latest; the oldest goes when there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > _MOST_RUNNERS:
        del table[next(iter(table))]
