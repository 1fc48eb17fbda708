"""What an engine says of itself, as a namespace and as the segments of its blocks. Pure.

The fields are the engine's: only it knows what decides the bits of its rows. How they become a
namespace is decided here, once for all engines of this socket.
"""

from __future__ import annotations

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

_KINDS: Final = ("full", "swa", "chunked")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_OWN_FIELDS: Final = ("model", "engine", "adapters", "flash_attention")
_MAX_CHILD: Final = 1 << 15
_PLAIN: Final = str.maketrans(";=", "_:")  # no value can look like another part


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one engine: under which name its blocks are, and how they lie in their files."""

    namespace: NamespaceId
    fields: Fields
    shapes: tuple[SegmentShape, ...]  # segments of a block, in their order
    state_child: int  # the number after those of all caches
    model: str
    engine: str
    caches: str  # in words, for people

    @property
    def places(self) -> tuple[tuple[int, int, int, str, int], ...]:
        return tuple((s.child, s.layer, int(s.kind), s.dtype, s.row_bytes) for s in self.shapes)

    def payload_bytes(self, rows: int) -> int:
        return sum(align(rows * shape.row_bytes) for shape in self.shapes)


def identity_of(hello: Hello) -> Identity:
    """InvalidBlock for what makes no sense."""
    fields = dict(hello.fields)
    if len(fields) < len(hello.fields):
        raise InvalidBlock("a field is there twice")
    for name in fields:
        if not _NAME.fullmatch(name) or name == "kv":  # that rows are rounded is not offered here
            raise InvalidBlock(f"{name!r} is no field of an engine")
    if not fields.get("model") or "/" in fields["model"] or not fields.get("engine"):
        raise InvalidBlock("model (the name of its file, without a directory) or engine is missing")
    if fields.get("flash_attention") not in ("on", "off"):
        raise InvalidBlock("flash_attention is neither on nor off")
    shapes = _shapes(hello)
    dtypes = dict.fromkeys((hello.k_dtype, hello.v_dtype))
    described = Namespace.of(
        model=fields["model"],
        adapters=[fields["adapters"]] if fields.get("adapters") else [],
        engine=fields["engine"],
        cache_dtype="/".join(dtypes),
        layers=[_spec(layer) for layer in hello.layers],
        flash_attention=fields["flash_attention"] == "on",
        extra=_extra(fields, states=hello.states),
    )
    return Identity(
        namespace=described.digest(),
        fields=tuple(described.fields()),
        shapes=shapes,
        state_child=1 + max(layer.child for layer in hello.layers),
        model=fields["model"],
        engine=fields["engine"],
        caches=caches(hello),
    )


def caches(hello: Hello) -> str:
    """In words, as other runners say it: `plain + sliding window (512) f16`."""
    words = ("plain", "sliding window", "chunked")
    kinds = dict.fromkeys(
        words[min(layer.kind, 2)] + (f" ({layer.window})" if layer.window else "")
        for layer in hello.layers
    )
    if hello.states:
        kinds["states"] = None
    dtypes = "/".join(dict.fromkeys((hello.k_dtype, hello.v_dtype)))
    return f"{' + '.join(kinds)} {dtypes}".strip()


def _extra(fields: dict[str, str], *, states: bool) -> str:
    parts = {name: value for name, value in fields.items() if name not in _OWN_FIELDS and value}
    if states:
        parts["states"] = "engine"  # opaque, beside the rows
    return ";".join(f"{name}={parts[name].translate(_PLAIN)}" for name in sorted(parts))


def _spec(layer: Layer) -> LayerSpec:
    return LayerSpec(
        *(layer.child, layer.layer, layer.kv_heads, layer.k_head_dim, layer.v_head_dim),
        *(_KINDS[layer.kind], layer.window),
    )


def _shapes(hello: Hello) -> tuple[SegmentShape, ...]:
    places = [(layer.child, layer.layer) for layer in hello.layers]
    if places != sorted(set(places)) or not places:
        raise InvalidBlock("layers are not in the order of (child, layer), each once")
    if any(layer.kind >= len(_KINDS) or layer.child > _MAX_CHILD for layer in hello.layers):
        raise InvalidBlock("a layer is of no known kind")
    shapes = [shape for layer in hello.layers for shape in _of_layer(hello, layer)]
    if not shapes:
        raise InvalidBlock("no layer has rows")
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


BLOCK_TOKENS: Final = DEFAULT_BLOCK_TOKENS
