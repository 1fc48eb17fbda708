"""What an engine says of itself, as a namespace and as the segments of its blocks. Pure.

The fields are the engine's: only it knows what decides the bits of its rows. How they become a
namespace is decided here, once for all engines of this socket. A salt is a secret: only its digest
goes into anything that is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ollama_tiering.protocol.engine.messages import Hello, Layer
from ollama_tiering.store import (
    DEFAULT_BLOCK_TOKENS,
    Fields,
    LayerSpec,
    Namespace,
    NamespaceId,
    SegmentShape,
    align,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import InvalidBlock

BLOCK_TOKENS: Final = DEFAULT_BLOCK_TOKENS
MAX_SEGMENTS: Final = 4096  # that a block file may have
MAX_PAYLOAD_BYTES: Final = 4 << 30  # of a block: 64 MiB for each of its rows
_MAX_NAME: Final = 128  # characters of a model's or an engine's name
_MAX_VALUE: Final = 4096
_MAX_CHILD: Final = 1 << 15
_MOST_WINDOW_ROWS: Final = 1 << 20
_MOST_WINDOW_ROW_BYTES: Final = 16 << 20  # 64 of them are the longest file
_KINDS: Final = ("full", "swa", "chunked")
_WORDS: Final = ("plain", "sliding window", "chunked")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_DTYPE: Final = re.compile(r"[a-z0-9_]{1,16}")
_OWN_FIELDS: Final = ("model", "engine", "adapters", "flash_attention")
# Rows are stored as they are: what rounds them, who says which states, and what is in files is not
# the engine's to say.
_NOT_OFFERED: Final = ("kv", "states", "content", "adopts")
_SALT: Final = "salt"
_SALT_PREFIX: Final = b"kvt-salt-1\x00"  # as in kvtier/config.go
_PLAIN: Final = str.maketrans(";=", "_:")  # no value can look like another part


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one engine: under which name its blocks are, and how they lie in their files."""

    namespace: NamespaceId
    fields: Fields
    shapes: tuple[SegmentShape, ...]  # segments of a block, in their order
    places: tuple[tuple[int, int, int, str, int], ...]  # the same, to be compared
    state_child: int  # the number after those of all caches
    window_row_bytes: int  # 0: it stores no windows
    window_least: int
    window_most: int
    model: str
    engine: str
    caches: str  # in words, for people
    cpu_attention: str  # that is exact; empty of stock's
    also: tuple[NamespaceId, ...] = ()  # may be read, too; its own build's first (adoption.py)


def identity_of(hello: Hello, content: str = "") -> Identity:
    """`content`: what is known of its files. InvalidBlock for what makes no sense."""
    fields = checked_fields(hello)
    if fields.get("flash_attention") not in ("on", "off"):
        raise InvalidBlock("flash_attention is neither on nor off")
    shapes = _shapes(hello)
    _check_windows(hello)
    described = Namespace.of(
        model=fields["model"],
        adapters=[fields["adapters"]] if fields.get("adapters") else [],
        engine=fields["engine"],
        cache_dtype=_dtypes(hello),
        layers=[_spec(layer) for layer in hello.layers],
        flash_attention=fields["flash_attention"] == "on",
        block_tokens=BLOCK_TOKENS,
        extra=_extra({**fields, "content": content}, states=hello.states),
    )
    return Identity(
        namespace=described.digest(),
        fields=tuple(described.fields()),
        shapes=shapes,
        places=tuple((s.child, s.layer, int(s.kind), s.dtype, s.row_bytes) for s in shapes),
        state_child=1 + max(layer.child for layer in hello.layers),
        window_row_bytes=hello.window_row_bytes,
        window_least=hello.window_least,
        window_most=hello.window_most,
        model=fields["model"],
        engine=fields["engine"],
        caches=caches(hello),
        cpu_attention=fields.get("attention", ""),
    )


def _check_windows(hello: Hello) -> None:
    row_bytes, least, most = hello.window_row_bytes, hello.window_least, hello.window_most
    if not any((row_bytes, least, most)):
        return
    if not hello.states or not 1 <= least <= most <= _MOST_WINDOW_ROWS:
        raise InvalidBlock("windows of these sizes make no sense, or the engine has no states")
    if not 1 <= row_bytes <= _MOST_WINDOW_ROW_BYTES:
        raise InvalidBlock(f"a row of {row_bytes} bytes in all windows is none, or too long")


