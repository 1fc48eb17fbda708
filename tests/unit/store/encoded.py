"""A store over memory tiers whose blocks are worth encoding, and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from measure.store import samples
from ollama_tiering.store.block.blockfile import (
    PREAMBLE_BYTES,
    encode_block,
    pack_head,
    plan_block,
    read_meta,
)
from ollama_tiering.store.block.encoding import Encoding, ZstdPlanes
from ollama_tiering.store.block.key import BlockKey, prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.serving.session import BlockOffer, Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTempBlock, MemoryTier
from ollama_tiering.store.upkeep import transcode
from ollama_tiering.store.upkeep.transcode import Seconds

HEAD_DIM = 8192
NS = samples.namespace(layers=1, head_dim=HEAD_DIM)
NAMESPACE = NS.digest()
BLOCK_TOKENS = int(NS.block_tokens)
SHAPES = [
    SegmentShape(0, 0, kind, "f16", HEAD_DIM * 2) for kind in (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
]


def block(tokens: Sequence[int], parent: bytes = NAMESPACE, *, noise: bool = False) -> bytes:
    """A first block: K like rows of a model; with `noise` nothing in it can be made smaller."""
    plan = plan_block(
        namespace=NAMESPACE,
        parent=parent,
        tokens=tokens_to_bytes(tokens),
        first_position=0,
        shapes=SHAPES,
        created_unix_seconds=1,
    )
    rng = np.random.default_rng(tokens[0])
    elements = len(tokens) * HEAD_DIM
    if noise:
        payload = [rng.integers(0, 65536, elements, np.uint16).data for _ in SHAPES]
    else:
        payload = [rng.standard_normal(elements).astype(np.float16).data for _ in SHAPES]
    return encode_block(plan, payload)


RAW_BYTES = len(block([0] * BLOCK_TOKENS))


class EncodedBench:
    """RAM over a local tier in zstd. Budgets in raw blocks. Each block is a sequence of its own."""

    def __init__(self, ram: int = 4, local: int = 8, **options: Any) -> None:
        self.now = 1000.0
        self.ram, self.local = MemoryTier(TierKind.RAM), MemoryTier(TierKind.LOCAL)
        self.budgets = [ram * RAW_BYTES, local * RAW_BYTES]
        self.options = options
        self.encoding = Encoding.ZSTD
        self.open()

    def open(self) -> None:
        self.store = TieredStore(
            list(zip([self.ram, self.local], self.budgets, strict=True)),
            background=False,
            measure=False,
            encodings=TierEncodings({TierKind.LOCAL: self.encoding}),
            clock=lambda: self.now,
            **self.options,
        )
        self.state = self.store._state

    def put(self, first: int, *, noise: bool = False) -> tuple[BlockKey, bytes]:
        tokens = range(first, first + BLOCK_TOKENS)
        data = block(tokens, noise=noise)
        (key,) = prefix_chain(NAMESPACE, tokens_to_bytes(tokens), BLOCK_TOKENS)
        session = self.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
        (answer,) = session.reserve([BlockOffer(key, NAMESPACE, len(data))])
        assert answer.outcome is Outcome.RESERVED
        session._pending[answer.reservation_id].temp.write_at(0, data)
        (result,) = session.commit([answer.reservation_id])
        assert result.stored, result
        self.store.close_session(session)
        return key, data

    def reboot(self) -> None:
        """Writes down what is in RAM, then RAM is empty."""
        self.store.run_pending()
        self.ram.blocks.clear()
        self.open()

    def content(self, tier: MemoryTier, key: BlockKey) -> bytes:
        return tier.blocks[NAMESPACE, key]


PLANES = ZstdPlanes()
RAW = block([1, 2, 3, 4])


def encoded(data: bytes) -> bytes | None:
    opened = MemoryOpenBlock(data)
    meta = read_meta(opened.read_at, opened.file_bytes)
    made = transcode.encode(meta, opened, PLANES, Seconds())
    if made is None:
        return None
    temp = MemoryTempBlock(meta.namespace, meta.key, made.file_bytes)
    made.write_to(temp, Seconds())
    return bytes(temp.data)


def decoded(data: bytes) -> bytes:
    opened = MemoryOpenBlock(data)
    meta = read_meta(opened.read_at, opened.file_bytes)
    temp = MemoryTempBlock(meta.namespace, meta.key, meta.raw_file_bytes)
    transcode.decode(meta, opened, temp, PLANES, Seconds())
    return bytes(temp.data)


def reheaded(data: bytes, change: Callable[[pb.BlockHeader], None]) -> bytes:
    """The file with another header, all checksums of the head right."""
    header_bytes = int.from_bytes(data[12:16], "little")
    payload_offset = int.from_bytes(data[16:24], "little")
    header = pb.BlockHeader.FromString(data[PREAMBLE_BYTES : PREAMBLE_BYTES + header_bytes])
    change(header)
    return pack_head(header.SerializeToString(), payload_offset) + data[payload_offset:]


ENCODED = encoded(RAW) or b""
