"""How a connection begins: what the engine is, and under which name its blocks are kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from ollama_tiering.protocol.engine.wire import MAGIC, VERSION, Malformed, Reader, Writer
from ollama_tiering.protocol.loaded_file import FileIdentity, LoadedFile

NAMESPACE_BYTES: Final = 32
MAX_FIELDS: Final = 64
MAX_LAYERS: Final = 4096
MAX_FILES: Final = 64
_LAYER_BYTES: Final = 29
_FILE_BYTES: Final = 42  # at least: without its path
QUESTION: Final = MAGIC + VERSION.to_bytes(4, "little")  # whether that version is spoken


class GateMode(IntEnum):
    """Who decides between restoring and computing: measured speeds, or the engine's settings."""

    MEASURED = 0
    RESTORE = 1
    RECOMPUTE = 2


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of one of the model's caches. A row of 0 bytes: there is no such plane."""

    child: int
    layer: int
    kind: int  # 0 full, 1 sliding window, 2 chunked
    window: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    k_row_bytes: int
    v_row_bytes: int

    def pack(self, out: Writer) -> None:
        out.u16(self.child).u16(self.layer).u8(self.kind)
        for value in (self.window, self.kv_heads, self.k_head_dim, self.v_head_dim):
            out.u32(value)
        out.u32(self.k_row_bytes).u32(self.v_row_bytes)

    @classmethod
    def unpack(cls, body: Reader) -> Self:
        return cls(
            *(body.u16(), body.u16(), body.u8()),
            *(body.u32(), body.u32(), body.u32(), body.u32(), body.u32(), body.u32()),
        )


@dataclass(frozen=True, slots=True)
class Hello:
    """What an engine is, and what its rows depend on. `unsupported`: why it is not tiered."""

    fields: tuple[tuple[str, str], ...]  # of the namespace, by name
    layers: tuple[Layer, ...]
    k_dtype: str = "f16"
    v_dtype: str = "f16"
    states: bool = False  # it resumes at checkpoints only
    gate: GateMode = GateMode.MEASURED
    min_tokens: int = 0  # fewer are not looked up; 0: as the sidecar's settings say
    unsupported: str = ""
    window_row_bytes: int = 0  # of a position, in all layers that keep only the last rows; 0: none
    window_least: int = 0  # rows before a position without which the engine does not resume there
    window_most: int = 0  # that it keeps
    files: tuple[LoadedFile, ...] = ()  # that it computes with, the model first
    version: int = VERSION

    def pack(self) -> bytes:
        out = Writer().raw(MAGIC).u32(self.version).u8(self.gate).u8(self.states)
        out.u32(self.min_tokens).text(self.unsupported).text(self.k_dtype).text(self.v_dtype)
        out.u32(len(self.fields))
        for name, value in self.fields:
            out.text(name).text(value)
        out.u32(len(self.layers))
        for layer in self.layers:
            layer.pack(out)
        out.u32(self.window_row_bytes).u32(self.window_least).u32(self.window_most)
        out.u32(len(self.files))
        for file in self.files:
            _pack_file(out, file)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Reads nothing but the version if it is another one."""
        body = Reader(data)
        if body.take(len(MAGIC)) != MAGIC:
            raise Malformed("no hello: wrong magic")
        if (version := body.u32()) != VERSION:
            return cls((), (), version=version)
        gate, states, min_tokens = body.u8(), body.u8(), body.u32()
        if gate not in list(GateMode) or states > 1:
            raise Malformed("gate or states is no known value")
        unsupported, k_dtype, v_dtype = body.text(), body.text(), body.text()
        fields = tuple((body.text(), body.text()) for _ in range(body.count(4, MAX_FIELDS)))
        layers = tuple(Layer.unpack(body) for _ in range(body.count(_LAYER_BYTES, MAX_LAYERS)))
        windows = body.u32(), body.u32(), body.u32()
        files = tuple(_unpack_file(body) for _ in range(body.count(_FILE_BYTES, MAX_FILES)))
        body.end()
        return cls(
            *(fields, layers, k_dtype, v_dtype, bool(states), GateMode(gate), min_tokens),
            *(unsupported, *windows, files),
        )


def _pack_file(out: Writer, file: LoadedFile) -> None:
    one = file.identity
    out.path(file.path).u64(one.device).u64(one.inode).u64(one.size_bytes)
    out.i64(one.mtime_ns).i64(one.ctime_ns)


def _unpack_file(body: Reader) -> LoadedFile:
    path = body.path()
    numbers = body.u64(), body.u64(), body.u64(), body.i64(), body.i64()
    return LoadedFile(path, FileIdentity(*numbers))


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a hello: from here on the engine may ask."""

    namespace: bytes
    block_tokens: int
    min_tokens: int
    lease_ms: int  # files that were named are kept so long
    reserve_ms: int  # files that were reserved wait so long for their commit
    version: int = VERSION

    def pack(self) -> bytes:
        out = Writer().u32(self.version).raw(self.namespace).u32(self.block_tokens)
        return out.u32(self.min_tokens).u32(self.lease_ms).u32(self.reserve_ms).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        version, namespace = body.u32(), body.take(NAMESPACE_BYTES)
        read = (body.u32(), body.u32(), body.u32(), body.u32())
        body.end()
        return cls(namespace, *read, version)
