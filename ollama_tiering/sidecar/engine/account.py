"""The account of one engine's process: the gate with the speeds it measured, and what it did, as
runners report it, so that `tiering status`, the metrics and the ledger know such engines, too.

The engine may have several connections, and makes new ones: what is counted is counted here, once
for each process and namespace. The rules are those of the patched server's runner (kvtier/tiering/
gate.go and stats.go), which counts by itself, so that its sums outlive a sidecar: both are held to
the same numbers by tests/vectors/accounts.json.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from ollama_tiering.protocol.engine.messages import EngineFinished, GateMode
from ollama_tiering.sidecar.engine.identity import Identity
from ollama_tiering.sidecar.policy import gate
from ollama_tiering.sidecar.runner_settings import settings_of
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import InvalidBlock

RATE_TOKENS: Final = 32  # computed: the time of fewer says nothing of the speed of prefill
FULL_BATCH: Final = 512  # ... so many say all about it: small batches leave a device idle
_MOST: Final = 1 << 40  # bytes or seconds of one request: what is more is no count
_MOST_REASONS: Final = (
    48  # numbers below it are counted, known here or not (protocol/shortfalls.py)
)
_LEAST_SECONDS: Final = 1e-6  # shorter than any clock tells: nothing is measured by it


_Of = tuple[int, str, str]  # process id, engine, model


class EngineAccount:
    """Thread-safe."""

    def __init__(self, pid: int, identity: Identity, min_tokens: int) -> None:
        self._lock = threading.Lock()
        self._prefill_rate = 0.0  # tokens/s, 0 until measured
        self._copy_rate = 0.0  # bytes/s
        self.of: _Of = pid, identity.engine, identity.model
        self._report = pb.RunnerReport(
            pid=pid,
            engine=identity.engine,
            model=identity.model,
            tiered=True,
            namespace=identity.namespace,
            started_unix_seconds=time.time(),
            caches=identity.caches,
            cpu_attention=identity.cpu_attention,
            min_tokens=min_tokens,
            settings=settings_of(pid),
        )

    def restore_pays(
        self, mode: GateMode, tokens: int, file_bytes: int, tier_seconds: float
    ) -> bool:
        """Is having so many rows from the store expected to be faster than computing them?"""
        with self._lock:
            if mode is GateMode.RESTORE:
                return True
            rates = self._prefill_rate, self._copy_rate
            if gate.restore_pays(tokens, file_bytes, tier_seconds, *rates):
                return True
            self._report.skipped_by_gate += 1
            self._copy_rate = gate.drifted(self._copy_rate)
            return False

    def speeds(self) -> tuple[float, float]:
        """Of prefill, in tokens/s, and of copying, in bytes/s; 0: not measured yet."""
        with self._lock:
            return self._prefill_rate, self._copy_rate

    def stored(self, blocks: int) -> None:
        with self._lock:
            self._report.snapshot_blocks += blocks

    def finished(self, request: EngineFinished) -> pb.RunnerReport:
        """Counts a request; what there is to report now. InvalidBlock for what adds up to
        nothing.
        """
        computed = request.prompt_tokens - request.memory_tokens - request.restored_tokens
        seconds = (
            *(request.prefill_seconds, request.lookup_seconds),
            *(request.fetch_seconds, request.copy_seconds),
        )
        sound = all(math.isfinite(s) and 0 <= s < _MOST for s in seconds)
        if computed < 0 or request.restored_bytes >= _MOST or request.reason >= _MOST_REASONS:
            sound = False
        if not sound:
            raise InvalidBlock("the request's counts make no sense")
        with self._lock:
            self._count(request, computed)
            self._measure(request, computed)
        return self.report()

    def report(self) -> pb.RunnerReport:
        with self._lock:
            report = pb.RunnerReport()
            report.CopyFrom(self._report)
            return report

    def _count(self, request: EngineFinished, computed: int) -> None:
        report = self._report
        report.requests += 1
        report.prompt_tokens += request.prompt_tokens
        report.memory_tokens += request.memory_tokens
        report.restored_tokens += request.restored_tokens
        report.recomputed_tokens += computed
        report.failures = request.failures
        report.last_request.CopyFrom(
            pb.LastRequest(
                prompt_tokens=request.prompt_tokens,
                memory_tokens=request.memory_tokens,
                restored_tokens=request.restored_tokens,
                shortfall=request.reason,  # type: ignore[arg-type] # any number is kept
                at_token=request.at,
            )
        )
        if computed > 1:
            same = (one for one in report.shortfalls if one.reason == request.reason)
            one = next(same, None) or report.shortfalls.add(reason=request.reason)
            one.requests += 1
            one.tokens += computed

    def _measure(self, request: EngineFinished, computed: int) -> None:
        report = self._report
        if computed >= RATE_TOKENS and request.prefill_seconds >= _LEAST_SECONDS:
            rate = computed / request.prefill_seconds
            if not self._prefill_rate:
                self._prefill_rate = rate
            elif rate > self._prefill_rate or computed >= FULL_BATCH:
                # A small batch says only that prefill is not slower.
                self._prefill_rate += (rate - self._prefill_rate) / 4
            report.prefill_tokens_per_second = self._prefill_rate
            if computed >= FULL_BATCH and computed >= request.prompt_tokens - computed:
                report.prefill_tokens += max(request.beside_tokens, computed)
                report.prefill_seconds += request.prefill_seconds
        spent = request.lookup_seconds + request.fetch_seconds + request.copy_seconds
        report.restore_seconds += spent
        if not request.restored_tokens:
            return
        report.last_restore.CopyFrom(
            pb.RestoreReport(
                tokens=request.restored_tokens,
                bytes=request.restored_bytes,
                lookup_seconds=request.lookup_seconds,
                fetch_seconds=request.fetch_seconds,
                copy_seconds=request.copy_seconds,
            )
        )
        # The gate adds by itself what the tier is expected to take.
        own = max(request.fetch_seconds - request.expected_ms / 1000, 0.0) + request.copy_seconds
        if own >= _LEAST_SECONDS and request.restored_bytes:
            rate = request.restored_bytes / own
            self._copy_rate += (rate - self._copy_rate) / (4 if self._copy_rate else 1)


class EngineAccounts:
    """Those that were heard of, by process id and namespace. Thread-safe."""

    MOST: Final = 256
    MOST_HELD: Final = 64  # requests of one process

    def __init__(self, report: Callable[[pb.RunnerReport], None]) -> None:
        """`report`: where a runner's report goes. May block; ValueError for one that is refused."""
        self.report = report
        self._lock = threading.Lock()
        self._accounts: dict[tuple[int, bytes], EngineAccount] = {}
        self._held: dict[_Of, list[EngineFinished]] = {}

    def account(self, pid: int, identity: Identity, min_tokens: int) -> EngineAccount:
        with self._lock:
            key = pid, bytes(identity.namespace)
            account = self._accounts.pop(key, None)
            fresh = account is None
            account = account or EngineAccount(pid, identity, min_tokens)
            self._accounts[key] = account
            if len(self._accounts) > self.MOST:
                del self._accounts[next(iter(self._accounts))]
            held = self._held.pop((pid, identity.engine, identity.model), ())
        for request in held:
            _count_held(account, request)
        if fresh or held:
            self.report(account.report())
        return account

    def hold(self, pid: int, engine: str, model: str, request: EngineFinished) -> None:
        """Counts a request that ended while the model's file was being checked, as soon as the
        process has a namespace.
        """
        of = pid, engine, model
        with self._lock:
            known = next((one for one in self._accounts.values() if one.of == of), None)
            if known is None:
                held = self._held.setdefault(of, [])
                if len(held) < self.MOST_HELD:
                    held.append(request)
                if len(self._held) > self.MOST:
                    del self._held[next(iter(self._held))]
                return
        _count_held(known, request)
        self.report(known.report())


def _count_held(account: EngineAccount, request: EngineFinished) -> None:
    with contextlib.suppress(InvalidBlock):
        account.finished(request)
