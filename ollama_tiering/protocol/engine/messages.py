"""The messages of the engine socket as values, each with its bytes (docs/engine-protocol.md). Pure.

`pack` gives the body of a frame, `unpack` takes one apart and refuses what is no such message. An
engine asks and the sidecar answers, one after the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Self

from ollama_tiering.protocol.engine.wire import MAGIC, VERSION, Malformed, Reader, Writer

DIGEST_BYTES: Final = 32
_FILE: Final = struct.Struct("<QIIIQBI")  # a look-up names hundreds: packed at once


_LAYER_BYTES: Final = 29
_RESERVED_BYTES: Final = 30  # at least: without its path


class Kind(IntEnum):
    HELLO = 1
    MATCH = 2
    WAIT = 3
    RELEASE = 4
    PLAN = 5
    COMMIT = 6
    DAMAGED = 7
    FINISHED = 8
    WELCOME = 101
    MATCHED = 102
    DONE = 103
    PLANNED = 104
    COMMITTED = 105
    FAILED = 106


class Failure(IntEnum):
    """Codes of FAILED."""

    MALFORMED = 1  # no message of this protocol; the connection is closed
    VERSION = 2  # of another version; closed
    REFUSED = 3  # a message that makes no sense here; closed
    NO_ROOM = 4  # too much is open already
    UNAVAILABLE = 5  # a disk failed; later it may work
    INTERNAL = 6  # a fault of the sidecar; closed


class GateMode(IntEnum):
    MEASURED = 0
    RESTORE = 1
    RECOMPUTE = 2


class Outcome(IntEnum):
    """Of a plan: why no more files are reserved."""

    ALL = 0
    MORE = 1  # ask again once these are committed
    NO_ROOM = 2
    REFUSED = 3


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
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Of another version nothing but the version is read."""
        body = Reader(data)
        if body.take(len(MAGIC)) != MAGIC:
            raise Malformed("no hello: wrong magic")
        if (version := body.u32()) != VERSION:
            return cls((), (), version=version)
        gate, states, min_tokens = body.u8(), body.u8(), body.u32()
        if gate not in GateMode.__members__.values() or states > 1:
            raise Malformed("gate or states is no known value")
        unsupported, k_dtype, v_dtype = body.text(), body.text(), body.text()
        fields = tuple((body.text(), body.text()) for _ in range(body.count(4)))
        layers = tuple(Layer.unpack(body) for _ in range(body.count(_LAYER_BYTES)))
        body.end()
        return cls(
            *(fields, layers, k_dtype, v_dtype, bool(states), GateMode(gate), min_tokens),
            unsupported,
        )


@dataclass(frozen=True, slots=True)
class Welcome:
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
        version, namespace = body.u32(), body.take(DIGEST_BYTES)
        read = (body.u32(), body.u32(), body.u32(), body.u32())
        body.end()
        return cls(namespace, *read, version)


@dataclass(frozen=True, slots=True)
class Extra:
    """What else than a token stands at a position, such as an image."""

    position: int
    digest: bytes


def _pack_extras(out: Writer, extras: tuple[Extra, ...]) -> None:
    out.u32(len(extras))
    for extra in extras:
        out.u32(extra.position).raw(extra.digest)


