"""Git object names of plain files and folders, computed without git: the same bytes give the same
name as upstream.

Only regular files and links count, as in git; empty folders do not exist. Pure reading, no state.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

ReadFile = Callable[[str], bytes | None]


def blob_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def file_oid(path: Path) -> str:
    return blob_oid(os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes())


def folder_oid(
    root: Path,
    folder: str,
    *,
    without: frozenset[str] = frozenset(),
    instead: dict[str, Path] | None = None,
) -> str | None:
    """Tree name of `root/folder`. Paths in `without` (relative to root) are not there; `instead`
    gives other content.
    """
    raw = _tree(root, Path(folder), without, instead or {})
    return raw.hex() if raw is not None else None


def _tree(
    root: Path, folder: Path, without: frozenset[str], instead: dict[str, Path]
) -> bytes | None:
    entries: list[tuple[bytes, bytes]] = []
    if not (root / folder).is_dir():
        return None
    for entry in os.scandir(root / folder):
        relative = folder / entry.name
        name = os.fsencode(entry.name)
        if entry.is_dir(follow_symlinks=False):
            child = None if entry.name == ".git" else _tree(root, relative, without, instead)
            if child is not None:
                entries.append((name + b"/", b"40000 " + name + b"\0" + child))
            continue
        if relative.as_posix() in without:
            continue
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            mode = b"120000 "
        elif stat.S_ISREG(info.st_mode):
            mode = b"100755 " if info.st_mode & 0o100 else b"100644 "
        else:
            continue
        content = instead.get(relative.as_posix(), root / relative)
        entries.append((name, mode + name + b"\0" + bytes.fromhex(file_oid(content))))
    if not entries:
        return None
    body = b"".join(line for _, line in sorted(entries))
    return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).digest()
