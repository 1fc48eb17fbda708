"""What lies in a tree of links, written down when it was laid: a tree of which something is gone,
cut short or another is none.

A cleaner of caches, a power cut and a removal that was killed leave half a tree, and its `ollama`
may be in that half.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.patchset.llama_server import links
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.system.directories import sync_directory

Parts = list[list[str | int]]
"""Of each file its name, size and time (ns); of a link its name and where it leads; of a hard link
to the installed program the name alone, because an update may write into that file.
"""

_SECOND_NS: Final = 10**9
_FOLDERS: Final = (links.PROGRAM.parent, links.LIB)


def of(folder: Path, installation: InstalledOllama) -> Parts:
    """All that lies in the tree in `folder`. Files that are the tree's own get a time in whole
    seconds first: a layer of a container's image keeps no more of it. OSError passes.
    """
    found: Parts = []
    for path in (path for part in _FOLDERS for path in sorted((folder / part).iterdir())):
        name, info = path.relative_to(folder).as_posix(), path.lstat()
        if stat.S_ISLNK(info.st_mode):
            found.append([name, str(path.readlink())])
        elif os.path.samestat(info, installation.program.stat()):
            found.append([name])
        else:
            whole_ns = info.st_mtime_ns // _SECOND_NS * _SECOND_NS
            os.utime(path, ns=(whole_ns, whole_ns))
            found.append([name, info.st_size, whole_ns])
    return found


def are_there(folder: Path, parts: Sequence[Sequence[str | int]]) -> bool:
    """Whether each is as it was."""
    try:
        return all(_is_there(folder / str(name), values) for name, *values in parts)
    except (OSError, ValueError, TypeError):
        return False


def _is_there(path: Path, values: Sequence[str | int]) -> bool:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return list(values) == [str(path.readlink())]
    return stat.S_ISREG(info.st_mode) and list(values) in ([], [info.st_size, info.st_mtime_ns])


def make_durable(folder: Path) -> None:
    """Content and names of all in the tree survive a power cut that comes after this."""
    for path in (path for path in folder.rglob("*") if not path.is_symlink()):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        else:
            sync_directory(path)
    sync_directory(folder)
