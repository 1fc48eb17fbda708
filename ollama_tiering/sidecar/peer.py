"""Only the sidecar's own user and root may talk to it.

The first line of defence: the socket is 0600 in a directory 0700, so the kernel refuses anybody
else at connect. The second line holds even if somebody loosens those modes. gRPC does not say from
which connection a call came, but the accepted sockets are descriptors of this process. Before a
call is served, PeerGuard asks each new one for SO_PEERCRED, and cuts off strangers. This takes a
system call per descriptor, so it is left out as long as the socket's modes have been private
without a break. PeerGuard also bounds the number of connections: each takes a descriptor, and a
store without descriptors cannot open its files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from enum import Enum
from pathlib import Path
from typing import Final

from ollama_tiering.system.listener import peer
from ollama_tiering.system.quiet_log import QuietLog

MAX_CONNECTIONS: Final = 128

_FD_DIRECTORY: Final = "/proc/self/fd"
_SETTLED_NS: Final = 1_000_000_000  # far more than the grain of a file's time of change


_Inode = tuple[int, int, int, int]


class _Socket(Enum):
    OWN = "connection of somebody who may call"
    STRANGER = "connection of somebody else"
    CUT_OFF = "one too many, or closed"
    OTHER = "none of the sidecar's connections"


class PeerGuard:
    """To be used on the event loop only. Does nothing if there is no /proc. `bound` is the name
    under which the socket was bound, which its connections still have, if that is another one.
    """

    def __init__(self, socket_path: Path, bound: str | None = None) -> None:
        self._path = str(socket_path)
        self._bound = bound or socket_path.name
        self._allowed = {0, os.geteuid()}
        # Descriptor -> inode (a reused number is another socket), and what it is.
        self._checked: dict[int, tuple[int, _Socket]] = {}
        self._private_since: _Inode | None = None  # the socket, as it was at the last look
        self._seldom = QuietLog(logging.getLogger(__name__))

    def trim(self) -> None:
        """Cuts off connections beyond the bound, even those that never call. It does not cut off
        strangers: a call of theirs that has already come would no longer be known as theirs.
        """
        self._look_at_new(strangers_too=False)

    def strangers(self) -> int:
        """Looks at connections that it has not seen before; returns how many
        strangers it cut off.
        """
        now = self._private_socket()
        if now is not None and now == self._private_since:
            return 0
        found = self._look_at_new(strangers_too=True)
        self._private_since = now if not found else None  # a call of theirs may still be served
        return found

    def _private_socket(self) -> _Inode | None:
        """A value that changes whenever the socket's modes do. None while others can connect, or
        could a moment ago.
        """
        try:
            info = os.lstat(self._path)
        except OSError:
            return None
        shared = info.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or info.st_uid != os.geteuid()
        if shared or time.time_ns() - info.st_ctime_ns < _SETTLED_NS:
            return None
        return info.st_dev, info.st_ino, info.st_mode, info.st_ctime_ns

    def _look_at_new(self, *, strangers_too: bool) -> int:
        try:
            names = os.listdir(_FD_DIRECTORY)  # noqa: PTH208 - once a call: a list of str is enough
        except OSError:
            return 0
        seen: dict[int, tuple[int, _Socket]] = {}
        new: list[tuple[int, int]] = []
        for name in names:
            fd = int(name)
            try:
                info = os.fstat(fd)
            except OSError:
                continue
            if not stat.S_ISSOCK(info.st_mode):
                continue
            known = self._checked.get(fd)
            if known is not None and known[0] == info.st_ino:
                seen[fd] = known
            else:
                new.append((fd, info.st_ino))
        left = MAX_CONNECTIONS - sum(what is _Socket.OWN for _, what in seen.values())
        found = 0
        for fd, inode in new:
            what = self._look(fd, room=left > 0, strangers_too=strangers_too)
            if what in (_Socket.OWN, _Socket.OTHER):
                seen[fd] = inode, what
            left -= what is _Socket.OWN
            found += what is _Socket.STRANGER
        self._checked = seen
        return found

    def _look(self, fd: int, *, room: bool, strangers_too: bool) -> _Socket:
        """Finds out what the descriptor is, and cuts it off if it is a stranger or beyond the
        bound.
        """
        try:
            connection = socket.socket(fileno=fd)
        except OSError:  # closed meanwhile
            return _Socket.CUT_OFF
        try:
            if connection.family != socket.AF_UNIX or not self._is_ours(connection):
                return _Socket.OTHER
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return _Socket.OTHER
            pid, uid = peer(connection)
            own = uid in self._allowed
            if own and room:
                return _Socket.OWN
            if own:
                message = "connection refused: pid=%d reason=%d are open already"
                self._seldom.warning("connections", message, pid, MAX_CONNECTIONS)
            elif strangers_too:
                self._seldom.warning(f"uid {uid}", "peer refused: uid=%d pid=%d", uid, pid)
            if own or strangers_too:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            return _Socket.CUT_OFF if own else _Socket.STRANGER
        except OSError:
            return _Socket.OTHER
        finally:
            connection.detach()  # the descriptor is gRPC's

    def _is_ours(self, connection: socket.socket) -> bool:
        name = connection.getsockname()
        return isinstance(name, str) and os.path.basename(name) == self._bound  # noqa: PTH119
