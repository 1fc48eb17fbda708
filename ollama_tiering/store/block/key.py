"""Identity of blocks: namespaces and prefix chain hashes, exactly as docs/format.md defines them.

Pure functions over bytes. Token ids travel as int32 little endian (`tokens_to_bytes`), keys and
namespaces as 32 raw bytes. Golden vectors: tests/vectors/keys.json.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NewType

import numpy as np

from ollama_tiering.store.block.checksum import crc32c

BlockKey = NewType("BlockKey", bytes)
NamespaceId = NewType("NamespaceId", bytes)

DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4
FINGERPRINT_BYTES: Final = 8
FORMAT_VERSION: Final = 1
DEFAULT_BLOCK_TOKENS: Final = 64

NAMESPACE_FIELDS: Final = (
    "format",
    "model",
    "adapters",
    "engine",
    "cache_dtype",
    "layers",
    "flash_attention",
    "block_tokens",
    "extra",
)

_KEY_TAG: Final = b"kvt1"
_NAMESPACE_TAG: Final = b"kvt-namespace-1"
_WINDOW_TAG: Final = b"kvt-window-1"
_WINDOW_END_TAG: Final = b"kvt-window-end-1"
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_LAYER_KINDS: Final = ("full", "swa", "chunked")


@dataclass(frozen=True, slots=True)
class BlockExtra:
    """What stands at a row of a block besides a token, such as an image."""

    row: int  # within the block
    digest: bytes


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Geometry of one layer of one cache child; its text is one entry of the `layers` field."""

    child: int
    layer: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    kind: str = "full"
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _LAYER_KINDS:
            raise ValueError(f"layer kind {self.kind!r} is not one of {', '.join(_LAYER_KINDS)}")

    def __str__(self) -> str:
        return (
            f"{self.child}:{self.layer}:{self.kind}:{self.window}:"
            f"{self.kv_heads}:{self.k_head_dim}:{self.v_head_dim}"
        )


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything but tokens that changes the meaning of a block's bytes."""

    model: str
    engine: str
    cache_dtype: str
    layers: str  # ";".join(str(LayerSpec)) in (child, layer) order
    flash_attention: str = "off"
    block_tokens: str = str(DEFAULT_BLOCK_TOKENS)
    adapters: str = ""
    extra: str = ""
    format: str = str(FORMAT_VERSION)

    @classmethod
    def of(
        cls,
        *,
        model: str,
        engine: str,
        cache_dtype: str,
        layers: Iterable[LayerSpec],
        flash_attention: bool = False,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        adapters: Sequence[str] = (),
        extra: str = "",
    ) -> Namespace:
        ordered = sorted(layers, key=lambda spec: (spec.child, spec.layer))
        return cls(
            model=model,
            engine=engine,
            cache_dtype=cache_dtype,
            layers=";".join(str(spec) for spec in ordered),
            flash_attention="on" if flash_attention else "off",
            block_tokens=str(block_tokens),
            adapters=",".join(adapters),
            extra=extra,
        )

    def fields(self) -> list[tuple[str, str]]:
        return [(name, str(getattr(self, name))) for name in NAMESPACE_FIELDS]

    def digest(self) -> NamespaceId:
        return namespace_digest(self.fields())


def namespace_digest(fields: Iterable[tuple[str, str]]) -> NamespaceId:
    """The digest of pairs (name, value) that a client sent; the names are not checked."""
    state = hashlib.sha256(_lp(_NAMESPACE_TAG))
    for name, value in fields:
        state.update(_lp(name.encode()))
        state.update(_lp(value.encode()))
    return NamespaceId(state.digest())


def window_extra(child: int, first: int, cells: Sequence[int]) -> BlockExtra:
    """Distinguishes a window block from its parent's other children: it has rows of this cache
    child, from this row of the parent on, which lay in these cells.
    """
    numbers = struct.pack(f"<{2 + len(cells)}I", child, first, *cells)
    return BlockExtra(0, hashlib.sha256(_lp(_WINDOW_TAG) + numbers).digest())


def window_end_extra(child: int, first: int) -> BlockExtra:
    """Works as `window_extra`, for the block that ends a window, which is found without knowing the
    cells.
    """
    numbers = struct.pack("<2I", child, first)
    return BlockExtra(0, hashlib.sha256(_lp(_WINDOW_END_TAG) + numbers).digest())


def as_key(value: bytes) -> BlockKey:
    if len(value) != DIGEST_BYTES:
        raise ValueError(f"a block key has {DIGEST_BYTES} bytes, not {len(value)}")
    return BlockKey(value)


def as_namespace(value: bytes) -> NamespaceId:
    if len(value) != DIGEST_BYTES:
        raise ValueError(f"a namespace has {DIGEST_BYTES} bytes, not {len(value)}")
    return NamespaceId(value)


def digest_from_hex(text: str) -> bytes | None:
    """The 32 bytes that a file or directory name gives in lower-case hex; None if it is no such
    name.
    """
    return bytes.fromhex(text) if _HEX.fullmatch(text) else None


def tokens_to_bytes(tokens: Iterable[int] | np.ndarray) -> bytes:
    """Token ids as int32, little endian. OverflowError for an id that does not fit."""
    ids = tokens if isinstance(tokens, np.ndarray) else list(tokens)
    array = np.asarray(ids, dtype=np.int64)
    if array.size and (array.min() < -(1 << 31) or array.max() >= 1 << 31):
        raise OverflowError("a token id does not fit into int32")
    return array.astype("<i4").tobytes()


def block_key(
    parent: bytes, tokens: bytes, extras: Sequence[BlockExtra] = (), fingerprint: bytes = b""
) -> BlockKey:
    """The key of the block with these tokens after `parent` (the namespace for the first block).
    `fingerprint` (`rows_fingerprint`) is empty where the tokens decide the bits of its rows.
    """
    state = hashlib.sha256(_lp(_KEY_TAG))
    state.update(_lp(parent))
    state.update(_lp(tokens))
    state.update(_lp(_extras_bytes(extras)))
    if fingerprint:
        state.update(_lp(fingerprint))
    return BlockKey(state.digest())


def rows_fingerprint(crcs: bytes) -> bytes:
    """Tells rows of the same tokens apart by the CRC-32C of every segment (`crcs`, u32 little
    endian each): the CRC-32C and the CRC-32 of these bytes, u32 little endian each.
    """
    return struct.pack("<2I", crc32c(crcs), zlib.crc32(crcs))


def prefix_chain(
    namespace: NamespaceId,
    tokens: bytes,
    block_tokens: int,
    extras: Sequence[BlockExtra] = (),
) -> list[BlockKey]:
    """The keys of a prompt's whole blocks, first to last. Rows of `extras` count from the prompt's
    start.
    """
    step = block_tokens * TOKEN_BYTES
    keys: list[BlockKey] = []
    parent: bytes = namespace
    for index in range(len(tokens) // step):
        inside = extras_of(extras, index * block_tokens, block_tokens)
        key = block_key(parent, tokens[index * step : (index + 1) * step], inside)
        keys.append(key)
        parent = key
    return keys


def extras_of(extras: Sequence[BlockExtra], start: int, rows: int) -> list[BlockExtra]:
    """Those of a prompt's rows from `start` on, in order, by their rows from there."""
    inside = [e for e in extras if start <= e.row < start + rows]
    return [BlockExtra(e.row - start, e.digest) for e in sorted(inside, key=lambda e: e.row)]


def _extras_bytes(extras: Sequence[BlockExtra]) -> bytes:
    return b"".join(struct.pack("<I", extra.row) + _lp(extra.digest) for extra in extras)


def _lp(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value
