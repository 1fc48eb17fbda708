"""A file that an engine has loaded, and what told it from others at that moment. Pure.

Its name says nothing sure of its content. Two looks at a file that agree in all five numbers saw
the same bytes: who writes to a file, or puts another one in its place, changes one of them, and
nobody can set the time of change (ctime) back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Taken before the first byte is read, it stands for the bytes that were read."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> Self:
        return cls(
            *(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns),
        )

    def same_file(self, other: FileIdentity) -> bool:
        """Whether both are of one file, changed or not."""
        return (self.device, self.inode) == (other.device, other.inode)


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """`path` is absolute. It may be another file's by now."""

    path: str  # bytes that are not UTF-8 as Python has them in paths
    identity: FileIdentity

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self:
        """Reads it; call this before the file is read. OSError."""
        return cls(str(Path(path).absolute()), FileIdentity.of(Path(path).stat()))

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]
