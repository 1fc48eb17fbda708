"""Runs the command line and writes down every path it touches: `python watch.py LOG ARGUMENTS`.

By an audit hook, which no later code can take away. Names relative to a descriptor are resolved,
and where an open really led, after all links, is asked of the kernel.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

# Event -> where its paths are among the arguments, each with the place of its directory.
_EVENTS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "os.listdir": ((0, None),),
    "os.scandir": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
    "os.chdir": ((0, None),),
    "os.getxattr": ((0, None),),
    "os.setxattr": ((0, None),),
    "os.listxattr": ((0, None),),
    "shutil.rmtree": ((0, None),),
    "sqlite3.connect": ((0, None),),
    "ctypes.dlopen": ((0, None),),
}
_PROCESSES = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork")
_MEMORY = (":memory:", "")


class Watch:
    def __init__(self, log_path: str) -> None:
        self._log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._seen: set[str] = set()
        self._directory = threading.local()
        self._open = os.open

    def install(self) -> None:
        os.supports_dir_fd.add(self.open)
        os.open = self.open
        sys.addaudithook(self.audit)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._directory.fd = dir_fd
        try:
            fd = self._open(path, flags, mode, dir_fd=dir_fd)
        finally:
            self._directory.fd = None
        self._note("opened", str(Path(f"/proc/self/fd/{fd}").readlink()))
        return fd

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            self._note(event, _place(args[0], getattr(self._directory, "fd", None)))
        elif event in _EVENTS:
            for path_at, directory_at in _EVENTS[event]:
                directory = args[directory_at] if directory_at is not None else None
                self._note(event, _place(args[path_at], directory))
        elif event in _PROCESSES:
            self._note(event, f"process {args[:1]!r}")
        elif event in ("socket.connect", "socket.bind"):
            self._note(event, _place(args[1], None) if isinstance(args[1], str) else repr(args[1]))

    def _note(self, event: str, place: str) -> None:
        line = f"{event}\t{place!r}\n"
        if place and line not in self._seen:
            self._seen.add(line)
            os.write(self._log, line.encode(errors="backslashreplace"))


def _place(path: Any, directory: int | None) -> str:
    if path is None:
        return ""
    if isinstance(path, int):
        return _of_descriptor(path)
    name = os.fsdecode(path)
    if name in _MEMORY:
        return ""
    base = str(Path.cwd())
    if directory is not None and directory >= 0:
        base = _of_descriptor(directory)
    return os.path.normpath(f"{base}/{name}" if not name.startswith("/") else name)


def _of_descriptor(fd: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return ""


if __name__ == "__main__":
    watch = Watch(sys.argv[1])
    sys.argv[1:2] = []
    watch.install()
    from ollama_tiering.cli import main

    main()
