"""Block files of a local tier as a sidecar would have left them, with their index, cold or warm.

Files are as large as those of Qwen3-0.6B and have whole headers; their rows are zeros, which take
no room on the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from measure.store.looking_up import BLOCK_TOKENS, CHAIN, chain_tokens
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockKey,
    BlockPlan,
    BlockRecord,
    FsTier,
    MemoryTier,
    Namespace,
    SegmentShape,
    TieredStore,
    TierKind,
    crc32c,
    plan_block,
    prefix_chain,
    tokens_to_bytes,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.tools import samples
from ollama_tiering.system.pagecache import forget

INDEX_NAME: Final = "index.sqlite"
ENOUGH_BYTES: Final = 1 << 50
NAMESPACES: Final = 4
LAYERS: Final = 28
_KV_HEADS, _HEAD_DIM = 8, 128
_ROW_BYTES: Final = _KV_HEADS * _HEAD_DIM * 2
_TOKENS_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
_PAGE_BYTES: Final = 4096
_LOOKED_AT: Final = 50
DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class Conversation:
    number: int  # the oldest is 0
    blocks: int

    @property
    def ns(self) -> Namespace:
        return samples.namespace(
            f"bench-{self.number % NAMESPACES}",
            block_tokens=BLOCK_TOKENS,
            layers=LAYERS,
            kv_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
        )

    @property
    def tokens(self) -> bytes:
        return tokens_to_bytes(chain_tokens(self.number)[: self.blocks * BLOCK_TOKENS])

    @property
    def keys(self) -> list[BlockKey]:
        return prefix_chain(self.ns.digest(), self.tokens, BLOCK_TOKENS)

    def chain(self) -> Iterator[tuple[BlockKey, bytes, bytes]]:
        """(key, parent, tokens) of every block."""
        parent: bytes = self.ns.digest()
        tokens = self.tokens
        for index, key in enumerate(self.keys):
            yield key, parent, tokens[_TOKENS_BYTES * index : _TOKENS_BYTES * (index + 1)]
            parent = key


def conversations(files: int) -> list[Conversation]:
    """All have CHAIN blocks, but the last."""
    return [
        Conversation(number, min(CHAIN, files - number * CHAIN))
        for number in range(-(-files // CHAIN))
    ]


def make_files(directory: Path, already: int, files: int) -> None:
    """Oldest first; the first `already` of them are there."""
    tier = FsTier(TierKind.LOCAL, directory)
    try:
        for conversation in conversations(files):
            if (conversation.number + 1) * CHAIN > already:
                _make_chain(tier, conversation)
    finally:
        tier.close()


def _make_chain(tier: FsTier, conversation: Conversation) -> None:
    ns = conversation.ns
    tier.describe(ns.digest(), ns.fields())
    checksums = [crc32c(bytes(BLOCK_TOKENS * _ROW_BYTES))] * (2 * LAYERS)
    header = _header(ns)
    for index, (key, parent, tokens) in enumerate(conversation.chain()):
        header.key, header.parent, header.tokens = key, parent, tokens
        header.first_position = index * BLOCK_TOKENS
        plan = BlockPlan(header)
        path = block_path(tier, ns, key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.open("wb") as file:
            file.write(plan.head(checksums))
            file.truncate(plan.file_bytes)


def _header(ns: Namespace) -> pb.BlockHeader:
    """Of a block of this namespace; key, parent, position and tokens are to be filled in."""
    shapes = [
        SegmentShape(0, layer, kind, "f16", _ROW_BYTES)
        for layer in range(LAYERS)
        for kind in (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
    ]
    plan = plan_block(
        namespace=ns.digest(),
        parent=ns.digest(),
        tokens=bytes(_TOKENS_BYTES),
        first_position=0,
        shapes=shapes,
    )
    return _parsed(plan.head([1] * len(shapes)))


def _parsed(head: bytes) -> pb.BlockHeader:
    """docs/format.md: the length is at 12, the header at 32. Nothing is checked."""
    header = pb.BlockHeader()
    header.ParseFromString(head[32 : 32 + int.from_bytes(head[12:16], "little")])
    return header


def make_index(directory: Path, files: int) -> None:
    """Without reading the files: from books that are filled by hand."""
    tier = FsTier(TierKind.LOCAL, directory)
    books = TieredStore(
        [(MemoryTier(TierKind.LOCAL), ENOUGH_BYTES)],
        index_path=directory / INDEX_NAME,
        background=False,
        measure=False,
    )
    try:
        for conversation in conversations(files):
            namespace = conversation.ns.digest()
            for key, parent, tokens in conversation.chain():
                info = block_path(tier, conversation.ns, key).stat()
                record = BlockRecord(
                    key, namespace, parent, tokens, BLOCK_TOKENS, info.st_size, info.st_mtime
                )
                books.state.add_copy(record, books.state.levels[0], 512 * info.st_blocks)
    finally:
        books.close()
        tier.close()


def block_path(tier: FsTier, ns: Namespace, key: BlockKey) -> Path:
    """RuntimeError: it is a tier that names no files."""
    path = tier.path(ns.digest(), key)
    if path is None:
        raise RuntimeError("the local tier has no directory")
    return Path(path)


def make_cold(directory: Path) -> str:
    """Drops what memory holds of these files; says what that was, and whether it worked."""
    os.sync()
    paths = [path for path in directory.rglob("*") if path.is_file()]
    try:
        DROP_CACHES.write_text("3", encoding="ascii")
        dropped = "the system dropped all pages, inodes and directories (drop_caches)"
    except OSError:
        for path in paths:
            with _opened(str(path)) as fd:
                forget(fd)
        dropped = "the pages of all files were dropped; inodes and directories stayed in memory"
    blocks = sorted(path for path in paths if path.suffix == ".kvb")
    looked_at = blocks[:: max(1, len(blocks) // _LOOKED_AT)]
    present = 0
    for path in looked_at:
        with _opened(str(path)) as fd:
            present += in_page_cache(fd)
    return f"{dropped}; of {len(looked_at)} headers looked at {present} were still there"


def read_headers(directory: Path) -> int:
    """Files of a walk that lists and stats all, reads one page of each, and parses it unchecked."""
    read = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            if name.endswith(".kvb"):
                path = f"{folder}/{name}"
                os.lstat(path)
                with _opened(path) as fd:
                    read += bool(_parsed(os.pread(fd, _PAGE_BYTES, 0)).key)
    return read


def in_page_cache(fd: int, at: int = 0) -> bool:
    """The page at this offset, by mincore(2). To read it with RWF_NOWAIT would begin to read it
    from the disk, and find it if the disk is quick.
    """
    # a page that is not touched is the file's
    mapped = mmap.mmap(fd, _PAGE_BYTES, access=mmap.ACCESS_COPY, offset=at)
    address = ctypes.addressof(view := ctypes.c_char.from_buffer(mapped))
    state = (ctypes.c_ubyte * 1)()
    failed = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(_PAGE_BYTES), state
    )
    del view
    mapped.close()
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return bool(state[0] & 1)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
