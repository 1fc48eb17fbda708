"""Blocks for clients that read: leased, and named or sent one by one, as each is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from ollama_tiering.protocol.limits import PART_BYTES
from ollama_tiering.sidecar.bounds import (
    MAX_GET_STREAMS,
    MAX_INLINE_GETS,
    Slots,
    begun,
    in_seconds,
    sent,
)
from ollama_tiering.sidecar.look_up import check_count
from ollama_tiering.sidecar.look_up_times import LookUpTimes
from ollama_tiering.sidecar.prompt_look_up import PromptLookUps
from ollama_tiering.store import (
    TOKEN_BYTES,
    Awaited,
    BlockKey,
    LeasedBlock,
    Leasing,
    NamespaceId,
    TieredStore,
    as_key,
    as_namespace,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here

_AT_ONCE_BYTES: Final = 8192 * TOKEN_BYTES  # a prompt whose plan takes a few milliseconds
PLAN_SECONDS: Final = 30.0  # in which a client takes the plan
_BATCH_BLOCKS: Final = 64  # named in one answer: the client begins to read meanwhile


class Reads:
    """To be used on the event loop only; `pool` runs what may block."""

    def __init__(
        self, store: TieredStore, pool: Executor, times: LookUpTimes | None = None
    ) -> None:
        self._times = times or LookUpTimes()
        self._store = store
        self._pool = pool
        self._prompts = PromptLookUps(store)
        self._streams = Slots("streams that read", MAX_GET_STREAMS)
        self._inline = Slots("streams that read inline", MAX_INLINE_GETS)

    async def look_up(self, request: pb.LookUpRequest, context: Context) -> None:
        """Answers LookUp: the plan at once, then files, while the next ones are located.
        ValueError, NoRoom, ClientTooSlow.
        """
        with self._streams.taken():
            prepare = self._prompts.prepare
            with self._times.measured():
                if len(request.tokens) <= _AT_ONCE_BYTES:  # a thread would answer later
                    plan, keys, fingerprints = prepare(request)
                else:
                    plan, keys, fingerprints = await self._blocking(prepare, request)
            deadline = in_seconds(PLAN_SECONDS)
            await sent(context, pb.LookUpResponse(plan=plan), deadline)
            if not keys:
                return
            namespace, left = as_namespace(request.namespace), iter(fingerprints)
            lease_id, pieces, piece = await self._blocking(self._leased, namespace, keys)
            unnamed = len(keys)
            try:
                while piece and await self._name(piece, left, context):
                    unnamed -= len(piece.blocks)
                    piece = await self._blocking(next, pieces, None) if unnamed else None
            except BaseException:
                self._store.release(lease_id)
                raise

    def _leased(
        self, namespace: NamespaceId, keys: Sequence[BlockKey]
    ) -> tuple[int, Iterator[Leasing], Leasing | None]:
        """With the first piece."""
        lease_id, pieces = self._store.begin_lease_in_pieces(namespace, keys)
        return lease_id, pieces, next(pieces, None)

    async def get(self, request: pb.GetRequest, context: Context) -> None:
        """Answers Get. ValueError, NoRoom, ClientTooSlow."""
        with contextlib.ExitStack() as places:
            places.enter_context(self._streams.taken())
            if request.inline:
                places.enter_context(self._inline.taken())
            namespace = as_namespace(request.namespace)
            keys = checked_keys(request.keys)
            if len(set(keys)) < len(keys):
                raise ValueError("a key is named twice")
            leasing = await self._blocking(self._store.begin_lease, namespace, keys)
            with self._released_if_it_fails(leasing):
                await self._answer_get(request, keys, leasing, context)

    @contextlib.contextmanager
    def _released_if_it_fails(self, leasing: Leasing) -> Any:
        try:
            yield
        except BaseException:
            leasing.give_up()
            self._store.release(leasing.lease_id)
            raise

    async def _name(
        self, leasing: Leasing, fingerprints: Iterator[bytes], context: Context
    ) -> bool:
        """Whether all of these could be named. What the client has not read when the lease ends is
        not sent any more. Takes the fingerprints of the blocks that it names.
        """
        deadline = in_seconds(leasing.lease_seconds)
        response = pb.LookUpResponse(lease_id=leasing.lease_id)
        named = 0
        try:
            for awaited in leasing.blocks:
                if not isinstance(awaited, LeasedBlock) and response.files:
                    await sent(context, response, deadline)
                    response = pb.LookUpResponse(lease_id=leasing.lease_id)
                block = await _staged(leasing, awaited)
                if block is None:
                    break
                response.files.add(
                    key=block.key,
                    tier=block.tier.value,
                    path=os.fsencode(block.path or ""),
                    file_bytes=block.file_bytes,
                    fingerprint=next(fingerprints, b""),
                )
                named += 1
            if response.files:
                await sent(context, response, deadline)
            return named == len(leasing.blocks)
        except BaseException:
            leasing.give_up()
            raise

    async def _answer_get(
        self, request: pb.GetRequest, keys: list[BlockKey], leasing: Leasing, context: Context
    ) -> None:
        """What the client has not read when the lease ends is not sent any more."""
        deadline = in_seconds(leasing.lease_seconds)
        if request.inline:
            await begun(context, deadline)
        answered = 0
        batch: list[pb.GetResponse] = []
        most = _BATCH_BLOCKS if request.batch else 1
        for awaited in leasing.blocks:
            if batch and (len(batch) >= most or not isinstance(awaited, LeasedBlock)):
                await sent(context, _joined(batch), deadline)
                batch = []
            block = await _staged(leasing, awaited)
            if block is None:
                break
            answered += 1
            response = pb.GetResponse(
                key=block.key,
                lease_id=leasing.lease_id,
                found=True,
                tier=block.tier.value,  # type: ignore[arg-type]
                file_bytes=block.file_bytes,
            )
            if not request.inline:
                response.path = os.fsencode(block.path or "")
                batch.append(response)
                continue
            sent_bytes = 0
            async for part in self._parts(block):
                response.part = part
                sent_bytes += len(part)
                await sent(context, response, deadline)
            if sent_bytes < block.file_bytes:
                leasing.give_up()
                last = pb.GetResponse(key=block.key, lease_id=leasing.lease_id)
                await sent(context, last, deadline)
                return
        if batch:
            await sent(context, _joined(batch), deadline)
        if answered < len(keys):
            last = pb.GetResponse(key=keys[answered], lease_id=leasing.lease_id)
            await sent(context, last, deadline)

    async def _parts(self, block: LeasedBlock) -> AsyncIterator[bytes]:
        """Ends early if the block cannot be read."""
        offset = 0
        while offset < block.file_bytes:
            length = min(PART_BYTES, block.file_bytes - offset)
            try:
                part = await self._blocking(self._store.read_part, block, offset, length)
            except (OSError, CorruptBlock) as error:
                log.warning("inline read failed: key=%s error=%s", block.key.hex(), error)
                return
            offset += length
            yield part

    async def _blocking(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)


def checked_keys(keys: Sequence[bytes]) -> list[BlockKey]:
    """ValueError if there are too many, or one is no key."""
    check_count(len(keys), "keys")
    return [as_key(key) for key in keys]


def _joined(answers: list[pb.GetResponse]) -> pb.GetResponse:
    """One message for several blocks, because a message costs more than the block that it names."""
    first, *more = answers
    first.more.extend(more)
    return first


async def _staged(leasing: Leasing, awaited: Awaited) -> LeasedBlock | None:
    """The block, as soon as a client can read it. None, which ends the lease's run, if it cannot be
    staged or not in time. Occupies no thread of the pool meanwhile.
    """
    if isinstance(awaited, LeasedBlock):
        return awaited
    try:
        block = await asyncio.wait_for(asyncio.wrap_future(awaited), leasing.deadline_seconds)
    except TimeoutError:
        leasing.give_up("not staged in time")
        return None
    if block is None:
        leasing.give_up("not staged")
    return block
