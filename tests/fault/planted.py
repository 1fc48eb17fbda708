"""What somebody could leave in a tier's directory in place of a file or directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

ZERO = os.makedev(1, 5)  # /dev/zero: read without care, it never ends


def plant_device(path: Path) -> None:
    """Skips the test where this user may make none."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, ZERO)
    except PermissionError:
        pytest.skip("NOT TESTED: a planted device, for making one needs CAP_MKNOD")


def plant(path: Path, kind: str, outside: Path) -> None:
    """In place of what is there: a link to `outside`, a pipe, or a device."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(path.name + ".was"))
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        plant_device(path)
