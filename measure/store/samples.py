"""Sequences of made-up blocks for tests and benchmarks: valid files whose bytes follow from the
key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    BlockOffer,
    LayerSpec,
    Namespace,
    SegmentShape,
    encode_block,
    plan_block,
    tokens_to_bytes,
    window_end_extra,
    window_extra,
)
from ollama_tiering.store import block_store_pb2 as pb

_ELEMENT_BYTES = 2
_CREATED = 1_763_700_000


@dataclass(frozen=True, slots=True)
class SampleBlock:
    key: BlockKey
    parent: bytes
    rows: int
    tail: bool
    data: bytes  # the whole file

    @property
    def offer(self) -> BlockOffer:
        return BlockOffer(self.key, self.parent, len(self.data), self.tail)


def namespace(
    model: str = "sample",
    *,
    block_tokens: int = 4,
    layers: int = 2,
    kv_heads: int = 1,
    head_dim: int = 8,
) -> Namespace:
    return Namespace.of(
        model=model,
        engine="sample/1",
        cache_dtype="f16",
        layers=[LayerSpec(0, layer, kv_heads, head_dim, head_dim) for layer in range(layers)],
        block_tokens=block_tokens,
    )


def sequence(
    ns: Namespace, tokens: Sequence[int], extras: Sequence[BlockExtra] = ()
) -> list[SampleBlock]:
    """The whole blocks of the tokens, and the tail block. Rows of `extras` count from the start."""
    data = tokens_to_bytes(tokens)
    block_tokens = int(ns.block_tokens)
    shapes = _shapes(ns)
    blocks: list[SampleBlock] = []
    parent: bytes = ns.digest()
    for first in range(0, len(tokens), block_tokens):
        inside = data[first * TOKEN_BYTES : (first + block_tokens) * TOKEN_BYTES]
        rows = len(inside) // TOKEN_BYTES
        here = [BlockExtra(e.row - first, e.digest) for e in extras if 0 <= e.row - first < rows]
        plan = plan_block(
            namespace=ns.digest(),
            parent=parent,
            tokens=inside,
            first_position=first,
            shapes=shapes,
            extras=here,
            created_unix_seconds=_CREATED,
        )
        payload = [
            _bytes(plan.key, index, stored_bytes)
            for index, (_, stored_bytes) in enumerate(plan.spans)
        ]
        file = encode_block(plan, payload)
        blocks.append(SampleBlock(plan.key, parent, rows, rows < block_tokens, file))
        parent = plan.key
    return blocks


def window(
    ns: Namespace,
    on: SampleBlock,
    tokens: Sequence[int],
    position: int,
    first: int = 0,
    others: Sequence[SampleBlock] | None = None,
) -> SampleBlock:
    """The window block, from a row on, that hangs on a block with these tokens at this position.
    With `others`, it ends a window that consists of these blocks and itself.
    """
    cells = range(100 + first, 100 + len(tokens))
    extra = window_extra(0, first, cells) if others is None else window_end_extra(0, first)
    return _hanging(ns, on, tokens[first:], position, _shapes(ns), extra, cells, others or ())


def state(
    ns: Namespace, on: SampleBlock, token: int, position: int, *, row: int, row_bytes: int
) -> SampleBlock:
    """The state of recurrent layers after a row of the block that begins at this position: a window
    block of one row, in f32.
    """
    shapes = [
        SegmentShape(1, layer, kind, "f32", row_bytes)
        for layer in range(2)
        for kind in (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
    ]
    extra = window_end_extra(1, row)
    return _hanging(ns, on, [token], position, shapes, extra, [position + row + 1], ())


def _hanging(
    ns: Namespace,
    on: SampleBlock,
    tokens: Sequence[int],
    position: int,
    shapes: Sequence[SegmentShape],
    extra: BlockExtra,
    cells: Sequence[int],
    others: Sequence[SampleBlock],
) -> SampleBlock:
    plan = plan_block(
        namespace=ns.digest(),
        parent=on.key,
        tokens=tokens_to_bytes(tokens),
        first_position=position + int(ns.block_tokens),
        shapes=shapes,
        extras=[extra],
        cells=cells,
        others=[other.key for other in others],
        created_unix_seconds=_CREATED,
    )
    payload = [_bytes(plan.key, i, stored_bytes) for i, (_, stored_bytes) in enumerate(plan.spans)]
    tail = plan.rows < int(ns.block_tokens)
    return SampleBlock(plan.key, on.key, plan.rows, tail, encode_block(plan, payload))


def _shapes(ns: Namespace) -> list[SegmentShape]:
    shapes = []
    for entry in ns.layers.split(";"):
        child, layer, _, _, heads, k_dim, v_dim = entry.split(":")
        for kind, dim in ((pb.SEGMENT_KIND_K, k_dim), (pb.SEGMENT_KIND_V, v_dim)):
            row_bytes = int(heads) * int(dim) * _ELEMENT_BYTES
            shapes.append(SegmentShape(int(child), int(layer), kind, ns.cache_dtype, row_bytes))
    return shapes


def _bytes(key: BlockKey, index: int, length: int) -> bytes:
    seed = hashlib.sha256(key + index.to_bytes(4, "little")).digest()
    return (seed * (length // len(seed) + 1))[:length]