def _unpack_extras(body: Reader) -> tuple[Extra, ...]:
    count = body.count(4 + DIGEST_BYTES)
    return tuple(Extra(body.u32(), body.take(DIGEST_BYTES)) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Match:
    """A prompt is looked up."""

    tokens: bytes  # int32 little endian
    have: int = 0  # rows that the slot holds already, from position 0 on
    start: int = 0  # rows before are not wanted from files
    extras: tuple[Extra, ...] = ()

    def pack(self) -> bytes:
        out = Writer().u32(self.have).u32(self.start).tokens(self.tokens)
        _pack_extras(out, self.extras)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        have, start, tokens = body.u32(), body.u32(), body.tokens()
        extras = _unpack_extras(body)
        body.end()
        return cls(tokens, have, start, extras)


class File(NamedTuple):  # made by the hundred in every look-up, so no dataclass
    """A file that the sidecar names, with what is in it: rows of a block, or a state."""

    path: str
    file_bytes: int
    payload_offset: int  # the first segment begins here, each further one at the next page
    first_position: int  # of a state: how many tokens were computed when it was made
    rows: int  # that every segment has; of a state 0
    used: int  # of them, that the prompt wants; of a state its bytes
    tier: int  # 1 RAM, 2 local disk
    crcs: bytes  # CRC-32C of every segment, u32 each

    def pack(self, out: Writer) -> None:
        path, *numbers, crcs = self
        out.path(path).raw(_FILE.pack(*numbers, len(crcs) // 4)).raw(crcs)

    @classmethod
    def unpack(cls, body: Reader) -> Self:
        path = body.path()
        *numbers, crcs = _FILE.unpack(body.take(_FILE.size))
        return cls._make((path, *numbers, body.take(4 * crcs)))


@dataclass(frozen=True, slots=True)
class Matched:
    """What can be restored. `pending`: not all files are ready, WAIT gives them."""

    rows: int  # positions 0 to rows - 1; `have` or fewer: nothing is gained
    lease_id: int  # 0: no file is leased
    pending: bool
    expected_ms: int  # until all of it could be in memory
    reason: int  # Shortfall: why not more; 0: nothing is missing
    at: int  # position where what is stored ends or differs
    files: tuple[File, ...] = ()

    def pack(self) -> bytes:
        out = Writer().u32(self.rows).u64(self.lease_id).u8(self.pending).u32(self.expected_ms)
        out.u32(self.reason).u32(self.at).u32(len(self.files))
        for one in self.files:
            one.pack(out)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        rows, lease_id, pending = body.u32(), body.u64(), body.u8()
        expected_ms, reason, at = body.u32(), body.u32(), body.u32()
        files = tuple(File.unpack(body) for _ in range(body.count(2 + _FILE.size)))
        body.end()
        return cls(rows, lease_id, bool(pending), expected_ms, reason, at, files)


@dataclass(frozen=True, slots=True)
class Lease:
    """The body of WAIT and of RELEASE."""

    lease_id: int

    def pack(self) -> bytes:
        return Writer().u64(self.lease_id).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        lease_id = body.u64()
        body.end()
        return cls(lease_id)


@dataclass(frozen=True, slots=True)
class StateOffer:
    """A checkpoint that the engine could store."""

    n_tokens: int  # that were computed when it was made
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Files are wanted for what of these tokens is not stored yet."""

    tokens: bytes
    most_files: int = 0  # 0: as many as the sidecar gives at a time
    extras: tuple[Extra, ...] = ()
    states: tuple[StateOffer, ...] = ()

    def pack(self) -> bytes:
        out = Writer().u32(self.most_files).tokens(self.tokens)
        _pack_extras(out, self.extras)
        out.u32(len(self.states))
        for state in self.states:
            out.u32(state.n_tokens).u64(state.state_bytes)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        most_files, tokens = body.u32(), body.tokens()
        extras = _unpack_extras(body)
        states = tuple(StateOffer(body.u32(), body.u64()) for _ in range(body.count(12)))
        body.end()
        return cls(tokens, most_files, extras, states)


@dataclass(frozen=True, slots=True)
class Reserved:
    """A file to be filled: segments only, the sidecar writes what comes before them."""

    reservation_id: int
    path: str
    file_bytes: int
    payload_offset: int
    first_position: int  # of a state: its n_tokens
    rows: int  # of a state 0

    def pack(self, out: Writer) -> None:
        out.u64(self.reservation_id).path(self.path).u64(self.file_bytes)
        out.u32(self.payload_offset).u32(self.first_position).u32(self.rows)

    @classmethod
    def unpack(cls, body: Reader) -> Self:
        return cls(body.u64(), body.path(), body.u64(), body.u32(), body.u32(), body.u32())


@dataclass(frozen=True, slots=True)
class Planned:
    outcome: Outcome
    reason: str
    files: tuple[Reserved, ...] = ()

    def pack(self) -> bytes:
        out = Writer().u8(self.outcome).text(self.reason).u32(len(self.files))
        for one in self.files:
            one.pack(out)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        outcome, reason = body.u8(), body.text()
        files = tuple(Reserved.unpack(body) for _ in range(body.count(_RESERVED_BYTES)))
        body.end()
        return cls(Outcome(outcome), reason, files)


@dataclass(frozen=True, slots=True)
class Filled:
    reservation_id: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """These files are filled. What was reserved and is not among them stays reserved."""

    files: tuple[Filled, ...]

    def pack(self) -> bytes:
        out = Writer().u32(len(self.files))
        for one in self.files:
            out.u64(one.reservation_id).numbers(one.crcs)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        files = tuple(Filled(body.u64(), body.numbers()) for _ in range(body.count(12)))
        body.end()
        return cls(files)


@dataclass(frozen=True, slots=True)
class Committed:
    """One text for each file of the commit: empty, or why it is not stored."""

    reasons: tuple[str, ...]

    def pack(self) -> bytes:
        out = Writer().u32(len(self.reasons))
        for reason in self.reasons:
            out.text(reason)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        reasons = tuple(body.text() for _ in range(body.count(2)))
        body.end()
        return cls(reasons)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A leased file whose bytes were not what its checksums say."""

    lease_id: int
    file: int  # which of the answer's, from 0
    detail: str

    def pack(self) -> bytes:
        return Writer().u64(self.lease_id).u32(self.file).text(self.detail).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        read = (body.u64(), body.u32(), body.text())
        body.end()
        return cls(*read)


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended. Its prompt was in memory, restored, and for the rest computed."""

    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    reason: int  # Shortfall; 0: only the last token was computed
    at: int
    beside_tokens: int  # computed meanwhile, of all requests
    prefill_seconds: float
    restored_bytes: int
    lookup_seconds: float
    fetch_seconds: float  # opening and reading
    copy_seconds: float  # into cells
    stored_blocks: int  # since the last FINISHED

    def pack(self) -> bytes:
        out = Writer().u32(self.prompt_tokens).u32(self.memory_tokens).u32(self.restored_tokens)
        out.u32(self.reason).u32(self.at).u32(self.beside_tokens).f64(self.prefill_seconds)
        out.u64(self.restored_bytes).f64(self.lookup_seconds).f64(self.fetch_seconds)
        return out.f64(self.copy_seconds).u32(self.stored_blocks).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        read = (
            *(body.u32(), body.u32(), body.u32(), body.u32(), body.u32(), body.u32()),
            *(body.f64(), body.u64(), body.f64(), body.f64(), body.f64(), body.u32()),
        )
        body.end()
        return cls(*read)


@dataclass(frozen=True, slots=True)
class Failed:
    code: Failure
    message: str

    def pack(self) -> bytes:
        return Writer().u16(self.code).text(self.message).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        code, message = body.u16(), body.text()
        body.end()
        return cls(Failure(code), message)
