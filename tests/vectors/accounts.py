"""Requests one after the other, and what an engine's account says of each: the sums that it reports
and the speeds by which the gate decides. The Go engines keep theirs in the runner, llama-server's
is the sidecar's; both give these numbers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from ollama_tiering.protocol.engine.messages import EngineFinished, GateMode
from ollama_tiering.sidecar.engine.account import EngineAccount
from ollama_tiering.sidecar.engine.identity import identity_of
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import hello

REFUSED: Final = None  # in place of a request: the gate says no
_NEVER: Final = 1 << 50  # bytes that no restore is worth
_ENDS, _NEW = pb.SHORTFALL_ENDS, pb.SHORTFALL_NOTHING_STORED


def accounts_document() -> dict[str, Any]:
    return {"cases": [_case(name, events) for name, events in _cases().items()]}


def _case(name: str, events: list[Any]) -> dict[str, Any]:
    account = EngineAccount(1, identity_of(hello()), 64)
    told = []
    for event in events:
        request = None if event is REFUSED else _finished(**event)
        if request is not None:
            account.finished(request)
        else:
            assert not account.restore_pays(GateMode.MEASURED, 1, _NEVER, 0.0)
        told.append({"request": request and asdict(request), "then": _then(account)})
    return {"name": name, "events": told}


def _then(account: EngineAccount) -> dict[str, Any]:
    report, (prefill, copying) = account.report(), account.speeds()
    return {
        "prefill_rate": prefill,
        "copy_rate": copying,
        "requests": report.requests,
        "prompt": report.prompt_tokens,
        "memory": report.memory_tokens,
        "restored": report.restored_tokens,
        "recomputed": report.recomputed_tokens,
        "prefill_tokens": report.prefill_tokens,
        "prefill_seconds": report.prefill_seconds,
        "skipped": report.skipped_by_gate,
        "reasons": [[one.reason, one.requests, one.tokens] for one in report.shortfalls],
    }


def _finished(
    *,
    prompt: int,
    memory: int = 0,
    restored: int = 0,
    reason: int = _NEW,
    beside: int = 0,
    seconds: float = 0.0,
    restored_bytes: int = 0,
    expected_ms: int = 0,
    fetch: float = 0.0,
    copy: float = 0.0,
) -> EngineFinished:
    at, failures, look_up = memory + restored, 0, 0.0
    return EngineFinished(
        *(prompt, memory, restored, reason, at, beside, failures, restored_bytes),
        *(seconds, look_up, fetch, copy, expected_ms),
    )


def _cases() -> dict[str, list[Any]]:
    whole = {"prompt": 1000, "beside": 1000, "seconds": 1.0}
    back = {"prompt": 1000, "memory": 100, "restored": 800, "reason": _ENDS}
    moved = {"restored_bytes": 1 << 30, "fetch": 0.5, "copy": 0.25}
    small = {"prompt": 900, "memory": 800, "reason": _ENDS}
    return {
        "speed of prefill: a small batch only raises it": [
            whole,
            {**small, "seconds": 1.0},
            {**small, "seconds": 0.02},
            {**whole, "prompt": 600, "beside": 600, "seconds": 2.0},
        ],
        "nothing is measured by a few tokens, or by no time": [
            {"prompt": 31, "beside": 31, "seconds": 0.5},
            {**whole, "seconds": 0.0},
            {**whole, "seconds": 5e-7},
            whole,
        ],
        "the sums of prefill are of full batches at the front of a prompt": [
            {"prompt": 2000, "memory": 1100, "reason": _ENDS, "beside": 900, "seconds": 1.0},
            {"prompt": 1024, "memory": 512, "reason": _ENDS, "beside": 512, "seconds": 1.0},
            {"prompt": 511, "beside": 511, "seconds": 1.0},
            {**whole, "beside": 5000},
            {**whole, "beside": 10},
        ],
        "speed of copying: without what the tier was expected to take": [
            {**back, **moved, "expected_ms": 250},
            {**back, **moved},
            {**back, **moved, "expected_ms": 60_000},
            {**back, **moved, "expected_ms": 60_000, "copy": 0.0},
            {**back, "restored_bytes": 0, "fetch": 1.0, "copy": 1.0},
        ],
        "a refusal moves the speed of copying towards the usual one": [
            whole,
            REFUSED,
            {**back, "restored_bytes": 1 << 20, "fetch": 0.5, "copy": 0.5},
            REFUSED,
            REFUSED,
            {**back, "restored_bytes": 1 << 34, "copy": 1.0},
            {**back, "restored_bytes": 1 << 34, "copy": 1.0},
            REFUSED,
        ],
        "each request that falls short has one reason": [
            whole,
            back,
            {**back, "restored": 899},
            {"prompt": 1000, "memory": 999, "reason": pb.SHORTFALL_TOO_SHORT},
            {"prompt": 1, "reason": _NEW},
            {**whole, "reason": pb.SHORTFALL_GATE},
            back,
        ],
    }
