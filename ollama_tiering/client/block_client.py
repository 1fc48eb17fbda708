"""The client of the block store: finds, restores and stores the blocks of a prompt.

    client = BlockClient("/run/user/1000/ollama-tiering/sidecar.sock")
    found = client.match(namespace, prompt)          # found.rows positions need not be computed
    with client.get(namespace, found) as blocks:
        for block in blocks:                         # first to last, without holes
            k = block.array(layer, "k")              # (rows the block holds, elements of a row)
            cache[block.first_position : block.first_position + block.rows] = k[: block.rows]
    client.put(namespace, tokens, lambda i: {(layer, kind): rows of block i ...})

Every call has a deadline. With `fail_open` (the default) nothing is raised if the sidecar is down,
slow or full, or if a block is damaged: the answer is a miss, and `failures` counts it. The blocks
that `get` returns have matched their checksums and the prompt's tokens. Thread-safe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from ollama_tiering.client import saving
from ollama_tiering.client.channel import SidecarChannel
from ollama_tiering.client.loaded import loaded_digests
from ollama_tiering.client.restored import Block, BlockRef, Blocks, Match, checked, load
from ollama_tiering.client.stream import Exchange
from ollama_tiering.errors import ServiceError, TieringError
from ollama_tiering.protocol.limits import PART_BYTES
from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.plain_text import printable
from ollama_tiering.protocol.tier_names import tier_name
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    Namespace,
    prefix_chain,
    tokens_to_bytes,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.system.closing import Closing

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

SegmentsOf = Callable[[int], Mapping[Any, Any]]  # block index -> ([child,] layer, kind) -> rows

_BATCH_BYTES: Final = 64 << 20  # payload reserved, filled and committed at a time


@dataclass(frozen=True, slots=True)
class PutResult:
    """Rows 0 to `rows` - 1 are in the store now. `reason` says why not all rows are."""

    rows: int
    stored_blocks: int
    reason: str = ""


class BlockClient(Closing):
    """One connection to a sidecar; a context manager that closes it."""

    def __init__(
        self,
        socket_path: Path | str,
        *,
        fail_open: bool = True,
        inline: bool = False,
        lookup_seconds: float = 1.0,
        transfer_seconds: float = 30.0,
    ) -> None:
        """`inline`: the bytes go through the connection. A client that cannot open the files
        needs this.
        """
        self.failures: dict[str, int] = {}  # by what failed
        self._fail_open = fail_open
        self._inline = inline
        self._lookup_seconds = lookup_seconds
        self._transfer_seconds = transfer_seconds
        self._lock = threading.Lock()
        self._channel = SidecarChannel(
            Path(socket_path),
            [
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )

    @property
    def _stub(self) -> Any:
        return self._channel.stub()

    def close(self) -> None:
        self._channel.close()

    def match(
        self, ns: Namespace, tokens: Sequence[int], *, extras: Sequence[BlockExtra] = ()
    ) -> Match:
        """Finds the longest stored prefix. `extras` says, by position, what stands there besides
        tokens, such as images.
        """
        data = tokens_to_bytes(tokens)
        with self._failing_open("match"):
            return self._match(ns, data, extras)
        return Match(data)

    def get(self, ns: Namespace, match: Match) -> Blocks:
        """Gets the blocks of a match. If some are gone or damaged, the result is the run before the
        first of these.
        """
        blocks: list[Block] = []
        lease: list[int] = []
        with self._failing_open("get"):
            if match.blocks:
                blocks.extend(self._get(ns, match, lease))
        return Blocks(blocks, lambda: self._release(lease))

    def put(
        self,
        ns: Namespace,
        tokens: Sequence[int],
        segments_of: SegmentsOf,
        *,
        extras: Sequence[BlockExtra] = (),
    ) -> PutResult:
        """Stores those blocks of the tokens that are not stored yet, first to last, and the tail
        block.

        `segments_of(i)` gives the rows of block i, which begin at position i * block_tokens. It
        maps (layer, kind) or (child, layer, kind) to a C-contiguous array (rows, elements of a
        row). It is called only for blocks that are missing, and its arrays are read before `put`
        returns.
        """
        data = tokens_to_bytes(tokens)
        with self._failing_open("put"):
            return self._put(ns, data, segments_of, extras)
        return PutResult(0, 0, "the sidecar did not answer")

    def remove_seq(
        self, ns: Namespace, tokens: Sequence[int], *, extras: Sequence[BlockExtra] = ()
    ) -> int:
        """Removes the blocks that only this sequence uses. Returns how many."""
        data = tokens_to_bytes(tokens)
        keys = [link.key for link in saving.chain(ns, data, extras)]
        with self._failing_open("remove"):
            request = pb.RemoveSeqRequest(namespace=ns.digest(), keys=keys)
            answer = self._stub.RemoveSeq(request, timeout=self._transfer_seconds)
            return int(answer.removed_blocks)
        return 0

    def check_files(
        self, files: Sequence[LoadedFile], patience_seconds: float = 0.0
    ) -> tuple[bytes, ...]:
        """SHA-256 of what a model was loaded from, for its namespace: a file's name may lie. Each
        file is looked at before it is read (`LoadedFile.of`). Empty while the sidecar still reads
        them after `patience_seconds`. It does not fail open: ServiceError if there is no sidecar,
        and for a file that is not what it was, or not what its name says.
        """
        try:
            return loaded_digests(self._stub, files, patience_seconds, self._lookup_seconds)
        except grpc.RpcError as error:
            raise _service_error("check_files", error) from None

    def stat(self) -> adm.StatResponse:
        """Budgets, counters, runners. It does not fail open: ServiceError if
        there is no sidecar.
        """
        try:
            answer: adm.StatResponse = self._stub.Stat(
                pb.StatRequest(), timeout=self._lookup_seconds
            )
        except grpc.RpcError as error:
            raise _service_error("stat", error) from None
        return answer

    def _match(self, ns: Namespace, tokens: bytes, extras: Sequence[BlockExtra]) -> Match:
        block_tokens = int(ns.block_tokens)
        keys = prefix_chain(ns.digest(), tokens, block_tokens, extras)
        answer = self._stub.Has(
            pb.HasRequest(
                namespace=ns.digest(), keys=keys, tokens=tokens, block_tokens=block_tokens
            ),
            timeout=self._lookup_seconds,
        )
        blocks: list[BlockRef] = []
        first = 0
        for index, info in enumerate(answer.blocks):
            rows = info.rows
            if index >= len(keys) or info.key != keys[index]:
                # Matched by tokens alone, which do not show what else stands in the prompt.
                beyond = [e.row for e in extras if e.row >= first]
                rows = min([rows, *(row - first for row in beyond)])
            if rows <= 0:
                break
            blocks.append(
                BlockRef(
                    key=BlockKey(info.key),
                    first_position=first,
                    rows=rows,
                    block_rows=info.block_rows,
                    tier=tier_name(info.tier),
                    stored_bytes=info.stored_bytes,
                    expected_seconds=info.expected_seconds,
                )
            )
            first += rows
        return Match(tokens, tuple(blocks))

    def _get(self, ns: Namespace, match: Match, lease: list[int]) -> Iterator[Block]:
        answers = self._stub.Get(
            pb.GetRequest(
                namespace=ns.digest(),
                keys=[ref.key for ref in match.blocks],
                inline=self._inline,
                batch=not self._inline,
            ),
            timeout=self._transfer_seconds,
        )
        refs = iter(match.blocks)
        received = bytearray()
        for answer in (one for batch in answers for one in (batch, *batch.more)):
            lease[:] = [answer.lease_id]
            if not answer.found:
                self._count("evicted")
                return
            data: Buffer
            if self._inline:
                received += answer.part
                if len(received) < answer.file_bytes:
                    continue
                data, received = received, bytearray()
            else:
                data = load(answer)
            ref = next(refs)
            try:
                yield checked(ns, match, ref, data)
            except (CorruptBlock, UnsupportedFormat) as error:
                self._report_corrupt(ns, ref.key, str(error))
                answers.cancel()
                return

    def _put(
        self,
        ns: Namespace,
        tokens: bytes,
        segments_of: SegmentsOf,
        extras: Sequence[BlockExtra],
    ) -> PutResult:
        found = self._match(ns, tokens, extras)
        block_tokens = int(ns.block_tokens)
        if found.rows == len(tokens) // TOKEN_BYTES:
            return PutResult(found.rows, 0)
        links = saving.chain(ns, tokens, extras)
        whole = sum(ref.rows == ref.block_rows == block_tokens for ref in found.blocks)
        stored = 0
        rows = whole * block_tokens
        with Exchange(self._stub.Put, self._transfer_seconds) as exchange:
            exchange.send(pb.PutRequest(open=_open_message(ns)))
            batch: list[saving.Filling] = []
            for index in range(whole, len(links)):
                batch.append(saving.plan(ns, index, links[index], segments_of(index)))
                if index + 1 < len(links) and sum(f.plan.file_bytes for f in batch) < _BATCH_BYTES:
                    continue
                write = self._write_inline if self._inline else self._write_files
                done, reason = write(exchange, batch)
                stored += done
                rows += sum(filling.plan.rows for filling in batch[:done])
                if reason:
                    return PutResult(rows, stored, reason)
                batch = []
        return PutResult(rows, stored)

    def _write_files(self, exchange: Exchange, batch: list[saving.Filling]) -> tuple[int, str]:
        """How many blocks of the batch, from the first on, the store has now, and why it has no
        more.
        """
        offers = [
            pb.BlockOffer(
                key=f.plan.key, parent=f.parent, file_bytes=f.plan.file_bytes, tail=f.tail
            )
            for f in batch
        ]
        answer = exchange.call(pb.PutRequest(reserve=pb.PutReserve(offers=offers)))
        reason = ""
        ids: list[int] = []
        usable = 0
        for filling, reservation in zip(batch, answer.reserved.reservations, strict=True):
            if reservation.outcome == pb.Reservation.OUTCOME_RESERVED:
                filling.write_to(Path(os.fsdecode(reservation.path)))
                ids.append(reservation.id)
            elif reservation.outcome != pb.Reservation.OUTCOME_PRESENT:
                outcome = pb.Reservation.Outcome.Name(reservation.outcome)
                reason = reservation.reason or outcome
                break
            else:
                ids.append(0)
            usable += 1
        wanted = [reservation_id for reservation_id in ids if reservation_id]
        if wanted:
            commit = pb.PutCommit(reservation_ids=wanted)
            results = iter(exchange.call(pb.PutRequest(commit=commit)).committed.results)
            for done, reservation_id in enumerate(ids):
                result = next(results) if reservation_id else None
                if result is not None and not result.stored:
                    return done, result.reason or "not stored"
        return usable, reason.removeprefix("OUTCOME_").lower()

    def _write_inline(self, exchange: Exchange, batch: list[saving.Filling]) -> tuple[int, str]:
        for done, filling in enumerate(batch):
            data = filling.to_bytes()
            for start in range(0, len(data), PART_BYTES):
                part = data[start : start + PART_BYTES]
                last = start + PART_BYTES >= len(data)
                inline = pb.PutInline(key=filling.plan.key, part=part, last=last)
                exchange.send(pb.PutRequest(inline=inline))
            result = exchange.receive().committed.results[0]
            if not result.stored:
                return done, result.reason or "not stored"
        return len(batch), ""

    def _release(self, lease: list[int]) -> None:
        if lease:
            request = pb.ReleaseRequest(lease_id=lease.pop())
            # A lease ends by itself too: that it could not be given back is no failure.
            with contextlib.suppress(grpc.RpcError, ServiceError, ValueError):  # ValueError: closed
                self._stub.Release(request, timeout=self._lookup_seconds)

    def _report_corrupt(self, ns: Namespace, key: BlockKey, detail: str) -> None:
        log.warning("block damaged: key=%s detail=%s", key.hex(), detail)
        self._count("corrupt")
        request = pb.ReportCorruptRequest(namespace=ns.digest(), key=key, detail=printable(detail))
        with self._failing_open("report"):
            self._stub.ReportCorrupt(request, timeout=self._transfer_seconds)

    def _count(self, what: str) -> None:
        with self._lock:
            self.failures[what] = self.failures.get(what, 0) + 1

    @contextmanager
    def _failing_open(self, what: str) -> Iterator[None]:
        try:
            yield
        except (grpc.RpcError, OSError, TieringError) as error:
            self._count(what)
            if not self._fail_open:
                if isinstance(error, TieringError):
                    raise
                raise _service_error(what, error) from error
            log.debug("block store call failed: call=%s error=%s", what, error)


def _open_message(ns: Namespace) -> pb.PutOpen:
    fields = [pb.NamespaceField(name=name, value=value) for name, value in ns.fields()]
    return pb.PutOpen(
        namespace=ns.digest(),
        description=pb.Namespace(fields=fields),
        block_tokens=int(ns.block_tokens),
    )


def _service_error(what: str, error: Exception) -> ServiceError:
    if isinstance(error, grpc.RpcError):
        detail = f"{error.code().name}: {error.details()}" if hasattr(error, "code") else str(error)
    else:
        detail = str(error)
    return ServiceError(f"{what}: {detail}", hint="is a sidecar running? `tiering sidecar`")
