"""Directories, locks, file systems and the page cache: the helpers below the tiers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.system import pagecache
from ollama_tiering.system.directories import UnsafeDirectory, open_below, secure_directory
from ollama_tiering.system.filesystems import filesystem_type, in_memory
from ollama_tiering.system.locks import lock_file


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    made = secure_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsafeDirectory):
        secure_directory(tmp_path / "file")


def test_a_lock_is_held_once_and_names_its_owner(tmp_path: Path) -> None:
    fd = lock_file(tmp_path / "lock", "the thing")
    with pytest.raises(ServiceError, match=f"the thing is in use by process {os.getpid()}"):
        lock_file(tmp_path / "lock", "the thing")
    os.close(fd)
    os.close(lock_file(tmp_path / "lock", "the thing"))


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_no_lock_is_taken_on_anything_but_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeDirectory, match="not a regular file"):
        lock_file(path, "the thing")
    assert not (tmp_path / "elsewhere").exists()


def test_a_walk_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    with open_below(tmp_path, ("real", "deep")) as fd:
        assert os.fstat(fd).st_ino == (tmp_path / "real" / "deep").stat().st_ino
    with pytest.raises(OSError, match=r"link|directory"), open_below(tmp_path, ("link", "deep")):
        pass
    with open_below(tmp_path, ("new", "er"), create=True):
        assert (tmp_path / "new" / "er").stat().st_mode & 0o777 == 0o700


def test_a_walk_leaks_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        with open_below(tmp_path, ("a", "b"), create=True):
            pass
        with pytest.raises(FileNotFoundError), open_below(tmp_path, ("a", "none")):
            pass
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_tmpfs_is_memory() -> None:
    shm = Path("/dev/shm")
    if filesystem_type(shm) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    assert in_memory(shm)
    assert filesystem_type(Path("/proc")) == "proc"
    assert not in_memory(Path("/proc"))


def test_a_file_just_read_is_resident(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    try:
        assert pagecache.resident(fd, 1 << 20) in (True, None)
        assert pagecache.resident(fd, 0) is None
        pagecache.forget(fd)
    finally:
        os.close(fd)