def checked_fields(hello: Hello) -> dict[str, str]:
    """By name. InvalidBlock."""
    fields = dict(hello.fields)
    if len(fields) < len(hello.fields):
        raise InvalidBlock("a field is there twice")
    for name, value in fields.items():
        if not _NAME.fullmatch(name) or name in _NOT_OFFERED:
            raise InvalidBlock(f"{name!r:.80} is no field of an engine")
        if not (value.isprintable() or name == _SALT) or len(value) > _MAX_VALUE:
            raise InvalidBlock(f"{name} is too long, or cannot be printed")
    for name in ("model", "engine"):
        if not 1 <= len(fields.get(name, "")) <= _MAX_NAME:
            raise InvalidBlock(f"{name} is missing, or longer than {_MAX_NAME} characters")
    if "/" in fields["model"]:
        raise InvalidBlock("model is the name of a file, without its directory")
    return fields


def caches(hello: Hello) -> str:
    """In words, as other runners say it: `plain + sliding window (512) f16`. Empty where nothing is
    said of layers: then the engine says why it is not tiered.
    """
    if not hello.layers:
        return ""
    kinds = dict.fromkeys(
        _WORDS[min(layer.kind, 2)] + (f" ({layer.window})" if layer.window else "")
        for layer in hello.layers
    )
    if hello.states:
        kinds["states"] = None
    return f"{' + '.join(list(kinds)[:8])} {_dtypes(hello)}".strip()


def _dtypes(hello: Hello) -> str:
    """`f16`, or `q8_0/f16` where V has another type than K."""
    for dtype in (hello.k_dtype, hello.v_dtype):
        if not _DTYPE.fullmatch(dtype):
            raise InvalidBlock(f"{dtype!r:.80} is no type of rows")
    return "/".join(dict.fromkeys((hello.k_dtype, hello.v_dtype)))


def _extra(fields: dict[str, str], *, states: bool) -> str:
    parts = {name: value for name, value in fields.items() if name not in _OWN_FIELDS and value}
    if _SALT in parts:
        parts[_SALT] = hashlib.sha256(_SALT_PREFIX + parts[_SALT].encode()).hexdigest()[:32]
    if states:
        parts["states"] = "opaque"
    return ";".join(f"{name}={parts[name].translate(_PLAIN)}" for name in sorted(parts))


def _spec(layer: Layer) -> LayerSpec:
    return LayerSpec(
        *(layer.child, layer.layer, layer.kv_heads, layer.k_head_dim, layer.v_head_dim),
        *(_KINDS[layer.kind], layer.window),
    )


def _shapes(hello: Hello) -> tuple[SegmentShape, ...]:
    places = [(layer.child, layer.layer) for layer in hello.layers]
    if places != sorted(set(places)):
        raise InvalidBlock("layers are not in the order of (child, layer), each once")
    if any(layer.kind >= len(_KINDS) or layer.child > _MAX_CHILD for layer in hello.layers):
        raise InvalidBlock("a layer is of no known kind")
    shapes = [shape for layer in hello.layers for shape in _of_layer(hello, layer)]
    if not 1 <= len(shapes) <= MAX_SEGMENTS:
        raise InvalidBlock(f"{len(shapes)} kinds of rows are none, or more than {MAX_SEGMENTS}")
    if sum(align(BLOCK_TOKENS * shape.row_bytes) for shape in shapes) > MAX_PAYLOAD_BYTES:
        raise InvalidBlock(f"a block would have more than {MAX_PAYLOAD_BYTES} bytes")
    return tuple(shapes)


def _of_layer(hello: Hello, layer: Layer) -> Sequence[SegmentShape]:
    planes = (
        (pb.SEGMENT_KIND_K, hello.k_dtype, layer.k_row_bytes),
        (pb.SEGMENT_KIND_V, hello.v_dtype, layer.v_row_bytes),
    )
    return [
        SegmentShape(layer.child, layer.layer, kind, dtype, row_bytes)
        for kind, dtype, row_bytes in planes
        if row_bytes
    ]
