"""What an engine asks and is told to store rows: plans, files to fill, commits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from ollama_tiering.protocol.engine.reading import (
    EngineExtra,
    pack_extras,
    pack_fingerprints,
    unpack_extras,
    unpack_fingerprints,
)
from ollama_tiering.protocol.engine.wire import FileKind, Malformed, Reader, Writer

MAX_STATES: Final = 64  # in one plan
MAX_WINDOWS: Final = 4096  # in one plan
MAX_COMMITTED: Final = 4096  # files in one commit
_RESERVED_BYTES: Final = 31  # at least: without its path


class EngineOutcome(IntEnum):
    """Outcome of a plan: why no more files are reserved."""

    ALL = 0
    MORE = 1  # ask again once these are committed
    NO_ROOM = 2
    REFUSED = 3  # by admission, or by a rule of the settings
    LATER = 4  # the model's file is still being checked: ask again
    FINGERPRINTS = 5  # ask again with those of more blocks; these are stored, or are being


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
    extras: tuple[EngineExtra, ...] = ()
    states: tuple[StateOffer, ...] = ()
    windows: tuple[int, ...] = ()  # first positions of blocks whose rows the engine's windows hold
    fingerprints: tuple[bytes, ...] = ()  # of the first blocks; the others are not planned yet

    def pack(self) -> bytes:
        out = Writer().u32(self.most_files).numbers(self.tokens)
        pack_extras(out, self.extras)
        out.u32(len(self.states))
        for state in self.states:
            out.u32(state.n_tokens).u64(state.state_bytes)
        out.u32(len(self.windows))
        for first in self.windows:
            out.u32(first)
        pack_fingerprints(out, self.fingerprints)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        most_files, tokens = body.u32(), body.numbers()
        extras = unpack_extras(body)
        states = tuple(
            StateOffer(body.u32(), body.u64()) for _ in range(body.count(12, MAX_STATES))
        )
        windows = tuple(body.u32() for _ in range(body.count(4, MAX_WINDOWS)))
        fingerprints = unpack_fingerprints(body)
        body.end()
        return cls(tokens, most_files, extras, states, windows, fingerprints)


@dataclass(frozen=True, slots=True)
class EngineReserved:
    """A file to be filled: segments only, the sidecar writes what comes before them."""

    reservation_id: int
    path: str
    file_bytes: int
    payload_offset: int
    first_position: int  # of a state: its n_tokens
    rows: int  # of a state 0
    kind: int = FileKind.ROWS

    def pack(self, out: Writer) -> None:
        out.u64(self.reservation_id).path(self.path).u64(self.file_bytes)
        out.u32(self.payload_offset).u32(self.first_position).u32(self.rows).u8(self.kind)

    @classmethod
    def unpack(cls, body: Reader) -> Self:
        read = (body.u64(), body.path(), body.u64(), body.u32(), body.u32(), body.u32(), body.u8())
        if read[-1] not in list(FileKind):
            raise Malformed(f"{read[-1]} is no kind of a file")
        return cls(*read)


@dataclass(frozen=True, slots=True)
class Planned:
    """The files: blocks, first to last, then windows, then states."""

    outcome: EngineOutcome
    reason: str
    files: tuple[EngineReserved, ...] = ()

    def pack(self) -> bytes:
        out = Writer().u8(self.outcome).text(self.reason).u32(len(self.files))
        for one in self.files:
            one.pack(out)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        outcome, reason = body.u8(), body.text()
        if outcome not in list(EngineOutcome):
            raise Malformed(f"{outcome} is no outcome")
        files = tuple(EngineReserved.unpack(body) for _ in range(body.count(_RESERVED_BYTES)))
        body.end()
        return cls(EngineOutcome(outcome), reason, files)


@dataclass(frozen=True, slots=True)
class EngineFilled:
    """A reserved file whose segments are written."""

    reservation_id: int
    crcs: bytes  # CRC-32C of every segment, u32 each


@dataclass(frozen=True, slots=True)
class Commit:
    """These files are filled. What was reserved and is not among them stays reserved."""

    files: tuple[EngineFilled, ...]

    def pack(self) -> bytes:
        out = Writer().u32(len(self.files))
        for one in self.files:
            out.u64(one.reservation_id).numbers(one.crcs)
        return out.body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        count = body.count(12, MAX_COMMITTED)
        files = tuple(EngineFilled(body.u64(), body.numbers()) for _ in range(count))
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
