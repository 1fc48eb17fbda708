"""What an engine asks and is told to get rows back: look-ups, leases, files, damage."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from ollama_tiering.protocol.engine.wire import FileKind, Malformed, Reader, Writer

EXTRA_BYTES: Final = 32
MAX_EXTRAS: Final = 1024
_FILE: Final = struct.Struct("<QIIIQBI")  # a look-up names hundreds: packed at once
_PATH: Final = struct.Struct("<H")
FINGERPRINT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class EngineExtra:
    """What else than a token stands at a position, such as an image: 32 bytes of a digest."""

    position: int
    digest: bytes


def pack_extras(out: Writer, extras: tuple[EngineExtra, ...]) -> None:
    out.u32(len(extras))
    for extra in extras:
        out.u32(extra.position).raw(extra.digest)


def unpack_extras(body: Reader) -> tuple[EngineExtra, ...]:
    count = body.count(4 + EXTRA_BYTES, MAX_EXTRAS)
    return tuple(EngineExtra(body.u32(), body.take(EXTRA_BYTES)) for _ in range(count))


def pack_fingerprints(out: Writer, fingerprints: tuple[bytes, ...]) -> None:
    out.u32(len(fingerprints)).raw(b"".join(fingerprints))


def unpack_fingerprints(body: Reader) -> tuple[bytes, ...]:
    """Reads those of whole blocks, from the first token on: which rows each has."""
    return tuple(body.take(FINGERPRINT_BYTES) for _ in range(body.count(FINGERPRINT_BYTES)))


@dataclass(frozen=True, slots=True)
class EngineMatch:
    """A prompt is looked up."""

    tokens: bytes  # int32 little endian
    have: int = 0  # rows that the slot holds already, from position 0 on
    extras: tuple[EngineExtra, ...] = ()
    fingerprints: tuple[bytes, ...] = ()  # of the blocks that the slot holds, as far as it knows

    def pack(self) -> bytes:
        out = Writer().u32(self.have).numbers(self.tokens)
        pack_extras(out, self.extras)
        pack_fingerprints(out, self.fingerprints)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        have, tokens = body.u32(), body.numbers()
        extras, fingerprints = unpack_extras(body), unpack_fingerprints(body)
        body.end()
        return cls(tokens, have, extras, fingerprints)


class File(NamedTuple):  # made by the hundred in every look-up, so no dataclass
    """A file that the sidecar names, with what is in it: rows of a block, a state, or a window."""

    path: str
    file_bytes: int
    payload_offset: int  # the first segment begins here, each further one at the next page
    first_position: int  # of a state: how many tokens were computed when it was made
    rows: int  # of the block; of a state 0
    used: int  # of them, that the prompt wants; of a state or a window its bytes
    tier: int  # 1 RAM, 2 local disk
    crcs: bytes  # CRC-32C of every segment, u32 each
    kind: int = FileKind.ROWS

    @classmethod
    def unpack(cls, body: Reader) -> Self:
        path = body.path()
        *numbers, crcs = _FILE.unpack(body.take(_FILE.size))
        read = path, *numbers, body.take(4 * crcs), body.u8()
        if read[-1] not in list(FileKind):
            raise Malformed(f"{read[-1]} is no kind of a file")
        return cls._make(read)


@dataclass(frozen=True, slots=True)
class Matched:
    """What can be restored. `pending`: not all files are ready, WAIT gives them."""

    rows: int  # positions 0 to rows - 1; 0: nothing is gained
    lease_id: int  # 0: no file is leased
    pending: bool
    expected_ms: int  # until all of it could be in memory
    reason: int  # Shortfall: why not more; 0: nothing is missing
    at: int  # position where what is stored ends or differs
    files: tuple[File, ...] = ()

    def pack(self) -> bytes:
        out = Writer().u32(self.rows).u64(self.lease_id).u8(self.pending).u32(self.expected_ms)
        out.u32(self.reason).u32(self.at).u32(len(self.files))
        for path, *numbers, crcs, kind in self.files:
            name = path.encode(errors="surrogateescape")
            head = _PATH.pack(len(name)) + name
            out.raw(head + _FILE.pack(*numbers, len(crcs) // 4) + crcs + bytes((kind,)))
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        rows, lease_id, pending = body.u32(), body.u64(), body.u8()
        expected_ms, reason, at = body.u32(), body.u32(), body.u32()
        files = tuple(File.unpack(body) for _ in range(body.count(_PATH.size + _FILE.size + 1)))
        body.end()
        return cls(rows, lease_id, bool(pending), expected_ms, reason, at, files)


@dataclass(frozen=True, slots=True)
class EngineLease:
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
class Damaged:
    """A leased file whose bytes were not what its checksums say."""

    lease_id: int
    file: int  # which of the answer's, from 0

    def pack(self) -> bytes:
        return Writer().u64(self.lease_id).u32(self.file).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        read = (body.u64(), body.u32())
        body.end()
        return cls(*read)
