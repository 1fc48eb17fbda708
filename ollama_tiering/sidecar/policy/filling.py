"""Files that an engine fills: it knows rows, and the sidecar knows what they are called.

The engine writes the segments into a reserved file and says their checksums. Key and header are
made here, from what was planned: an engine cannot name a block otherwise than its tokens do.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from ollama_tiering.store import (
    BlockOffer,
    BlockPlan,
    Outcome,
    Reserved,
    WriteSession,
    rows_fingerprint,
)
from ollama_tiering.store.errors import InvalidBlock
from ollama_tiering.system.files import write_all

_FLAGS: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A block that may be stored. `fingerprint`: which rows were planned, if that is in its key."""

    plan: BlockPlan
    parent: bytes
    fingerprint: bytes


File = TypeVar("File", bound=PlannedFile)


@dataclass(frozen=True, slots=True)
class _Reservation(Generic[File]):
    file: File
    path: Path
    until: float  # by the monotonic clock


class FileFilling(Generic[File]):
    """Of one writer. Used by one thread at a time; what is not committed ends with the session."""

    def __init__(
        self, session: Callable[[], WriteSession], block_tokens: int, reserve_seconds: float
    ) -> None:
        """`session` opens one when it is first needed."""
        self._session = session
        self._block_tokens = block_tokens
        self._reserve_seconds = reserve_seconds
        self._pending: dict[int, _Reservation[File]] = {}

    def reserve(self, files: Sequence[File]) -> list[Reserved]:
        """InvalidBlock. Answers as the session does, in the order of the files."""
        until = time.monotonic() + self._reserve_seconds
        answers = self._session().reserve([self._offer(file) for file in files])
        for file, answer in zip(files, answers, strict=True):
            if answer.outcome is Outcome.RESERVED and answer.path is not None:
                pending = _Reservation(file, answer.path, until)
                self._pending[answer.reservation_id] = pending
        return answers

    def commit(self, filled: Sequence[tuple[int, bytes]]) -> list[tuple[File | None, str]]:
        """Takes reservations and the checksums of their segments (u32 little endian); answers each
        with its file, and why that is not stored: "" if it is. InvalidBlock, OSError. A file whose
        header cannot be written stays reserved until the reservation is over.
        """
        answers: list[tuple[File | None, str]] = []
        ready: list[tuple[int, int]] = []  # place in the answer, reservation
        for place, (reservation_id, crcs) in enumerate(filled):
            pending = self._pending.pop(reservation_id, None)
            if pending is None:
                answers.append((None, "no such reservation"))
                continue
            reason = _complete(pending, crcs)
            answers.append((pending.file, reason))
            if not reason:
                ready.append((place, reservation_id))
        results = self._session().commit([number for _, number in ready]) if ready else []
        for (place, _), result in zip(ready, results, strict=True):
            if not result.stored:
                answers[place] = answers[place][0], result.reason or "not stored"
        return answers

    def forget_expired(self) -> None:
        """What the store has given up. It bounds how many others there may be."""
        now = time.monotonic()
        over = [number for number, pending in self._pending.items() if pending.until <= now]
        for number in over:
            del self._pending[number]

    def clear(self) -> None:
        self._pending.clear()

    def _offer(self, file: PlannedFile) -> BlockOffer:
        tail = file.plan.rows < self._block_tokens
        return BlockOffer(file.plan.key, file.parent, file.plan.file_bytes, tail)


def _complete(pending: _Reservation[File], crcs: bytes) -> str:
    """Writes the header; why it could not."""
    plan = pending.file.plan
    count = len(plan.spans)
    if len(crcs) != 4 * count:
        raise InvalidBlock("there is not one checksum for each segment")
    if pending.file.fingerprint and rows_fingerprint(crcs) != pending.file.fingerprint:
        return "other rows than were planned"
    head = plan.head(struct.unpack(f"<{count}I", crcs))
    try:
        fd = os.open(pending.path, _FLAGS)
        try:
            write_all(fd, 0, head)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""
