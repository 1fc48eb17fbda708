"""File systems that lack something, below one directory: what exFAT, vfat, CIFS, DrvFs and some
FUSE programs answer. Everything else is as it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class LackingFileSystem:
    """`lacks` names calls; each fails with its errno, for descriptors and paths below `root`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._patch = monkeypatch

    def lack(self, *what: str) -> None:
        for one in what:
            getattr(self, f"_no_{one}")()

    def _no_chmod(self) -> None:
        self._fail(os, "fchmod", errno.EPERM)
        self._fail(os, "chmod", errno.EPERM)

    def _no_chmod_and_no_modes(self) -> None:
        """As mounted by default: everybody may read."""
        self._no_chmod()
        self._modes(0o755)

    def _no_modes(self) -> None:
        """chmod says yes and does nothing, as CIFS without its extensions."""
        self._answer(os, "fchmod", None)
        self._answer(os, "chmod", None)
        self._modes(0o755)

    def _no_writable(self) -> None:
        """... and write, which the same mount allows to itself too."""
        self._answer(os, "fchmod", None)
        self._modes(0o777)

    def _no_owner(self) -> None:
        self._stat(lambda fields: fields.__setitem__(4, os.geteuid() + 1))

    def _no_directory_sync(self) -> None:
        self._fail(os, "fsync", errno.EINVAL, only=stat.S_ISDIR)

    def _no_sync(self) -> None:
        self._fail(os, "fsync", errno.EINVAL)

    def _no_allocation(self) -> None:
        self._fail(os, "posix_fallocate", errno.EOPNOTSUPP)

    def _no_lock(self) -> None:
        self._fail(fcntl, "flock", errno.ENOTSUP)

    def _no_link(self) -> None:
        self._fail(os, "link", errno.EPERM)

    def _no_direct(self) -> None:
        real = fcntl.fcntl

        def fcntl_(fd: int, command: int, argument: Any = 0) -> Any:
            if command == fcntl.F_SETFL and argument & os.O_DIRECT and self._below(fd):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, command, argument)

        self._patch.setattr(fcntl, "fcntl", fcntl_)

    def _modes(self, mode: int) -> None:
        def change(fields: list[Any]) -> None:
            fields[0] = stat.S_IFMT(fields[0]) | mode

        self._stat(change)

    def _stat(self, change: Callable[[list[Any]], None]) -> None:
        for name in ("fstat", "stat", "lstat"):
            real = getattr(os, name)

            def changed(place: Any, *args: Any, _real: Any = real, **options: Any) -> Any:
                info = _real(place, *args, **options)
                if not self._below(place, options.get("dir_fd")):
                    return info
                fields = list(info)
                change(fields)
                times = {n: getattr(info, n) for n in dir(info) if n.startswith("st_")}
                return os.stat_result(fields, times)

            self._patch.setattr(os, name, changed)

    def _answer(self, owner: Any, name: str, answer: Any) -> None:
        real = getattr(owner, name)

        def answered(place: Any, *args: Any, **options: Any) -> Any:
            if self._below(place, options.get("dir_fd")):
                return answer
            return real(place, *args, **options)

        self._patch.setattr(owner, name, answered)

    def _fail(
        self, owner: Any, name: str, error: int, *, only: Callable[[int], bool] = lambda mode: True
    ) -> None:
        real = getattr(owner, name)

        def failing(place: Any, *args: Any, **options: Any) -> Any:
            if self._below(place, options.get("dir_fd")) and (
                not isinstance(place, int) or only(os.fstat(place).st_mode)
            ):
                raise OSError(error, os.strerror(error))
            return real(place, *args, **options)

        self._patch.setattr(owner, name, failing)

    def _below(self, place: Any, dir_fd: int | None = None) -> bool:
        try:
            if isinstance(place, int):
                path = Path(f"/proc/self/fd/{place}").readlink()
            elif dir_fd is not None:
                path = Path(f"/proc/self/fd/{dir_fd}").readlink() / os.fspath(place)
            else:
                path = Path(os.fspath(place))
        except (OSError, TypeError):
            return False
        return path.is_relative_to(self.root)
