"""The files of a directory tier while they are open: a stored block, and one that is being written.

Nothing is opened by a path: each walks down from the tier's directory (system/directories.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import WriteAt
from ollama_tiering.system.directories import checked_regular, open_below, walk_below
from ollama_tiering.system.files import fd_reader, fill, writer
from ollama_tiering.system.pagecache import resident

if TYPE_CHECKING:
    from typing_extensions import Buffer

READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FsOpenBlock:
    def __init__(self, fd: int, file_bytes: int, *, in_memory: bool) -> None:
        self._fd = fd
        self._in_memory = in_memory
        self.file_bytes = file_bytes
        self.read_at = fd_reader(fd)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        fill(self._fd, offset, buffer)

    def resident(self) -> bool | None:
        return True if self._in_memory else resident(self._fd, self.file_bytes)


class FsTempBlock:
    """A client may have thousands of these waiting, so it has no file open; only who asks for a
    `writer` is about to fill it and have it named, and keeps it open till then.
    """

    def __init__(
        self,
        root: Path,
        place: tuple[str, ...],
        name: str,
        namespace: NamespaceId,
        key: BlockKey,
        file_bytes: int,
        grown_bytes: int,
        *,
        in_memory: bool,
    ) -> None:
        self._root = root
        self._place = place
        self._in_memory = in_memory
        self.name = name
        self.namespace = namespace
        self.key = key
        self.file_bytes = file_bytes
        self.grown_bytes = grown_bytes
        self.stored_bytes = 0  # once its content is durable
        self.path: Path | None = root.joinpath(*place, name)
        self._kept: tuple[int, int] | None = None  # descriptors of its directory and itself

    def write_at(self, offset: int, data: Buffer) -> None:
        with self.directory() as below, self.file(below, WRITE) as fd:
            writer(fd, past_cache=False)(offset, data)

    @contextlib.contextmanager
    def writer(self, *, pages: bool = False) -> Iterator[WriteAt]:
        # What goes to a disk here is read from RAM as long as it is there.
        past_cache = pages and not self._in_memory
        if self._kept is None:
            self._keep()
        with self.directory() as below, self.file(below, WRITE) as fd:
            yield writer(fd, past_cache=past_cache)

    @contextlib.contextmanager
    def open(self) -> Iterator[FsOpenBlock]:
        with open_below(self._root, self._place) as below:
            fd = os.open(self.name, READ, dir_fd=below)
            try:
                file_bytes = checked_regular(fd, self.name).st_size
                yield FsOpenBlock(fd, file_bytes, in_memory=self._in_memory)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def directory(self) -> Iterator[int]:
        """Its descriptor."""
        if self._kept is not None:
            yield self._kept[0]
            return
        with open_below(self._root, self._place) as below:
            yield below

    @contextlib.contextmanager
    def file(self, below: int, flags: int) -> Iterator[int]:
        """Its descriptor, with at least these flags; `below` is what `directory` gives."""
        if self._kept is not None:
            yield self._kept[1]
            return
        fd = os.open(self.name, flags, dir_fd=below)
        try:
            checked_regular(fd, self.name)
            yield fd
        finally:
            os.close(fd)

    def let_go(self) -> None:
        """Closes what is kept open."""
        kept, self._kept = self._kept, None
        for fd in kept or ():
            os.close(fd)

    def _keep(self) -> None:
        below = walk_below(self._root, self._place)
        try:
            fd = os.open(self.name, WRITE, dir_fd=below)
            try:
                checked_regular(fd, self.name)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            os.close(below)
            raise
        self._kept = below, fd
