"""An engine on the engine socket: its rows are made from the tokens before them, so that each is
known. What it reads it checks as one in C++ does: checksums in memory of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ollama_tiering.client.engine_client import EngineClient
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.key import rows_fingerprint, tokens_to_bytes
from ollama_tiering.store.block.segments import align

ROW_BYTES = 16
STATE_PART_BYTES = 16 << 20
FIELDS = {"model": "sha256-fake", "engine": "fake/1+0", "flash_attention": "on"}
# Of llama-server with exact attention, all of it on a CPU.
EXACT = {
    "engine": "llama-server/b2+new",
    "attention": "exact 2 (avx2)",
    "one_answer": "1",
}
Tokens = Sequence[int] | np.ndarray


def hello(*, layers: int = 2, **options: Any) -> m.Hello:
    fields = {**FIELDS, **options.pop("fields", {})}
    geometry = [m.Layer(0, i, 0, 0, 1, 8, 8, ROW_BYTES, ROW_BYTES) for i in range(layers)]
    options.setdefault("files", (model_file(fields["model"]),))
    return m.Hello(tuple(fields.items()), tuple(geometry), **options)


MODELS = tempfile.TemporaryDirectory(prefix="kvt-models-")


@functools.cache
def model_file(name: str) -> LoadedFile:
    """A model of that name: what is in it is made from it."""
    path = Path(MODELS.name, hashlib.sha256(name.encode()).hexdigest()[:16] + ".gguf")
    path.write_bytes(name.encode())
    return LoadedFile.of(path)


def prompt(first: int, count: int) -> list[int]:
    """Tokens that no prompt of another range has."""
    return list(range(first, first + count))


def engine_socket(socket: Path) -> Path:
    return socket.with_name(socket.name + ".engine")


class Damage(Exception):
    """A file whose bytes are not what its checksums say."""

    def __init__(self, file: int) -> None:
        super().__init__(f"file {file}")
        self.file = file


class FakeEngine:
    """A context manager. `socket` is the sidecar's first one."""

    def __init__(self, socket: Path, said: m.Hello | None = None, **options: Any) -> None:
        self.hello = said or hello()
        self.planes = 2 * len(self.hello.layers)
        self.history = (1 << 31, b"")  # rows from this one on have other bits, which these choose
        self.client = EngineClient(engine_socket(socket), self.hello, **options)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def store(
        self,
        tokens: Sequence[int],
        states: dict[int, bytes] | None = None,
        windows: Sequence[int] = (),
    ) -> tuple[list[m.EngineReserved], list[str]]:
        """All that is missing; the files that were filled, and why some are not stored."""
        offers = tuple(m.StateOffer(n, len(data)) for n, data in (states or {}).items())
        files: list[m.EngineReserved] = []
        reasons: list[str] = []
        array = np.asarray(tokens, np.int64)  # of each block and plane a slice becomes bytes
        fingerprints = self.fingerprints(array)
        request = m.Plan(tokens_to_bytes(tokens), 0, (), offers, tuple(windows), fingerprints)
        while True:
            planned = self.client.plan(request)
            filled = tuple(self.fill(one, array, states or {}) for one in planned.files)
            files += planned.files
            if filled:
                reasons += self.client.commit(m.Commit(filled)).reasons
            if planned.outcome is not m.EngineOutcome.MORE:
                return files, [reason for reason in reasons if reason]

    def fill(
        self, file: m.EngineReserved, tokens: Tokens, states: dict[int, bytes]
    ) -> m.EngineFilled:
        fd = os.open(file.path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            assert os.fstat(fd).st_size == file.file_bytes
            offset = file.payload_offset
            crcs = []
            for segment in self._segments(file, tokens, states):
                os.pwrite(fd, segment, offset)
                offset += align(len(segment))
                crcs.append(crc32c(segment))
        finally:
            os.close(fd)
        return m.EngineFilled(file.reservation_id, struct.pack(f"<{len(crcs)}I", *crcs))

    def fingerprints(self, tokens: Tokens) -> tuple[bytes, ...]:
        """Of all blocks, the tail too."""
        found = []
        for first in range(0, len(tokens), 64):
            count = min(64, len(tokens) - first)
            crcs = [crc32c(self._rows(p, tokens, first, count)) for p in range(self.planes)]
            found.append(rows_fingerprint(struct.pack(f"<{len(crcs)}I", *crcs)))
        return tuple(found)

    def plan(self, tokens: Sequence[int], **options: Any) -> m.Planned:
        """With the fingerprints of all blocks."""
        fingerprints = self.fingerprints(tokens)
        return self.client.plan(
            m.Plan(tokens_to_bytes(tokens), fingerprints=fingerprints, **options)
        )

    def look_up(self, tokens: Sequence[int], **options: Any) -> m.Matched:
        """With its files."""
        found = self.client.match(m.EngineMatch(tokens_to_bytes(tokens), **options))
        return self.client.wait(found.lease_id) if found.pending else found

    def restore(self, tokens: Sequence[int], **options: Any) -> int:
        """How many rows came back, each the right one; the lease is given back. Damage."""
        found = self.look_up(tokens, **options)
        covered = found.files[0].first_position if found.files else 0
        for number, file in enumerate(found.files):
            segments = self.read(number, file)
            if file.kind == m.FileKind.WINDOW:
                whole = b"".join(segments)
                rows = min(file.first_position + file.rows, found.rows) - file.first_position
                size = rows * self.hello.window_row_bytes
                assert whole[:size] == self._window(tokens, file.first_position, rows)
            elif file.rows:
                assert file.first_position == covered
                covered += file.used
                for plane, segment in enumerate(segments):
                    rows = self._rows(plane, tokens, file.first_position, file.used)
                    assert segment[: len(rows)] == rows
        assert not found.files or covered == found.rows
        if found.lease_id:
            self.client.release(found.lease_id)
        return found.rows

    def read(self, number: int, file: m.File) -> list[bytes]:
        """Its segments. Damage."""
        fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            info = os.fstat(fd)
            assert stat.S_ISREG(info.st_mode)
            assert info.st_uid == os.geteuid()
            assert not info.st_mode & 0o022
            assert info.st_size == file.file_bytes
            rows = file.kind == m.FileKind.ROWS
            sizes = [file.rows * ROW_BYTES] * self.planes if rows else parts(file.used)
            offset = file.payload_offset
            segments = []
            wanted = struct.unpack(f"<{len(sizes)}I", file.crcs)
            for size, crc in zip(sizes, wanted, strict=True):
                segments.append(os.pread(fd, size, offset))
                if crc32c(segments[-1]) != crc:
                    raise Damage(number)
                offset += align(size)
            return segments
        finally:
            os.close(fd)

    def _segments(
        self, file: m.EngineReserved, tokens: Tokens, states: dict[int, bytes]
    ) -> list[bytes]:
        first, rows = file.first_position, file.rows
        if file.kind == m.FileKind.WINDOW:
            data = self._window(tokens, first, rows)
        elif rows:
            return [self._rows(plane, tokens, first, rows) for plane in range(self.planes)]
        else:
            data = states[first]
        starts = range(0, len(data), STATE_PART_BYTES)
        return [data[start : start + STATE_PART_BYTES] for start in starts]

    def _window(self, tokens: Tokens, first: int, count: int) -> bytes:
        """Made like rows, of another plane."""
        row = self.hello.window_row_bytes
        assert row % ROW_BYTES == 0
        rows = self._rows(255, tokens, first, count)
        return b"".join(
            rows[at : at + ROW_BYTES] * (row // ROW_BYTES) for at in range(0, len(rows), ROW_BYTES)
        )

    def _rows(self, plane: int, tokens: Tokens, first: int, count: int) -> bytes:
        """Each depends on every token up to it."""
        begins, other = self.history
        before = hashlib.sha256(bytes([plane]) + tokens_to_bytes(tokens[:first]))
        rows = []
        for position, token in enumerate(tokens[first : first + count], first):
            before.update(struct.pack("<i", token))
            made = before.copy()
            made.update(other if position >= begins else b"")
            rows.append(made.digest()[:ROW_BYTES])
        return b"".join(rows)


def parts(state_bytes: int) -> list[int]:
    whole, rest = divmod(state_bytes, STATE_PART_BYTES)
    return [STATE_PART_BYTES] * whole + ([rest] if rest else [])


def nothing_is_held(stat: adm.StatResponse) -> bool:
    """No lease, and nothing reserved: what becomes of a connection that has ended."""
    return not stat.open_leases and not any(tier.reserved_bytes for tier in stat.tiers)
