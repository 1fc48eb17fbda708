"""Records what a program does to the files below a directory, as operations of the disk model.

Names are seen at the calls of `os` that change them; content is compared with what was known
whenever a file is synced, renamed, closed or changes its mode, whoever wrote it and however. `same`
compares everything recorded with the files as they are: nothing was done unseen. Syncs are recorded
and not done: the machine that runs the tests need not wait for its own disk.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.disk_model import (
    ROOT,
    SECTOR_BYTES,
    Disk,
    Mode,
    Name,
    Node,
    Op,
    Resize,
    Sync,
    Unname,
    Write,
)

Call = Callable[..., Any]


class Recorder:
    """`leave` are starts of file names that are no concern of the model. Thread-safe."""

    def __init__(self, root: Path, leave: tuple[str, ...] = ()) -> None:
        self.root = root
        self.ops: list[Op] = []
        self.kinds: dict[int, Node] = {}  # nodes as they were made
        self.now = Disk()
        self._leave = leave
        self._lock = threading.RLock()
        self._numbers: dict[tuple[int, int], int] = {_identity(root.stat()): ROOT}
        self._places: dict[int, tuple[int, str]] = {}  # node -> directory and name

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "mkdir", "link", "unlink", "remove", "rmdir", "rename", "replace"):
                patch.setattr(os, name, self._around(getattr(os, name), getattr(self, f"_{name}")))
            for name in ("fsync", "fdatasync"):
                patch.setattr(os, name, self._fsync)
            for name in ("chmod", "fchmod"):
                patch.setattr(os, name, self._around(getattr(os, name), self._chmod))
            patch.setattr(os, "close", self._around(os.close, self._close))
            yield

    def same(self) -> None:
        """Asserts that the files are what was recorded of them."""
        with self._lock:
            for number in list(self._places):
                self._look(number)
            recorded = {
                path: (node.mode, None if node.names is not None else bytes(node.content))
                for path, node in self.now.tree()
            }
        found = {}
        for path in self.root.rglob("*"):
            if not path.name.startswith(self._leave):
                content = path.read_bytes() if path.is_file() else None
                name = str(path.relative_to(self.root))
                found[name] = (stat.S_IMODE(path.lstat().st_mode), content)
        assert found == recorded

    def _around(self, call: Call, record: Callable[..., Any]) -> Call:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return record(call, *args, **kwargs)

        return recorded

    # --- names ---------------------------------------------------------------------------------

    def _open(self, call: Call, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        place = self._place(path, kwargs.get("dir_fd")) if flags & os.O_CREAT else None
        new = place is not None and place[1] not in (self.now.nodes[place[0]].names or {})
        fd: int = call(path, flags, *args, **kwargs)
        if new and place is not None:
            self._made(place, os.fstat(fd))
        return fd

    def _mkdir(self, call: Call, path: Any, *args: Any, dir_fd: int | None = None) -> None:
        call(path, *args, dir_fd=dir_fd)
        if (place := self._place(path, dir_fd)) is not None:
            self._made(place, os.stat(path, dir_fd=dir_fd, follow_symlinks=False))

    def _link(self, call: Call, src: Any, dst: Any, **kwargs: Any) -> None:
        node = self._node_at(self._place(src, kwargs.get("src_dir_fd")))
        if node is not None:
            self._look(node)
        call(src, dst, **kwargs)
        place = self._place(dst, kwargs.get("dst_dir_fd"))
        if place is not None and node is not None:
            self._do(Name(*place, node))
            self._places[node] = place

    def _unlink(self, call: Call, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        call(path, dir_fd=dir_fd)
        if place is not None and (node := self._node_at(place)) is not None:
            self._do(Unname(*place, node))
            if self._places.get(node) == place:  # no other name
                self._forget(node)

    _remove = _rmdir = _unlink

    def _rename(self, call: Call, src: Any, dst: Any, **kwargs: Any) -> None:
        old = self._place(src, kwargs.get("src_dir_fd"))
        new = self._place(dst, kwargs.get("dst_dir_fd"))
        node = self._node_at(old)
        if node is not None:
            self._look(node)
        call(src, dst, **kwargs)
        if node is not None and new is not None:
            replaced = self._node_at(new)
            self._do(Name(*new, node, old))
            self._places[node] = new
            if replaced is not None:
                self._forget(replaced)

    _replace = _rename

    # --- content -------------------------------------------------------------------------------

    def _fsync(self, fd: int) -> None:
        with self._lock:
            number = self._numbers.get(_identity(os.fstat(fd)))
            if number is not None:
                self._look(number)
                self._do(Sync(number))

    def _chmod(self, call: Call, path: Any, mode: int, **kwargs: Any) -> None:
        number = self._numbers.get(_identity(os.stat(path)))  # noqa: PTH116 - or a descriptor
        if number is not None:
            self._look(number)
        call(path, mode, **kwargs)
        if number is not None:
            self._do(Mode(number, mode))

    def _close(self, call: Call, fd: int) -> None:
        with contextlib.suppress(OSError):
            number = self._numbers.get(_identity(os.fstat(fd)))
            if number is not None:
                self._look(number)
        call(fd)

    def _look(self, number: int) -> None:
        """Records what was written since."""
        node = self.now.nodes[number]
        if node.names is not None or number not in self._places:
            return
        with self._path(number).open("rb") as file:
            content = file.read()
        if content == node.content:
            return
        if len(content) != len(node.content):
            self._do(Resize(number, len(content)))
        changed = {
            at: content[at : at + SECTOR_BYTES]
            for at in range(0, len(content), SECTOR_BYTES)
            if content[at : at + SECTOR_BYTES] != node.content[at : at + SECTOR_BYTES]
        }
        if changed:
            self._do(Write(number, changed))

    # --- nodes ---------------------------------------------------------------------------------

    def _do(self, op: Op) -> None:
        self.ops.append(op)
        self.now.apply(op, self.kinds)

    def _made(self, place: tuple[int, str], info: os.stat_result) -> None:
        number = len(self.kinds) + 1
        names: dict[str, int] | None = {} if stat.S_ISDIR(info.st_mode) else None
        self.kinds[number] = Node(stat.S_IMODE(info.st_mode), names)
        self._numbers[_identity(info)] = number
        self._places[number] = place
        self._do(Name(*place, number))

    def _forget(self, number: int) -> None:
        """The file system gives its inode to another file."""
        del self._places[number]
        self._numbers = {one: n for one, n in self._numbers.items() if n != number}

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """Directory and name, if the directory is one of ours."""
        head, name = os.path.split(os.fspath(path))
        if name.startswith(self._leave):
            return None
        try:
            info = os.stat(head or ".", dir_fd=dir_fd)
        except OSError:
            return None
        number = self._numbers.get(_identity(info))
        return None if number is None else (number, name)

    def _node_at(self, place: tuple[int, str] | None) -> int | None:
        return None if place is None else (self.now.nodes[place[0]].names or {}).get(place[1])

    def _path(self, number: int) -> Path:
        parts: list[str] = []
        while number != ROOT:
            number, name = self._places[number]
            parts.append(name)
        return self.root.joinpath(*reversed(parts))


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino
