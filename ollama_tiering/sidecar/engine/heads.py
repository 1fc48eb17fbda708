"""What an engine must know of a block file before it reads it: where its payload begins, and the
checksum of each segment.

The engine cannot parse a header; the sidecar does, and remembers it: a look-up of 32,768 tokens
names 512 files. What was remembered may be of a file that another one of the same name has replaced
since. Then checksums do not match, the engine says so, and it is forgotten (`forget`).
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ollama_tiering.sidecar.engine import states
from ollama_tiering.sidecar.engine.identity import Identity
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockKey,
    BlockMeta,
    KnownLayouts,
    LeasedBlock,
    align,
    check_header,
    read_header,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.system.files import fd_reader
from ollama_tiering.system.ownership import require_ours

_MAX_BYTES: Final = 32 << 20  # of memory, about
_ENTRY_BYTES: Final = 400  # beside the checksums
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Head:
    payload_offset: int
    rows: int
    used: int  # bytes of a state; 0 of a block of the chain
    crcs: bytes  # u32 each


class Heads:
    """Those used last, of all engines. Thread-safe."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._lock = threading.Lock()
        self._heads: OrderedDict[BlockKey, Head] = OrderedDict()
        self._max_bytes = max_bytes
        self._bytes = 0

    def get_all(self, keys: Sequence[BlockKey]) -> list[Head | None]:
        with self._lock:
            found = [self._heads.get(key) for key in keys]
            for key, head in zip(keys, found, strict=True):
                if head is not None:
                    self._heads.move_to_end(key)
            return found

    def put(self, key: BlockKey, head: Head) -> None:
        with self._lock:
            self._drop(key)
            self._heads[key] = head
            self._bytes += _size(head)
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._heads)))

    def forget(self, key: BlockKey) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: BlockKey) -> None:
        head = self._heads.pop(key, None)
        if head is not None:
            self._bytes -= _size(head)


class HeadReader:
    """For one engine. Used by one thread at a time."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._layouts = KnownLayouts()  # of blocks that the engine can use

    def read(self, block: LeasedBlock) -> Head:
        """CorruptBlock, UnsupportedFormat or OSError where the engine cannot use the file."""
        header, payload_offset = _header(block)
        place = payload_offset, block.file_bytes
        meta = None if self._layouts.passes(header, *place) else check_header(header, *place)
        if (header.namespace, header.key) != (block.namespace, block.key):
            raise CorruptBlock("the file holds another block")
        used = 0
        if meta is not None and meta.cells:
            used = states.check_state(self._identity, meta)
        elif meta is not None:
            _check_rows(self._identity, meta)
            self._layouts.learn(header, *place)
        rows, crcs = len(header.tokens) // TOKEN_BYTES, [s.crc32c for s in header.segments]
        return Head(payload_offset, rows, used, struct.pack(f"<{len(crcs)}I", *crcs))


def _header(block: LeasedBlock) -> tuple[pb.BlockHeader, int]:
    if block.path is None:
        raise UnsupportedFormat("the block lies in no file")
    fd = os.open(block.path, _FLAGS)
    try:
        info = os.fstat(fd)
        require_ours(info, block.path)
        if not stat.S_ISREG(info.st_mode) or info.st_size != block.file_bytes:
            raise CorruptBlock(f"{block.path} is not a file of {block.file_bytes} bytes")
        return read_header(fd_reader(fd), info.st_size)
    finally:
        os.close(fd)


def _check_rows(identity: Identity, meta: BlockMeta) -> None:
    """The engine computes where segments lie: they must lie there."""
    offset = meta.payload_offset
    for segment, place in zip(meta.segments, identity.places, strict=False):
        here = (segment.child, segment.layer, int(segment.kind), segment.dtype, segment.row_bytes)
        if here != place or segment.encoded or segment.file_offset != offset:
            raise UnsupportedFormat("the block has other segments than the engine's cache")
        offset += align(segment.stored_bytes)
    if len(meta.segments) != len(identity.places):
        raise UnsupportedFormat("the block has other segments than the engine's cache")


def _size(head: Head) -> int:
    return _ENTRY_BYTES + len(head.crcs)
