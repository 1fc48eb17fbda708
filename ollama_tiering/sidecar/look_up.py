"""Look-ups as messages, on the event loop. A long look-up is done in pieces, so that others have
their turn.
"""

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
    TOKEN_BYTES,
    AttachedBlock,
    BlockExtra,
    BlockKey,
    MatchedBlock,
    NamespaceId,
    TieredStore,
    as_key,
    as_namespace,
)
from ollama_tiering.store import block_store_pb2 as pb

MAX_KEYS: Final = 1 << 16  # in one message

_Others = Callable[[], Awaitable[None]]


class LookUps:
    """To be used on the event loop only."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._long = asyncio.Lock()

    async def answer(self, request: pb.HasRequest) -> pb.HasResponse:
        """ValueError if the request makes no sense."""
        check_count(len(request.keys), "keys")
        find, blocks = self._in_pieces, len(request.keys)
        if request.by_rows:
            _, tokens, block_tokens = _checked(request)
            find, blocks = self._history, len(tokens) // (block_tokens * TOKEN_BYTES)
            check_count(blocks, "blocks")
        if blocks <= PIECE_BLOCKS:
            return await find(request, _nothing)
        async with self._long:  # their answers take megabytes: one at a time
            return await find(request, partial(asyncio.sleep, 0))

    async def _history(self, request: pb.HasRequest, others: _Others) -> pb.HasResponse:
        """Where rows name the blocks. `others` is awaited between two pieces of the answer."""
        namespace, tokens, _ = _checked(request)
        check_count(len(request.extras), "extras")
        extras = [BlockExtra(extra.row, extra.digest) for extra in request.extras]

        def find_and_use() -> list[MatchedBlock]:
            found, use = self._store.find_history(
                *(namespace, tokens, request.block_tokens),
                *(extras, tuple(request.fingerprints), request.least_tokens),
            )
            use()
            return found

        found = await asyncio.to_thread(find_and_use)
        response, hanging = pb.HasResponse(), _Hanging()
        for start in range(0, len(found), PIECE_BLOCKS):
            piece = found[start : start + PIECE_BLOCKS]
            hanging.note(start, piece)
            _add(response, piece)
            await others()
        hanging.add_to(response)
        return response

    async def _in_pieces(self, request: pb.HasRequest, others: _Others) -> pb.HasResponse:
        """`others` is awaited between two pieces."""
        namespace, tokens, block_tokens = _checked(request)
        keys: list[BlockKey] = []
        for start in range(0, len(request.keys), PIECE_BLOCKS):
            keys += map(as_key, request.keys[start : start + PIECE_BLOCKS])
            await others()
        response, hanging = pb.HasResponse(), _Hanging()
        pieces = self._store.match_in_pieces(namespace, keys, tokens, block_tokens)
        for found in pieces:
            hanging.note(len(response.blocks), found)
            _add(response, found)
            await others()
        hanging.add_to(response)
        return response


def _checked(request: pb.HasRequest) -> tuple[NamespaceId, bytes, int]:
    """Namespace, tokens and rows of a block. ValueError."""
    if not 1 <= request.block_tokens <= MAX_ROWS or len(request.tokens) % TOKEN_BYTES:
        raise ValueError("block_tokens or the length of tokens is not valid")
    return as_namespace(request.namespace), request.tokens, request.block_tokens


class _Hanging:
    """The window blocks of one answer. If there are too many, those of its first blocks are left
    out, because a client resumes as late as it can.
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
    """Sets field by field, which takes half the time of keywords; a look-up has
    dozens of blocks.
    """
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
        if block.fingerprint:
            info.fingerprint = block.fingerprint
        matched_tokens += block.rows
    response.matched_tokens += matched_tokens
