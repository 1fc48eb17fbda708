"""Look-ups as messages, on the event loop: a long one goes in pieces, others have their turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from ollama_tiering.store import (
    MAX_ATTACHED,
    MAX_ROWS,
    PIECE_BLOCKS,
    AttachedBlock,
    BlockKey,
    MatchedBlock,
    TieredStore,
    as_key,
    as_namespace,
)
from ollama_tiering.store import block_store_pb2 as pb

MAX_KEYS: Final = 1 << 16  # in one message

_Others = Callable[[], Awaitable[None]]


class LookUps:
    """Used on the event loop only."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._long = asyncio.Lock()

    async def answer(self, request: pb.HasRequest) -> pb.HasResponse:
        """ValueError where the request makes no sense."""
        check_count(len(request.keys), "keys")
        if len(request.keys) <= PIECE_BLOCKS:
            return await self._in_pieces(request, _nothing)
        async with self._long:  # their answers take megabytes: one at a time
            return await self._in_pieces(request, partial(asyncio.sleep, 0))

    async def _in_pieces(self, request: pb.HasRequest, others: _Others) -> pb.HasResponse:
        """`others` is awaited between two pieces."""
        namespace, tokens = as_namespace(request.namespace), request.tokens
        if not 1 <= request.block_tokens <= MAX_ROWS or len(tokens) % 4:
            raise ValueError("block_tokens or the length of tokens is not valid")
        keys: list[BlockKey] = []
        for start in range(0, len(request.keys), PIECE_BLOCKS):
            keys += map(as_key, request.keys[start : start + PIECE_BLOCKS])
            await others()
        response, hanging = pb.HasResponse(), _Hanging()
        pieces = self._store.match_in_pieces(namespace, keys, tokens, request.block_tokens)
        for found in pieces:
            hanging.note(len(response.blocks), found)
            _add(response, found)
            await others()
        hanging.add_to(response)
        return response


class _Hanging:
    """The window blocks of one answer. When there are too many, those of its first blocks go: a
    client resumes as late as it can.
    """

    def __init__(self) -> None:
        self._of: deque[tuple[int, tuple[AttachedBlock, ...]]] = deque()  # block of the answer
        self._count = 0

    def note(self, first: int, found: Sequence[MatchedBlock]) -> None:
        """`found` are the blocks of the answer from number `first` on."""
        for at, block in enumerate(found, first):
            if block.attached:
                self._of.append((at, block.attached))
                self._count += len(block.attached)
        while self._count > MAX_ATTACHED:
            self._count -= len(self._of.popleft()[1])

    def add_to(self, response: pb.HasResponse) -> None:
        for at, attached in self._of:
            add = response.blocks[at].attached.add
            for one in attached:
                info = add()
                info.key = one.key
                info.stored_bytes = one.stored_bytes
                info.raw_bytes = one.raw_bytes
                info.expected_seconds = one.expected_seconds


def check_count(count: int, what: str) -> None:
    if count > MAX_KEYS:
        raise ValueError(f"{count} {what} are more than {MAX_KEYS}")


async def _nothing() -> None:
    pass


def _add(response: pb.HasResponse, found: Sequence[MatchedBlock]) -> None:
    """Field by field: that takes half the time of keywords, and a look-up has dozens of blocks."""
    add = response.blocks.add
    matched_tokens = 0
    for block in found:
        info = add()
        info.key = block.key
        info.rows = block.rows
        info.block_rows = block.block_rows
        info.tier = block.tier.value  # type: ignore[assignment]
        info.stored_bytes = block.stored_bytes
        info.raw_bytes = block.raw_bytes
        info.expected_seconds = block.expected_seconds
        matched_tokens += block.rows
    response.matched_tokens += matched_tokens
