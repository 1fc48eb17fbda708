"""The file system on which a path lies: its type, and whether it has room."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_MEMORY: Final = frozenset(("tmpfs", "ramfs"))
_NETWORK: Final = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse")
)


def is_memory(kind: str) -> bool:
    """Whether a file system of this type lies in memory, without a disk."""
    return kind in _MEMORY


def is_network(kind: str) -> bool:
    """Whether others may change a file system of this type, and it may be slow or gone. FUSE
    counts, because only its program knows what is behind it.
    """
    return kind.partition(".")[0] in _NETWORK


def is_full(place: Path) -> bool:
    """Whether the file system that has it, or will, has no room for a file of this user."""
    with contextlib.suppress(OSError):
        room = os.statvfs(next(here for here in (place, *place.parents) if here.exists()))
        return not room.f_bavail or bool(room.f_files and not room.f_favail)
    return False


def in_memory(path: Path) -> bool:
    """Whether the directory lies on a file system in memory."""
    return is_memory(filesystem_type(path))


def filesystem_type(path: Path) -> str:
    """The type of the file system of `path`, by its device number; empty if it is not known."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            return right.split()[0]
    return ""


def mount_point(path: Path) -> Path:
    """The directory at which the file system of `path`, which exists, is mounted."""
    at = path.absolute()
    while not os.path.ismount(at):
        at = at.parent
    return at
