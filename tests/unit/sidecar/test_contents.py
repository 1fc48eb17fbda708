"""What is in files that engines have loaded: read once, beside, as the engine saw it or not."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.protocol.loaded_file import FileIdentity, LoadedFile
from ollama_tiering.sidecar.content import contents as contents_module
from ollama_tiering.sidecar.content import hashing
from ollama_tiering.sidecar.content.contents import BEING_READ, MOST_RUNNING, Content, Contents
from ollama_tiering.sidecar.content.hashing import NoFile, OtherFile, Stopped, file_digest
from ollama_tiering.sidecar.content.record import FILE_NAME, MOST_FILES, ContentRecord
from ollama_tiering.sidecar.content.verdict import FilesVerdict, claimed, verdict

SECONDS = 30.0


class Clock:
    """Monotonic, and set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reading(clock: Clock) -> Iterator[Contents]:
    contents = Contents(clock=clock)
    yield contents
    contents.close()


def model(folder: Path, data: bytes = b"weights", name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def blob(folder: Path, data: bytes) -> Path:
    return model(folder, data, f"sha256-{hashlib.sha256(data).hexdigest()}")


def settled(contents: Contents, path: Path | LoadedFile) -> Content:
    file = path if isinstance(path, LoadedFile) else LoadedFile.of(path)
    return contents.wait([file], SECONDS)[0]


def judged(contents: Contents, path: Path) -> FilesVerdict:
    file = LoadedFile.of(path)
    return verdict([file], contents.wait([file], SECONDS))


def test_the_digest_is_that_of_the_whole_file(tmp_path: Path, reading: Contents) -> None:
    data = os.urandom((3 << 20) + 17)
    found = settled(reading, model(tmp_path, data))
    assert found == Content(digest=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("at", [0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 5, -1])
def test_a_bit_anywhere_is_seen_although_the_time_is_put_back(
    tmp_path: Path, reading: Contents, at: int
) -> None:
    data = bytearray(os.urandom((2 << 20) + 6))
    path = blob(tmp_path, bytes(data))
    assert judged(reading, path).digests
    before = path.stat()
    time.sleep(0.02)  # times of change go by ticks
    data[at] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = judged(reading, path)
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, len(data))
    assert "is damaged" in after.refusal
    assert "ollama rm" in after.refusal
    assert not after.digests


def test_a_damaged_blob_put_right_is_another_file(tmp_path: Path, reading: Contents) -> None:
    data = os.urandom(5000)
    path = blob(tmp_path, data)
    damaged = LoadedFile.of(model(tmp_path, data[:-1] + b"?", path.name))
    assert "is damaged" in verdict([damaged], [settled(reading, damaged)]).refusal
    right = model(tmp_path, data, "partial")
    right.rename(path)  # as a pull does it
    assert judged(reading, path).digests == (claimed(path.name),)
    again = verdict([damaged], [settled(reading, damaged)])  # by a runner that still has it loaded
    assert "is damaged" in again.refusal


def test_two_models_with_one_name_size_and_time_differ(tmp_path: Path, reading: Contents) -> None:
    found = set()
    for data in (b"one tune", b"two tune"):
        folder = tmp_path / data[:3].decode()
        folder.mkdir()
        path = model(folder, data)
        os.utime(path, (1, 1))
        found.add(settled(reading, path).digest)
    assert len(found) == 2


def test_asking_never_waits(
    tmp_path: Path, reading: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(contents_module, "file_digest", lambda *_: hanging.wait(SECONDS) or "")
    file = LoadedFile.of(model(tmp_path))
    began = time.monotonic()
    assert reading.ask(file) == Content()
    assert verdict([file], [reading.ask(file)]).pending == BEING_READ
    assert time.monotonic() - began < SECONDS / 2
    hanging.set()


def test_a_file_is_read_once(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counting(file: LoadedFile, stopping: threading.Event) -> str:
        read.append(file.path)
        return file_digest(file, stopping)

    monkeypatch.setattr(contents_module, "file_digest", counting)
    path = model(tmp_path)
    state = tmp_path / "state"
    for _ in range(2):  # the second one knows it from the record
        contents = Contents(ContentRecord(state), clock)
        for _ in range(3):
            clock.now += 60
            assert settled(contents, path).digest
        contents.close()
    assert read == [str(path)]


def test_a_write_under_a_loaded_model_is_doubt_for_good(
    tmp_path: Path, reading: Contents, clock: Clock
) -> None:
    path = model(tmp_path)
    file = LoadedFile.of(path)
    assert settled(reading, file).digest
    time.sleep(0.02)
    path.write_bytes(b"weighty")
    assert reading.ask(file).digest, "a look-up does not wait for the next look"
    clock.now += 60
    assert "changed after it was loaded" in settled(reading, file).doubt
    moved = model(tmp_path, b"weights", "new")
    moved.rename(path)
    clock.now += 60
    assert "changed after it was loaded" in settled(reading, file).doubt


def test_what_was_loaded_stays_what_it_was_when_another_file_takes_its_place(
    tmp_path: Path, reading: Contents, clock: Clock
) -> None:
    path = model(tmp_path)
    file = LoadedFile.of(path)
    digest = settled(reading, file).digest
    model(tmp_path, b"another", "new").rename(path)
    clock.now += 60
    assert settled(reading, file) == Content(digest=digest)
    path.unlink()
    clock.now += 60
    assert settled(reading, file) == Content(digest=digest)


def test_a_file_that_went_before_it_was_read_is_in_doubt(tmp_path: Path, reading: Contents) -> None:
    path = model(tmp_path)
    file = LoadedFile.of(path)
    model(tmp_path, b"another", "new").rename(path)
    assert "another file than the one that was loaded" in settled(reading, file).doubt
    assert not verdict([file], [settled(reading, file)]).digests


def test_a_file_that_changes_while_it_is_read_is_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path, bytes(3 << 20))
    file = LoadedFile.of(path)
    read = os.readv

    def growing(fd: int, buffers: list[bytearray]) -> int:
        with path.open("r+b") as other:
            other.write(b"x")
        return read(fd, buffers)

    monkeypatch.setattr(os, "readv", growing)
    with pytest.raises(OtherFile):
        file_digest(file, threading.Event())


def test_what_is_no_regular_file_is_never_read(tmp_path: Path, reading: Contents) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / "socket"):
            assert "no regular file" in settled(reading, path).doubt
    with pytest.raises(NoFile):
        file_digest(LoadedFile.of(tmp_path / "pipe"), threading.Event())


def test_what_cannot_be_read_is_weather(
    tmp_path: Path, reading: Contents, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path)
    file = LoadedFile.of(path)

    def failing(*_: object) -> str:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(contents_module, "file_digest", failing)
        found = verdict([file], [settled(reading, file)])
    assert "Input/output error" in found.pending
    assert str(path) in found.pending
    assert not found.refusal
    clock.now += 60
    assert settled(reading, file).digest


def test_odd_paths_are_doubt_and_no_error(reading: Contents) -> None:
    nothing = FileIdentity(1, 2, 3, 4, 5)
    for path in ("/nowhere/model.gguf", "/tmp/\udcff", "/a\0b", "/" + "x" * 5000, "/proc/1/mem"):
        assert not settled(reading, LoadedFile(path, nothing)).digest


def test_a_sparse_file_is_read_and_the_end_of_the_sidecar_does_not_wait_for_it(
    tmp_path: Path,
) -> None:
    path = model(tmp_path)
    os.truncate(path, 1 << 40)
    contents = Contents()
    assert not contents.ask(LoadedFile.of(path)).settled
    time.sleep(0.2)
    began = time.monotonic()
    contents.close()
    assert time.monotonic() - began < SECONDS / 2
    assert contents.ask(LoadedFile.of(path)) == Content()


def test_reading_ends_within_a_piece(tmp_path: Path) -> None:
    path = model(tmp_path)
    os.truncate(path, 1 << 40)
    time.sleep(0.1)  # old enough to be read at once
    stopping, ended = threading.Event(), threading.Event()

    def read() -> None:
        with pytest.raises(Stopped):
            file_digest(LoadedFile.of(path), stopping)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert not ended.wait(0.3)
    stopping.set()
    assert ended.wait(SECONDS)


def test_thousands_of_files_are_bounded(
    tmp_path: Path, reading: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(contents_module, "file_digest", lambda *_: hanging.wait(SECONDS) or "")
    identity = LoadedFile.of(model(tmp_path)).identity
    for number in range(20_000):
        reading.ask(LoadedFile(f"{tmp_path}/model.gguf", FileIdentity(number, *_rest(identity))))
    assert len(reading._running) <= MOST_RUNNING
    hanging.set()
    record = ContentRecord()
    for number in range(MOST_FILES + 10):
        record.note(FileIdentity(number, 0, 0, 0, 0), "0" * 64)
    assert not record.digest(FileIdentity(9, 0, 0, 0, 0))
    assert record.digest(FileIdentity(10, 0, 0, 0, 0))


def _rest(identity: FileIdentity) -> tuple[int, int, int, int]:
    one = identity
    return one.inode, one.size_bytes, one.mtime_ns, one.ctime_ns


@pytest.mark.parametrize(
    ("age_ns", "part_ns", "waits"),
    [(0, 1, 0.05), (30_000_000, 1, 0.02), (60_000_000, 1, 0.0), (500_000_000, 0, 1.5)],
)
def test_a_young_file_is_not_read_before_a_change_would_be_seen(
    age_ns: int, part_ns: int, waits: float
) -> None:
    ctime = 1_000 * 1_000_000_000 + part_ns  # without a part: the file system keeps seconds only
    found = hashing._unripe_seconds(FileIdentity(1, 1, 1, 0, ctime), ctime + age_ns)
    assert found == pytest.approx(waits, abs=1e-6)


def test_a_time_of_change_that_is_ahead_is_waited_for_once() -> None:
    ahead = FileIdentity(1, 1, 1, 0, 3_600_000_000_001)  # of a server whose clock is
    assert hashing._unripe_seconds(ahead, 0) == pytest.approx(0.05)


def test_a_file_that_is_known_waits_for_no_other_that_is_read(
    tmp_path: Path, reading: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = LoadedFile.of(model(tmp_path, b"known", "known"))
    digest = settled(reading, known).digest
    released, begun = threading.Event(), threading.Semaphore(0)

    def hanging(*_: object) -> str:
        begun.release()
        released.wait(SECONDS)
        return ""

    monkeypatch.setattr(contents_module, "file_digest", hanging)
    for name in ("one", "two"):
        reading.ask(LoadedFile.of(model(tmp_path, name.encode(), name)))
    assert all(begun.acquire(timeout=SECONDS) for _ in range(2))
    try:
        assert reading.wait([known], SECONDS / 2) == [Content(digest=digest)]
    finally:
        released.set()


def test_what_is_stored_was_looked_at_after_it_was_asked_for(
    tmp_path: Path, reading: Contents, clock: Clock
) -> None:
    path = model(tmp_path)
    file = LoadedFile.of(path)
    assert settled(reading, file).digest
    clock.now += contents_module.FRESH_SECONDS / 2
    time.sleep(0.02)  # times of change go by ticks
    with path.open("r+b") as written:
        written.write(b"W")
    assert reading.ask(file).digest, "a look-up goes by a finding of this second"
    assert "was changed after it was loaded" in settled(reading, file).doubt


DAMAGE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"version": 1}',
    b'{"version": 1, "files": 3, "sum": ""}',
    b"\xff" * 100,
    b"[" * 100_000,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_record_that_cannot_be_read_begins_anew(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    record = ContentRecord(tmp_path)
    identity = FileIdentity(1, 2, 3, 4, 5)
    assert not record.digest(identity)
    record.note(identity, "a" * 64)
    assert ContentRecord(tmp_path).digest(identity) == "a" * 64
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_no_flipped_bit_of_the_record_gives_another_digest(tmp_path: Path) -> None:
    identity = FileIdentity(1, 2, 3, 4, 5)
    ContentRecord(tmp_path).note(identity, "a" * 64)
    sound = (tmp_path / FILE_NAME).read_bytes()
    for at in range(len(sound)):
        for bit in (1, 8):
            changed = bytearray(sound)
            changed[at] ^= bit
            (tmp_path / FILE_NAME).write_bytes(changed)
            assert ContentRecord(tmp_path).digest(identity) in ("", "a" * 64)
    entry = json.loads(sound)
    entry["files"][0][5] = "b" * 64
    (tmp_path / FILE_NAME).write_text(json.dumps(entry))
    assert not ContentRecord(tmp_path).digest(identity)


def test_a_record_is_no_link_and_needs_no_directory(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to("/etc/passwd")
    record = ContentRecord(tmp_path)
    identity = FileIdentity(1, 2, 3, 4, 5)
    record.note(identity, "a" * 64)
    assert not (tmp_path / FILE_NAME).is_symlink()
    nowhere = ContentRecord(Path("/proc/nowhere"))
    nowhere.note(identity, "a" * 64)
    assert nowhere.digest(identity) == "a" * 64
