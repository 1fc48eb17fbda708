"""The messages of the engine socket as values, each with its bytes (docs/engine-protocol.md). Pure.

`pack` gives the body of a frame; `unpack` takes one apart, and refuses what is no such message. An
engine asks and the sidecar answers, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from ollama_tiering.protocol.engine.hello import (
    NAMESPACE_BYTES,
    QUESTION,
    GateMode,
    Hello,
    Layer,
    Welcome,
)
from ollama_tiering.protocol.engine.reading import (
    Damaged,
    EngineExtra,
    EngineLease,
    EngineMatch,
    File,
    Matched,
)
from ollama_tiering.protocol.engine.wire import FileKind, Malformed, Reader, Writer
from ollama_tiering.protocol.engine.writing import (
    Commit,
    Committed,
    EngineFilled,
    EngineOutcome,
    EngineReserved,
    Plan,
    Planned,
    StateOffer,
)

__all__ = [
    "NAMESPACE_BYTES",
    "QUESTION",
    "Commit",
    "Committed",
    "Damaged",
    "EngineExtra",
    "EngineFailure",
    "EngineFilled",
    "EngineFinished",
    "EngineLease",
    "EngineMatch",
    "EngineOutcome",
    "EngineReserved",
    "Failed",
    "File",
    "FileKind",
    "GateMode",
    "Hello",
    "Kind",
    "Layer",
    "Matched",
    "Plan",
    "Planned",
    "StateOffer",
    "Welcome",
]


class Kind(IntEnum):
    """The kind of a frame: requests below 100, answers above."""

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


class EngineFailure(IntEnum):
    """Codes of FAILED."""

    MALFORMED = 1  # no message of this protocol; the connection is closed
    VERSION = 2  # of another version; closed
    REFUSED = 3  # a message that makes no sense here; closed
    NO_ROOM = 4  # too much is open already
    UNAVAILABLE = 5  # a disk failed; later it may work
    INTERNAL = 6  # a fault of the sidecar; closed


@dataclass(frozen=True, slots=True)
class EngineFinished:
    """A request has ended. Its prompt was in memory, restored, and for the rest computed."""

    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    reason: int  # Shortfall; 0: only the last token was computed
    at: int
    beside_tokens: int  # computed meanwhile, of all requests
    failures: int  # calls of this engine that failed, so far
    restored_bytes: int
    prefill_seconds: float
    lookup_seconds: float
    fetch_seconds: float  # opening and reading
    copy_seconds: float  # into cells
    expected_ms: int = 0  # what the tier was expected to take, as MATCHED said

    def pack(self) -> bytes:
        out = Writer().u32(self.prompt_tokens).u32(self.memory_tokens).u32(self.restored_tokens)
        out.u32(self.reason).u32(self.at).u32(self.beside_tokens).u32(self.failures)
        out.u64(self.restored_bytes).f64(self.prefill_seconds).f64(self.lookup_seconds)
        return out.f64(self.fetch_seconds).f64(self.copy_seconds).u32(self.expected_ms).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        read = (
            *(body.u32(), body.u32(), body.u32(), body.u32(), body.u32(), body.u32(), body.u32()),
            *(body.u64(), body.f64(), body.f64(), body.f64(), body.f64(), body.u32()),
        )
        body.end()
        return cls(*read)


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no other answer."""

    code: EngineFailure
    message: str

    def pack(self) -> bytes:
        return Writer().u16(self.code).text(self.message).body()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        body = Reader(data)
        code, message = body.u16(), body.text()
        body.end()
        if code not in list(EngineFailure):
            raise Malformed(f"{code} is no code of a failure")
        return cls(EngineFailure(code), message)
