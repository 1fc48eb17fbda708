"""Who listens on a Unix socket. It is asked before a byte is sent: whoever listens gets the prompts
and chooses the rows.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Final
from urllib.parse import quote

from ollama_tiering.errors import ServiceError
from ollama_tiering.system.closing import Closing

_CONNECT_SECONDS: Final = 2.0
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid
_DESCRIPTORS: Final = Path("/proc/self/fd")


class Stranger(ServiceError):
    """Another user's process listens there. It was sent nothing."""

    def __init__(self, path: Path | str, uid: int) -> None:
        super().__init__(
            f"a process of user {uid} listens on {path}, and this is user {os.geteuid()}: it is "
            "not used",
            hint="name a socket of your own (--socket), or unset XDG_RUNTIME_DIR if that is "
            "another user's",
        )


def peer_uid(connection: socket.socket) -> int:
    """Returns the uid of the process that listened when this was connected; of the one that
    connected, at the other end.
    """
    return peer(connection)[1]


def peer(connection: socket.socket) -> tuple[int, int]:
    """Its pid (0: it is in another namespace of pids) and its uid."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(packed)
    return pid, uid


def require_own_listener(
    connection: socket.socket, path: Path | str, *, also: int | None = None
) -> None:
    """Stranger if neither this user, nor root, nor the user `also` listens."""
    if (uid := peer_uid(connection)) not in (os.geteuid(), 0, also):
        raise Stranger(path, uid)


class OwnListener(Closing):
    """The socket that has this name now, once it is known whose it is.

    A name can be given to another socket between a question and its use. So the socket itself is
    held by a descriptor, and `address` leads to it whatever becomes of its name.
    """

    def __init__(self, path: Path, *, also: int | None = None) -> None:
        """Stranger if it is another user's; OSError if nobody listens."""
        self._path = path
        self._fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            self._inode = _inode(os.fstat(self._fd))
            held = _DESCRIPTORS / str(self._fd)
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_SECONDS)
                probe.connect(str(held))
                require_own_listener(probe, path, also=also)
                self.pid = peer(probe)[0]
        except BaseException:
            os.close(self._fd)
            raise
        self.address = str(held)

    def has_its_name(self) -> bool:
        try:
            return _inode(self._path.stat()) == self._inode
        except OSError:
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def grpc_address(path: Path | str) -> str:
    """gRPC takes a URI: what else a path may hold is encoded in it. Not for a path with a comma,
    which gRPC takes for the end of an address, encoded or not.
    """
    return "unix:" + quote(os.fsencode(path), safe="/")


def _inode(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino
