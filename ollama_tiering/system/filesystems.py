"""What kind of file system a path lies on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MEMORY: Final = frozenset(("tmpfs", "ramfs"))
_NETWORK: Final = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse")
)


def is_memory(kind: str) -> bool:
    """Whether there is no disk below a file system of this type."""
    return kind in _MEMORY


def is_network(kind: str) -> bool:
    """Whether others may change it, and it may be slow or gone. FUSE counts: what is behind it only
    its program knows.
    """
    return kind.partition(".")[0] in _NETWORK


def in_memory(path: Path) -> bool:
    """Whether the directory lies on a file system without a disk below it."""
    return is_memory(filesystem_type(path))


def filesystem_type(path: Path) -> str:
    """Type of the file system of `path` by its device number; empty when not told."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            return right.split()[0]
    return ""
