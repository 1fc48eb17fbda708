"""A look-up of the Go engines as messages: one call for the plan, the lease and the files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ollama_tiering.sidecar.look_up import check_count
from ollama_tiering.sidecar.policy import gate
from ollama_tiering.sidecar.policy.history import Sought, find
from ollama_tiering.sidecar.policy.plan import End, PlannedBlock, end_of, planned
from ollama_tiering.sidecar.policy.spans import RowSpan, resumable
from ollama_tiering.sidecar.policy.windows import WindowCache, WindowEnds, last_windows
from ollama_tiering.store import (
    MAX_ROWS,
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    TieredStore,
    TierKind,
    as_namespace,
)
from ollama_tiering.store import block_store_pb2 as pb

_MOST_WINDOWS: Final = 64


class Prepared(NamedTuple):
    """`keys` are those of the plan's files, of which nothing is leased yet; `fingerprints` are
    those of the first ones.
    """

    plan: pb.LookUpPlan
    keys: Sequence[BlockKey] = ()
    fingerprints: Sequence[bytes] = ()


class PromptLookUps:
    """Thread-safe."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def prepare(self, request: pb.LookUpRequest) -> Prepared:
        """Touches no file. ValueError if the request makes no sense."""
        sought = _sought(request)
        if sought.most < sought.memory_rows + sought.min_tokens:
            return _nothing(pb.SHORTFALL_TOO_SHORT)
        spans = [RowSpan(span.first, span.last) for span in request.spans]
        history = find(self._store, sought)
        history.use()
        found = history.blocks
        rows, reason, at = _cut(end_of(found, sought.most), spans)
        least = sought.memory_rows + sought.min_tokens
        if rows < least:
            return _nothing(reason, at)
        ends: WindowEnds | None = None
        if request.windows:
            caches = [WindowCache(one.child, one.size, one.row_bytes) for one in request.windows]
            ends = last_windows(
                *(found, sought.tokens, sought.block_tokens, caches, least, rows),
                lambda at: resumable(spans, at) == at,
            )
            end = ends.at if ends else 0
            if end < rows:
                reason, at = _windows_end(request, sought.memory_rows, rows, end)
            if ends is None:
                return _nothing(reason, at)
            rows = end
        start = history.held * sought.block_tokens
        blocks = planned(found, start, rows, sought.block_tokens)
        sizes = [one.bytes for one in blocks]
        seconds, size = sum(one.block.expected_seconds for one in blocks), sum(sizes)
        if ends is not None:
            seconds, size = seconds + ends.seconds, size + ends.bytes
        if not gate.restore_pays(
            *(rows - sought.memory_rows, size, seconds),
            *(request.prefill_tokens_per_second, request.copy_bytes_per_second),
        ):
            return _nothing(pb.SHORTFALL_GATE)
        keys = _keys(blocks, ends)
        plan = pb.LookUpPlan(
            start_row=start,
            end_row=rows,
            files=len(keys),
            reason=reason,  # type: ignore[arg-type]
            at_row=at,
            expected_seconds=seconds,
            own_bytes=sum(
                own
                for own, one in zip(sizes, blocks, strict=True)
                if one.block.tier is not TierKind.RAM
            ),
        )
        return Prepared(plan, keys, [one.block.fingerprint for one in blocks])


def _sought(request: pb.LookUpRequest) -> Sought:
    count, rest = divmod(len(request.tokens), TOKEN_BYTES)
    if not 1 <= request.block_tokens <= MAX_ROWS or rest:
        raise ValueError("block_tokens or the length of tokens is not valid")
    check_count(count // request.block_tokens, "blocks")
    check_count(len(request.extras), "extras")
    check_count(len(request.spans), "spans")
    if len(request.windows) > _MOST_WINDOWS or any(not one.size for one in request.windows):
        raise ValueError("no windows that a model has")
    if not request.memory_rows <= request.most_rows <= count:
        raise ValueError("memory_rows, most_rows and the number of tokens are not in this order")
    return Sought(
        namespace=as_namespace(request.namespace),
        tokens=request.tokens,
        block_tokens=request.block_tokens,
        most=request.most_rows,
        memory_rows=request.memory_rows,
        min_tokens=max(request.min_tokens, 1),
        extras=[BlockExtra(extra.row, extra.digest) for extra in request.extras],
        by_rows=request.by_rows,
        fingerprints=tuple(request.fingerprints),
    )


def _cut(end: End, spans: Sequence[RowSpan]) -> End:
    """What is left of it where nobody goes on within a span."""
    rows = resumable(spans, end.rows)
    if rows == end.rows:
        return end
    if not rows:
        return End(0, pb.SHORTFALL_NOTHING_STORED, 0)
    differs = end.reason == pb.SHORTFALL_DIFFERS
    return End(rows, pb.SHORTFALL_DIFFERS if differs else pb.SHORTFALL_ENDS, rows)


def _windows_end(
    request: pb.LookUpRequest, memory_rows: int, matched: int, end: int
) -> tuple[int, int]:
    """Why rows that are stored up to `matched` are gone on with from `end` at most, and where."""
    if any(one.at_checkpoints for one in request.windows):
        return pb.SHORTFALL_STATE_MISSING, end or memory_rows
    return pb.SHORTFALL_WINDOW_MISSING, matched


def _nothing(reason: int, at: int = 0) -> Prepared:
    return Prepared(pb.LookUpPlan(reason=reason, at_row=at))  # type: ignore[arg-type]


def _keys(blocks: Sequence[PlannedBlock], ends: WindowEnds | None) -> list[BlockKey]:
    keys = [one.block.key for one in blocks]
    return keys + [one.key for one in ends.blocks] if ends else keys
