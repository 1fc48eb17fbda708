"""Who may speak with the sidecar: its own user and root.

First line: the socket is 0600 in a directory 0700, so the kernel refuses anybody else at connect.
Second line, should somebody loosen those modes: gRPC does not tell which connection a call came
from, but the accepted sockets are descriptors of this process. PeerGuard asks each new one for
SO_PEERCRED before a call is served, and cuts off strangers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_FD_DIRECTORY: Final = "/proc/self/fd"
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid


class PeerGuard:
    """Not thread-safe: called on the event loop only. Does nothing where there is no /proc."""

    def __init__(self, socket_path: Path) -> None:
        self._path = str(socket_path)
        self._allowed = {0, os.geteuid()}
        self._checked: dict[int, int] = {}  # descriptor -> inode: a reused number is another socket

    def strangers(self) -> int:
        """Looks at connections not seen before; how many of them it cut off."""
        try:
            names = os.listdir(_FD_DIRECTORY)  # noqa: PTH208 - once a call: a list of str is enough
        except OSError:
            return 0
        seen: dict[int, int] = {}
        found = 0
        for name in names:
            fd = int(name)
            try:
                info = os.fstat(fd)
            except OSError:
                continue
            if not stat.S_ISSOCK(info.st_mode):
                continue
            if self._checked.get(fd) != info.st_ino and self._is_stranger(fd):
                found += 1
            else:
                seen[fd] = info.st_ino
        self._checked = seen
        return found

    def _is_stranger(self, fd: int) -> bool:
        try:
            duplicate = os.dup(fd)
        except OSError:
            return False
        with socket.socket(fileno=duplicate) as connection:
            try:
                if connection.family != socket.AF_UNIX or connection.getsockname() != self._path:
                    return False
                packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            except OSError:
                return False
            pid, uid, _ = _UCRED.unpack(packed)
            if uid in self._allowed:
                return False
            log.warning("peer refused: uid=%d pid=%d", uid, pid)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return True
