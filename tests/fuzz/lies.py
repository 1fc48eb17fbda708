"""A sidecar that knows the truth and does not tell it: well-formed answers to llama-server's
library in which some numbers, paths and files are others.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import HEAD, MAX_REPLY_BYTES, FileKind, frame, frame_head
from ollama_tiering.store.block.checksum import crc32c

PLANES: Final = 4
ROW_BYTES: Final = 64  # a segment of a whole block is one page
PAGE_BYTES: Final = 4096
BLOCK_TOKENS: Final = 64
BLOCKS: Final = 6
STATE_ENGINE_BYTES: Final = 1 << 20
BLOCK_FILE_BYTES: Final = (1 + PLANES) * PAGE_BYTES
ODD: Final = (0, 1, 2, 63, 64, 65, 4095, 4096, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
ODDER: Final = (*ODD, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def mark(position: int, plane: int) -> int:
    """Of the row of token `position` at that position (llama_server/tests/kvt_engine.h)."""
    return (position * 38 + plane * 3) & 0xFF


class Truth:
    """Files below a folder: blocks of the tokens from 0 on, a state behind each of them, and what
    is no block at all. `precious` are files of ours that nobody may change.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks = [self._block(index) for index in range(BLOCKS)]
        self.states = [self._state(BLOCK_TOKENS * (index + 1)) for index in range(BLOCKS)]
        self.others = self._others()
        self.precious = [path for path in folder.iterdir() if path.is_file()]
        self._bytes = {path: path.read_bytes() for path in self.precious}
        self._made = 0

    def changed(self) -> list[Path]:
        return [path for path, data in self._bytes.items() if path.read_bytes() != data]

    def matched(self, have: int, count: int, states: bool) -> m.Matched:
        end = min(count - 1, BLOCKS * BLOCK_TOKENS)
        if states:
            end = end // BLOCK_TOKENS * BLOCK_TOKENS
        files = []
        for file in self.blocks[have // BLOCK_TOKENS :]:
            if file.first_position < end:
                used = min(file.rows, end - file.first_position)
                files.append(file._replace(used=used))
        if states and end > have:
            files.append(self.states[end // BLOCK_TOKENS - 1])
        return m.Matched(end, 1, False, 0, 0, 0, tuple(files)) if end > have else _NOTHING

    def planned(self, plan: m.Plan) -> m.Planned:
        count = len(plan.tokens) // 4
        files = []
        for first in range(0, min(count, 2 * BLOCK_TOKENS), BLOCK_TOKENS):
            rows = min(BLOCK_TOKENS, count - first)
            path = self.new(BLOCK_FILE_BYTES)
            files.append(
                m.EngineReserved(first + 1, path, BLOCK_FILE_BYTES, PAGE_BYTES, first, rows)
            )
        return m.Planned(m.EngineOutcome.ALL, "", tuple(files))

    def new(self, size: int) -> str:
        """A file that waits for a block. A few of them, over and over."""
        self._made = (self._made + 1) % 16
        path = self.folder / f"new{self._made}.tmp"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        path.touch(0o600)
        os.truncate(path, size)
        return str(path)

    def _block(self, index: int) -> m.File:
        first = BLOCK_TOKENS * index
        rows = range(first, first + BLOCK_TOKENS)
        segments = [
            b"".join(bytes([mark(row, plane)]) * ROW_BYTES for row in rows)
            for plane in range(PLANES)
        ]
        crcs = b"".join(struct.pack("<I", crc32c(segment)) for segment in segments)
        path = self._write(f"block{index}.kvb", bytes(PAGE_BYTES) + b"".join(segments))
        return m.File(
            path, BLOCK_FILE_BYTES, PAGE_BYTES, first, BLOCK_TOKENS, BLOCK_TOKENS, 1, crcs
        )

    def _state(self, n_tokens: int) -> m.File:
        last = ((n_tokens - 1) * 31 + n_tokens * 7) & 0xFF
        head = b"KVTCKPT\n" + struct.pack("<4I", 1, n_tokens, 0, n_tokens - 1)
        data = head + bytes([last]) * STATE_ENGINE_BYTES
        room = data.ljust((len(data) + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES, b"\0")
        path = self._write(f"state{n_tokens}.kvb", bytes(PAGE_BYTES) + room)
        size = PAGE_BYTES + len(room)
        crcs = struct.pack("<I", crc32c(data))
        return m.File(path, size, PAGE_BYTES, n_tokens, 0, len(data), 1, crcs, FileKind.STATE)

    def _others(self) -> list[str]:
        writable = Path(self._write("writable", bytes(BLOCK_FILE_BYTES)))
        writable.chmod(0o666)
        (self.folder / "link.tmp").symlink_to(self.blocks[0].path)
        (self.folder / "folder.tmp").mkdir()
        os.mkfifo(self.folder / "pipe.tmp", 0o600)
        named = self._write("named.tmp", bytes(BLOCK_FILE_BYTES))
        os.link(named, self.folder / "other name")
        return [
            *(
                str(self.folder / name)
                for name in ("link.tmp", "folder.tmp", "pipe.tmp", "nothing")
            ),
            *(str(writable), named, "/dev/null", "/dev/zero", "/proc/self/mem", "", "/", "a.tmp"),
            self._write("authorized_keys", b"ssh-ed25519 AAAA"),
            self._write("precious", b"\1" * BLOCK_FILE_BYTES),
            self._write("precious.tmp", bytes(PAGE_BYTES - 1) + b"\1" * (PLANES * PAGE_BYTES + 1)),
            str(self.folder / ("long" * 1000)),
        ]

    def _write(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        path.chmod(0o600)
        return str(path)


_NOTHING: Final = m.Matched(0, 0, False, 0, 1, 0)


class Liar:
    """What is made of an answer. `harmless`: a lie that a checksum or a bound shows, so that no row
    may be wrong; else also where a block belongs, which only the sidecar knows.
    """

    def __init__(self, rng: random.Random, truth: Truth, harmless: bool) -> None:
        self._rng = rng
        self._truth = truth
        self._harmless = harmless

    def matched(self, found: m.Matched) -> m.Matched:
        rng = self._rng
        files = [self._file(one) if rng.random() < 0.15 else one for one in found.files]
        if files and rng.random() < 0.2:
            self._order(files)
        found = replace(found, files=tuple(files))
        if rng.random() < 0.3:
            field = rng.choice(("rows", "lease_id", "reason", "at", "pending"))
            value = rng.random() < 0.5 if field == "pending" else rng.choice(ODD)
            found = replace(found, **{field: value})
        return found

    def planned(self, plan: m.Planned) -> m.Planned:
        rng = self._rng
        files = [self._reserved(one) if rng.random() < 0.4 else one for one in plan.files]
        if files and rng.random() < 0.2:
            self._order(files)
        outcome = rng.choice(list(m.EngineOutcome)) if rng.random() < 0.1 else plan.outcome
        return m.Planned(outcome, "", tuple(files))

    def committed(self, asked: m.Commit) -> m.Committed:
        rng = self._rng
        reasons = tuple("no" if rng.random() < 0.1 else "" for _ in asked.files)
        return m.Committed(reasons if rng.random() < 0.98 else (*reasons, ""))

    def _order(self, files: list[Any]) -> None:
        rng = self._rng
        at = rng.randrange(len(files))
        change: list[Callable[[], object]] = [
            lambda: rng.shuffle(files),
            lambda: files.pop(at),
            lambda: files.append(files[at]),
            lambda: files.insert(0, files[at]),
            files.clear,
        ]
        rng.choice(change)()

    def _file(self, one: m.File) -> m.File:
        rng = self._rng
        fields = ["path", "file_bytes", "payload_offset", "rows", "used", "tier", "crcs", "kind"]
        field = rng.choice(fields if self._harmless else [*fields, "first_position", "all"])
        if field == "all":
            return rng.choice([*self._truth.blocks, *self._truth.states])
        value: object = rng.choice(ODD)
        if field == "path":
            paths = [file.path for file in (*self._truth.blocks, *self._truth.states)]
            value = rng.choice([*paths, *self._truth.others])
        elif field in ("file_bytes", "used"):
            value = rng.choice((*ODDER, getattr(one, field) + rng.choice((-1, 1))))
        elif field == "tier":
            value = rng.choice((0, 1, 2, 3, 255))
        elif field == "kind":
            value = rng.randrange(3)
        elif field == "crcs":
            value = rng.choice((b"", one.crcs[:-4], one.crcs + bytes(4), one.crcs * 100))
        return one._replace(**{field: value})

    def _reserved(self, one: m.EngineReserved) -> m.EngineReserved:
        rng = self._rng
        fields = ("path", "file_bytes", "payload_offset", "first_position", "rows", "kind")
        field = rng.choice(fields)
        value: object = rng.choice(ODD)
        if field == "path":
            precious = [str(path) for path in self._truth.precious]
            value = rng.choice([*precious, *self._truth.others])
        elif field == "file_bytes":
            value = rng.choice((*ODDER, one.file_bytes - 1, one.file_bytes + 1))
        elif field == "kind":
            value = rng.randrange(3)
        return replace(one, **{field: value})


class LyingSidecar:
    """Serves each connection in a thread of its own. A context manager. `prompts` were answered."""

    def __init__(self, path: Path, truth: Truth, rng: random.Random, *, harmless: bool) -> None:
        self.prompts = 0
        self._truth = truth
        self._rng = rng
        self._liar = Liar(rng, truth, harmless)
        self._one_at_a_time = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                engine, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(engine,), daemon=True).start()

    def _serve(self, engine: socket.socket) -> None:
        states, told = False, _NOTHING
        with engine, contextlib.suppress(OSError, EOFError):
            while True:
                kind, body = _received(engine)
                with self._one_at_a_time:
                    if kind == Kind.HELLO:
                        states = m.Hello.unpack(body).states
                    elif kind == Kind.MATCH:
                        asked = m.EngineMatch.unpack(body)
                        count = len(asked.tokens) // 4
                        told = self._truth.matched(asked.have, count, states)
                        self.prompts += 1
                    answer = self._answer(kind, body, told)
                engine.sendall(answer)

    def _answer(self, kind: int, body: bytes, told: m.Matched) -> bytes:
        if kind == Kind.HELLO:
            return frame(Kind.WELCOME, m.Welcome(bytes(32), 64, 1, 60_000, 60_000).pack())
        if kind == Kind.MATCH or kind == Kind.WAIT:
            return frame(Kind.MATCHED, self._liar.matched(told).pack())
        if kind == Kind.PLAN:
            plan = self._truth.planned(m.Plan.unpack(body))
            return frame(Kind.PLANNED, self._liar.planned(plan).pack())
        if kind == Kind.COMMIT:
            return frame(Kind.COMMITTED, self._liar.committed(m.Commit.unpack(body)).pack())
        return frame(Kind.DONE, b"")


def _received(engine: socket.socket) -> tuple[int, bytes]:
    head = engine.recv(HEAD.size, socket.MSG_WAITALL)
    if len(head) < HEAD.size:
        raise EOFError
    size, kind = frame_head(head, MAX_REPLY_BYTES)
    return kind, engine.recv(size, socket.MSG_WAITALL) if size else b""
