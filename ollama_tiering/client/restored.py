"""Restored blocks as a client holds them: found, leased, read and checked."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockKey,
    BlockMeta,
    Namespace,
    buffer_reader,
    read_meta,
    verify_buffer,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock
from ollama_tiering.system.closing import Closing
from ollama_tiering.system.pagecache import read_past, read_whole

if TYPE_CHECKING:
    from typing_extensions import Buffer

KINDS: Final = {"k": pb.SEGMENT_KIND_K, "v": pb.SEGMENT_KIND_V}
_DTYPES: Final[Mapping[str, type[np.generic]]] = {"f16": np.float16, "f32": np.float32}


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block of a match. The first `rows` of its `block_rows` rows belong to the prompt."""

    key: BlockKey
    first_position: int
    rows: int
    block_rows: int
    tier: str  # "ram", "local", "remote"
    stored_bytes: int
    expected_seconds: float  # to have its bytes in host memory


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of a prompt: positions 0 to `rows` - 1, without holes."""

    tokens: bytes  # the prompt's, int32 little endian
    blocks: tuple[BlockRef, ...] = ()

    @property
    def rows(self) -> int:
        return sum(block.rows for block in self.blocks)

    @property
    def expected_seconds(self) -> float:
        return sum(block.expected_seconds for block in self.blocks)


class Block:
    """One restored block, checked and read-only. It stays valid as long as something refers to its
    arrays.
    """

    def __init__(self, ref: BlockRef, meta: BlockMeta, data: Buffer) -> None:
        self.key = ref.key
        self.first_position = ref.first_position
        self.rows = ref.rows  # that match the prompt
        self.block_rows = meta.rows  # that every segment holds
        self.meta = meta
        self._data = memoryview(data).cast("B").toreadonly()
        self._segments = {(s.child, s.layer, s.kind): s for s in meta.segments}

    @property
    def tokens(self) -> list[int]:
        """Token ids of the rows that match."""
        return [int(t) for t in np.frombuffer(self.meta.tokens, "<i4")[: self.rows]]

    def segment(self, layer: int, kind: str, child: int = 0) -> memoryview:
        """The bytes of one segment: [block_rows][kv_heads][head_dim]. KeyError if there is none."""
        segment = self._segments[child, layer, KINDS[kind]]
        return self._data[segment.file_offset : segment.file_offset + segment.stored_bytes]

    def array(self, layer: int, kind: str, child: int = 0) -> NDArray[Any]:
        """The segment as an array (block_rows, elements of a row); of bytes if numpy lacks the
        dtype.
        """
        segment = self._segments[child, layer, KINDS[kind]]
        flat = np.frombuffer(self.segment(layer, kind, child), _DTYPES.get(segment.dtype, np.uint8))
        return flat.reshape(self.block_rows, -1)


class Blocks(Closing, Sequence[Block]):
    """The blocks of one `get`, first to last. They are leased until `close`, or until the lease
    ends.
    """

    def __init__(self, blocks: list[Block], release: Callable[[], None]) -> None:
        self._blocks = blocks
        self._release = release

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        return self._blocks[index]

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def rows(self) -> int:
        return sum(block.rows for block in self._blocks)

    def close(self) -> None:
        """Ends the lease. Arrays that were taken before stay valid, because files are never
        modified.
        """
        release, self._release = self._release, lambda: None
        release()

    def __del__(self) -> None:
        self.close()


def load(answer: pb.GetResponse) -> Buffer:
    """Reads the file into memory of this process, so that the bytes that are checked are the bytes
    that are used.

    Files are never mapped. If somebody truncates a mapped file, or its disk fails, touching it
    raises SIGBUS, which ends the process; and what somebody writes to it later would not be
    checked.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    path = os.fsdecode(answer.path)
    fd = os.open(path, flags)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size != answer.file_bytes:
            raise CorruptBlock(f"{path} is not a file of {answer.file_bytes} bytes")
        if answer.tier == pb.TIER_RAM:
            return read_whole(fd, info.st_size)
    except EOFError as error:
        raise CorruptBlock(f"{path}: {error}") from None
    finally:
        os.close(fd)
    try:
        return read_past(path, answer.file_bytes, flags)
    except EOFError as error:
        raise CorruptBlock(str(error)) from None


def checked(ns: Namespace, match: Match, ref: BlockRef, data: Buffer) -> Block:
    read_at = buffer_reader(data)
    meta = read_meta(read_at, memoryview(data).nbytes)
    start = ref.first_position * TOKEN_BYTES
    wanted = match.tokens[start : start + ref.rows * TOKEN_BYTES]
    if (meta.namespace, meta.key) != (ns.digest(), ref.key):
        raise CorruptBlock("the file holds another block")
    if meta.first_position != ref.first_position or not meta.tokens.startswith(wanted):
        raise CorruptBlock("the block's tokens are not the prompt's")
    verify_buffer(meta, data)
    return Block(ref, meta, data)
