"""Look-ups of one connection: what of a prompt can be restored, whether that pays, which files.

Blocks that an engine can read at once are named in the answer. Where some must first be copied or
decoded, or a file on a disk must be opened to know what is in it, the answer is `pending` and comes
to WAIT, for which an engine has more patience: a look-up itself waits for no disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ollama_tiering.protocol.engine.messages import (
    Damaged,
    EngineMatch,
    File,
    FileKind,
    GateMode,
    Hello,
    Matched,
)
from ollama_tiering.protocol.engine.wire import MAX_REPLY_BYTES
from ollama_tiering.sidecar.engine import states
from ollama_tiering.sidecar.engine.account import EngineAccount
from ollama_tiering.sidecar.engine.heads import Head, HeadReader, Heads
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, Identity
from ollama_tiering.sidecar.policy.history import History, Sought, find
from ollama_tiering.sidecar.policy.plan import end_of, planned
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    LeasedBlock,
    Leasing,
    MatchedBlock,
    NamespaceId,
    TieredStore,
    TierKind,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock, InvalidBlock, NoRoom, UnsupportedFormat

MAX_LEASES: Final = 64  # of one connection
_MOST_MS: Final = (1 << 32) - 1
_FILE_BYTES: Final = 512  # of an answer for one file, beside its checksums: more than a path takes
_MOST_UNKNOWN: Final = 16  # files in RAM whose headers are read at once: a few milliseconds


class _Wanted(NamedTuple):  # made by the hundred, as File is
    """A block or a state that is to be named."""

    key: BlockKey
    first_position: int
    used: int  # rows; of a state 0
    bytes: int
    seconds: float
    kind: FileKind = FileKind.ROWS
    rows: int = 0  # of a window


@dataclass(slots=True)
class _OpenLease:
    wanted: Sequence[_Wanted]
    leasing: Leasing
    namespace: NamespaceId
    have: int
    answer: Matched  # as long as all files are there
    keys: tuple[BlockKey, ...] = ()  # of the files that were named
    named: Matched | None = None  # the answer that named them
    use: Callable[[], None] = lambda: None  # counts the look-up, when it is answered


class EngineLookUps:
    """Used by one thread at a time. `close` releases everything."""

    def __init__(
        self,
        store: TieredStore,
        heads: Heads,
        hello: Hello,
        identity: Identity,
        account: EngineAccount,
        min_tokens: int,
        condemned: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self._store = store
        self._condemned = condemned  # whether a block of this key is never to be used
        self._namespace = identity.namespace  # where the look-up found most
        self._heads = heads
        self._identity = identity
        self._reader = HeadReader(identity)
        self._account = account
        self._gate = hello.gate
        self._states = hello.states
        self._min_tokens = min_tokens
        self._leases: dict[int, _OpenLease] = {}
        self._use: Callable[[], None] = lambda: None
        self._most_files = MAX_REPLY_BYTES // (_FILE_BYTES + 4 * len(identity.shapes))

    def match(self, request: EngineMatch) -> Matched:
        """InvalidBlock, NoRoom. A look-up counts once, with its answer: after `pending`, an engine
        may release the lease and ask anew on the connection that it waits on.
        """
        self._use = lambda: None
        answer = self._matched(request)
        if answer.pending:
            self._leases[answer.lease_id].use = self._use
        else:
            self._use()
        return answer

    def _matched(self, request: EngineMatch) -> Matched:
        tokens = request.tokens
        count = len(tokens) // TOKEN_BYTES
        held = request.have // BLOCK_TOKENS
        if request.have > count or len(request.fingerprints) > held:
            raise InvalidBlock(
                "have and the number of tokens or fingerprints are not in this order"
            )
        most = max(count - 1, 0)  # the last token is always computed: sampling needs its logits
        if most - request.have < self._min_tokens:
            return nothing(pb.SHORTFALL_TOO_SHORT)
        if self._gate is GateMode.RECOMPUTE:
            return nothing(pb.SHORTFALL_RECOMPUTE)
        history = self._history(request, most)
        found = history.blocks
        # This engine goes on from all of the rows that its slot holds, or gets all of them anew.
        start = request.have // BLOCK_TOKENS * BLOCK_TOKENS if history.held == held else 0
        rows, reason, at = end_of(found, most)
        rows = min(rows, (start // BLOCK_TOKENS + self._most_files - 1) * BLOCK_TOKENS)
        if rows - request.have < self._min_tokens:
            return nothing(reason, at)
        beside: list[_Wanted] = []
        if self._states:
            above = request.have + self._min_tokens - 1
            end, beside = self._resumable(tokens, found, above, rows)
            if not beside:
                return nothing(pb.SHORTFALL_STATE_MISSING, request.have)
            if end < rows:
                rows, reason, at = end, pb.SHORTFALL_STATE_MISSING, end
        blocks = (
            _Wanted(one.block.key, one.first, one.rows, one.bytes, one.block.expected_seconds)
            for one in planned(found, start, rows, BLOCK_TOKENS)
        )
        wanted = [*blocks, *beside]
        seconds = sum(one.seconds for one in wanted)
        size = sum(one.bytes for one in wanted)
        if not self._account.restore_pays(self._gate, rows - request.have, size, seconds):
            return nothing(pb.SHORTFALL_GATE)
        expected_ms = min(round(seconds * 1000), _MOST_MS)
        return self._leased(wanted, request.have, Matched(rows, 0, True, expected_ms, reason, at))

    def _history(self, request: EngineMatch, most: int) -> History:
        held = request.have // BLOCK_TOKENS
        extras = [BlockExtra(extra.position, extra.digest) for extra in request.extras]
        best: History | None = None
        for namespace in (self._identity.namespace, *self._identity.also):
            sought = Sought(
                *(namespace, request.tokens, BLOCK_TOKENS, most),
                *(request.have, self._min_tokens, extras),
                fingerprints=request.fingerprints if len(request.fingerprints) == held else (),
            )
            found = self._without_condemned(find(self._store, sought))
            if best is None or _rows(found) > _rows(best):
                best, self._namespace = found, namespace
        assert best is not None
        self._use = best.use
        return best

    def _without_condemned(self, found: History) -> History:
        keys = (index for index, one in enumerate(found.blocks) if self._condemned(one.key))
        end = next(keys, len(found.blocks))
        return found._replace(blocks=found.blocks[:end], held=min(found.held, end))

    def _resumable(
        self, tokens: bytes, found: Sequence[MatchedBlock], above: int, most: int
    ) -> tuple[int, list[_Wanted]]:
        """The greatest position at which the engine can go on, and what it needs beside rows."""
        identity = self._identity
        state = states.last_state(identity, tokens, found, above, most)
        above = max(above, state[0] - 1) if state else above
        if identity.window_row_bytes and (
            window := states.last_window(identity, tokens, found, above, most)
        ):
            end, pieces = window
            return end, [
                _Wanted(
                    *(one.block.key, one.first, 0, one.block.raw_bytes),
                    *(one.block.expected_seconds, FileKind.WINDOW, one.rows),
                )
                for one in pieces
            ]
        if state is None:
            return 0, []
        end, block = state
        return end, [
            _Wanted(block.key, end, 0, block.raw_bytes, block.expected_seconds, FileKind.STATE)
        ]

    def wait(self, lease_id: int) -> Matched:
        """What a pending answer lacks. Where files were named already, the same answer once more,
        and the lease lasts as long again: nothing, if it is over.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return nothing(pb.SHORTFALL_BLOCKS_GONE)
        if lease.named is not None:
            renewed = self._store.renew(lease_id)
            return lease.named if renewed else nothing(pb.SHORTFALL_BLOCKS_GONE)
        blocks = lease.leasing.wait().blocks
        lease.use()
        return self._named(lease, blocks, self._heads.get_all([block.key for block in blocks]))

    def release(self, lease_id: int) -> None:
        """One that is over, or never was, is fine."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            lease.leasing.give_up()
            self._store.release(lease_id)

    def damaged(self, report: Damaged) -> None:
        """The store checks for itself. InvalidBlock."""
        lease = self._leases.get(report.lease_id)
        if lease is None or report.file >= len(lease.keys):
            raise InvalidBlock("no such file")
        key = lease.keys[report.file]
        self._heads.forget(key)
        self._store.report_corrupt(lease.namespace, key)

    def close(self) -> None:
        for lease_id in list(self._leases):
            self.release(lease_id)

    def _leased(self, wanted: Sequence[_Wanted], have: int, answer: Matched) -> Matched:
        if len(self._leases) >= MAX_LEASES:
            raise NoRoom(f"{MAX_LEASES} leases of this connection are open already")
        keys = [one.key for one in wanted]
        leasing = self._store.begin_lease(self._namespace, keys)
        named = replace(answer, lease_id=leasing.lease_id)
        lease = _OpenLease(wanted, leasing, self._namespace, have, named)
        self._leases[leasing.lease_id] = lease
        ready = [one for one in leasing.blocks if isinstance(one, LeasedBlock)]
        heads = self._heads.get_all([block.key for block in ready])
        if len(ready) < len(leasing.blocks) or not _at_hand(ready, heads):
            return lease.answer
        return self._named(lease, ready, heads)

    def _named(
        self, lease: _OpenLease, blocks: Sequence[LeasedBlock], heads: Sequence[Head | None]
    ) -> Matched:
        """The leading run of files that can be used. With a state: all of them or none."""
        answer = lease.answer
        files: list[File] = []
        lacking: int = pb.SHORTFALL_BLOCKS_GONE
        for one, block, head in zip(lease.wanted, blocks, heads, strict=False):
            if head is None:
                known, lacking = self._read(block)
                if known is None:
                    break
                head = known
            rows, used = (head.rows, one.used) if one.used else (one.rows, head.used)
            place = block.path or "", block.file_bytes, head.payload_offset, one.first_position
            files.append(File(*place, rows, used, int(block.tier), head.crcs, int(one.kind)))
        rows, reason, at = answer.rows, answer.reason, answer.at
        if len(files) < len(lease.wanted):
            last = lease.wanted[len(files) - 1] if files and not self._states else None
            rows, reason, at = (last.first_position + last.used if last else 0), lacking, 0
            if rows - lease.have < self._min_tokens:
                self.release(answer.lease_id)
                return nothing(reason)
        lease.keys = tuple(one.key for one in lease.wanted[: len(files)])
        lease.named = replace(
            answer, rows=rows, reason=reason, at=at, pending=False, files=tuple(files)
        )
        return lease.named

    def _read(self, block: LeasedBlock) -> tuple[Head | None, int]:
        """What the file says of itself; None and why it cannot be used."""
        try:
            head = self._reader.read(block)
        except CorruptBlock:
            self._store.report_corrupt(block.namespace, block.key)
            return None, pb.SHORTFALL_DAMAGED
        except (UnsupportedFormat, OSError):
            return None, pb.SHORTFALL_UNREADABLE
        self._heads.put(block.key, head)
        return head, pb.SHORTFALL_BLOCKS_GONE


def _rows(found: History) -> int:
    return sum(block.rows for block in found.blocks)


def _at_hand(blocks: Sequence[LeasedBlock], heads: Sequence[Head | None]) -> bool:
    """Whether naming these waits for no disk, and takes no time to speak of."""
    unknown = [block for block, head in zip(blocks, heads, strict=True) if head is None]
    return len(unknown) <= _MOST_UNKNOWN and all(b.tier is TierKind.RAM for b in unknown)


def nothing(reason: int, at: int = 0) -> Matched:
    return Matched(0, 0, False, 0, reason, at)
