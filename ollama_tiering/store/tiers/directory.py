"""A directory as a tier: RAM if it lies on tmpfs, else a disk.

    <directory>/v1/<namespace hex>/<first 2 hex digits of key>/<key hex>.kvb

A block is written under a temporary name, made durable (not on tmpfs), renamed, and then never
modified. Its directory is synced at once or, for many blocks, by `sync_names`. `.bad` is a
quarantined block, `.tmp` an unfinished one. Below the directory no link is followed, and only
regular files are opened. A directory is removed with its last block. Thread-safe: the only state is
the physical bytes of quarantined files and of what is no block, and the names to be synced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.store.block.description import namespace_text
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import OpenBlock, StoredBlock, TempBlock, TierKind
from ollama_tiering.store.tiers.description_file import write_description
from ollama_tiering.store.tiers.files import READ, WRITE, FsOpenBlock, FsTempBlock
from ollama_tiering.store.tiers.kinds import TierOfKind
from ollama_tiering.store.tiers.lacks import say_lacks
from ollama_tiering.store.tiers.names import (
    BAD_SUFFIX,
    BLOCK_SUFFIX,
    DESCRIPTION_NAME,
    LOCK_NAME,
    PROBE_PREFIX,
    TMP_SUFFIX,
    VERSION_DIRECTORY,
    file_name,
    shard,
)
from ollama_tiering.store.tiers.other_bytes import OtherBytes, files_bytes, physical_bytes
from ollama_tiering.store.tiers.unsynced import UnsyncedNames
from ollama_tiering.store.tiers.walk import Inside, What, files, inside, namespaces
from ollama_tiering.system.directories import (
    entries,
    open_below,
    own_directory,
    regular_file,
    secure_directory,
    walk_below,
)
from ollama_tiering.system.filesystems import in_memory
from ollama_tiering.system.lacking import allocate, make_read_only, sync
from ollama_tiering.system.locks import lock_file
from ollama_tiering.system.ownership import Refused
from ollama_tiering.system.pagecache import forget

log = logging.getLogger(__name__)

_GROWTH_BLOCKS: Final = 5  # three directories, one of them new, and one for the file's own extents
_LARGEST_BLOCK_BYTES: Final = 128 << 10  # NFS names its transfer size instead
_TRIES: Final = 4  # another thread may remove a directory that was just found
_TOP: Final = ("",)  # place of the files beside the version directory


class FsTier(TierOfKind):
    """One directory. With `exclusive`, a second user of it on this host gets a ServiceError."""

    changes = True  # whether opening it may write there

    def __init__(self, kind: TierKind, directory: Path, *, exclusive: bool = True) -> None:
        super().__init__(kind)
        self.directory = secure_directory(directory)
        self._root = directory / VERSION_DIRECTORY
        self.in_memory = in_memory(directory)
        self._bad: dict[tuple[NamespaceId, str], int] = {}  # oldest first -> physical bytes
        self._other = OtherBytes()
        self.refused = Refused(kind.label)
        self._names = UnsyncedNames(directory, in_memory=self.in_memory)
        block_bytes = min(os.statvfs(directory).f_frsize, _LARGEST_BLOCK_BYTES)
        self.growth_bytes = 0 if self.in_memory else _GROWTH_BLOCKS * block_bytes
        self._exclusive = exclusive
        self._lock = lock_file(directory / LOCK_NAME, f"{directory}") if exclusive else -1
        try:
            say_lacks(directory, kind.label, changes=self.changes)
            secure_directory(directory / VERSION_DIRECTORY)
        except BaseException:
            self.close()
            raise

    @property
    def refused_files(self) -> int:
        return len(self.refused)

    def scan(self) -> Iterator[StoredBlock]:
        for entry in entries(self.directory):
            unfinished = self._exclusive and entry.name.endswith(TMP_SUFFIX)
            needless = unfinished or entry.name.startswith(PROBE_PREFIX)
            if needless and _is_file(entry):
                Path(entry.path).unlink(missing_ok=True)
        self.measure_overhead()
        self._found((VERSION_DIRECTORY,))
        for namespace, directory in namespaces(self.directory):
            if namespace is None or not self._trusted(directory):
                continue
            place = (VERSION_DIRECTORY, directory.name)
            self._found(place)
            self._note((*place, DESCRIPTION_NAME), Path(directory.path) / DESCRIPTION_NAME)
            for what, entry in inside(directory):
                if self._trusted(entry):
                    self._found((*place, entry.name))
                    yield from self._scan_shard(namespace, entry)
                    if self._exclusive and what is Inside.BLOCKS:
                        self._remove_directory(*place, entry.name)
                elif what is Inside.TEMPORARY and self._exclusive and _is_file(entry):
                    Path(entry.path).unlink(missing_ok=True)
            if self._exclusive:
                self._remove_namespace(place)

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> FsTempBlock:
        name = f"{key.hex()}.{secrets.token_hex(4)}{TMP_SUFFIX}"
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._create(namespace, key, name, file_bytes)
            except FileNotFoundError:
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    def _create(
        self, namespace: NamespaceId, key: BlockKey, name: str, file_bytes: int
    ) -> FsTempBlock:
        place, grown = shard(namespace, key), 0
        below = walk_below(self.directory, place, create=True, made=self._names.added)
        try:
            fd = os.open(name, WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=below)
            try:
                # Real space, not a hole: a client that fills the file through a mapping would be
                # killed by SIGBUS where the file system has no page left for it.
                allocate(fd, file_bytes)
            except OSError:
                os.unlink(name, dir_fd=below)
                raise
            finally:
                os.close(fd)
                if place not in self._other:
                    grown += self._note(place[:1], self._root)
                    grown += self._note(place[:2], self._root / place[1])
                grown += self._other.note(place, physical_bytes(os.fstat(below)))
        finally:
            os.close(below)
        return FsTempBlock(
            self.directory,
            place,
            name,
            namespace,
            key,
            file_bytes,
            grown,
            in_memory=self.in_memory,
        )

    def seal(self, temp: TempBlock) -> None:
        assert isinstance(temp, FsTempBlock)
        with temp.directory() as below:
            self._seal(temp, below)

    def _seal(self, temp: FsTempBlock, below: int) -> None:
        with temp.file(below, READ) as fd:
            make_read_only(fd)
            if not self.in_memory:
                sync(fd)
                forget(fd)  # a reader in the near future reads it from RAM
            temp.stored_bytes = physical_bytes(os.fstat(fd))

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        assert isinstance(temp, FsTempBlock)
        place = shard(temp.namespace, temp.key)
        with temp.directory() as below:
            if not temp.stored_bytes:
                self._seal(temp, below)
            os.rename(temp.name, file_name(temp.key), src_dir_fd=below, dst_dir_fd=below)
            if not self.in_memory and durable:
                sync(below)
        temp.let_go()
        if durable:
            self._names.sync([place[:length] for length in range(len(place))])
        else:
            self._names.added(place)
        return temp.stored_bytes

    def sync_names(self) -> None:
        self._names.sync()

    def sync_removals(self) -> None:
        self._names.sync_removed()

    def discard(self, temp: TempBlock) -> None:
        assert isinstance(temp, FsTempBlock)
        temp.let_go()
        self._unlink(temp.namespace, temp.key, temp.name)

    @contextlib.contextmanager
    def open(self, namespace: NamespaceId, key: BlockKey) -> Iterator[OpenBlock]:
        with self.opened(namespace, key, file_name(key), READ) as (fd, info):
            try:
                yield FsOpenBlock(fd, info.st_size, in_memory=self.in_memory)
            finally:
                if not self.in_memory:
                    # What is read here is needed once; the page cache is for what is used again.
                    forget(fd)

    peek = open

    def exists(self, namespace: NamespaceId, key: BlockKey, file_bytes: int | None = None) -> bool:
        path = self._block_path(namespace, key)
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if file_bytes is not None and info.st_size != file_bytes:
            return False
        return stat.S_ISREG(info.st_mode) and not self.refused.is_not_ours(path, info)

    def path(self, namespace: NamespaceId, key: BlockKey) -> str | None:
        return self._block_path(namespace, key)

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        self._unlink(namespace, key, file_name(key))

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        name = file_name(key)
        with open_below(self.directory, shard(namespace, key)) as below:
            info = os.stat(name, dir_fd=below, follow_symlinks=False)
            os.rename(name, name + BAD_SUFFIX, src_dir_fd=below, dst_dir_fd=below)
        self._bad[namespace, name + BAD_SUFFIX] = physical_bytes(info)

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        name = file_name(key) + BAD_SUFFIX
        self._unlink(namespace, key, name)
        self._bad.pop((namespace, name), None)

    def quarantined_bytes(self) -> int:
        return sum(tuple(self._bad.values()))  # a copy: a scan may go on in another thread

    def quarantined(self) -> frozenset[NamespaceId]:
        """The namespaces whose quarantined blocks lie here."""
        return frozenset(namespace for namespace, _ in tuple(self._bad))

    def overhead_bytes(self) -> int:
        return self.quarantined_bytes() + self._other.total

    def measure_overhead(self) -> None:
        self._other.note(_TOP, files_bytes(self.directory))

    def purge_quarantine(self, keep_blocks: int) -> None:
        for namespace, name in list(self._bad)[: max(0, len(self._bad) - keep_blocks)]:
            self.remove_quarantined(namespace, BlockKey(bytes.fromhex(name[:64])))

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        parts = (VERSION_DIRECTORY, namespace.hex())
        if write_description(
            self.directory, parts, namespace_text(fields), durable=not self.in_memory
        ):
            self._note(parts[:1], self._root)
            self._note(parts, self._root / parts[1])
            self._note((*parts, DESCRIPTION_NAME), self._root / parts[1] / DESCRIPTION_NAME)

    def remove_vacant(self, namespace: NamespaceId) -> None:
        """Removes directories and description of a namespace, unless there is anything else."""
        place = (VERSION_DIRECTORY, namespace.hex())
        for entry in entries(self.directory.joinpath(*place)):
            if entry.is_dir(follow_symlinks=False):
                self._remove_directory(*place, entry.name)
        self._remove_namespace(place)

    def drop_pages(self, namespace: NamespaceId, key: BlockKey) -> None:
        if self.in_memory:
            return
        with self.opened(namespace, key, file_name(key), READ) as (fd, _):
            forget(fd)

    def close(self) -> None:
        self._names.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def opened(
        self, namespace: NamespaceId, key: BlockKey, name: str, flags: int
    ) -> Iterator[tuple[int, os.stat_result]]:
        with (
            self.refused.noted(self._block_path(namespace, key)),
            open_below(self.directory, shard(namespace, key)) as below,
            regular_file(name, flags, below) as opened,
        ):
            yield opened

    def _block_path(self, namespace: NamespaceId, key: BlockKey) -> str:
        name = key.hex()
        return f"{self._root}/{namespace.hex()}/{name[:2]}/{name}{BLOCK_SUFFIX}"

    def _unlink(self, namespace: NamespaceId, key: BlockKey, name: str) -> None:
        place = shard(namespace, key)
        with contextlib.suppress(FileNotFoundError), open_below(self.directory, place) as below:
            info = os.stat(name, dir_fd=below, follow_symlinks=False)
            if not self.refused.is_not_ours(self._block_path(namespace, key), info):
                os.unlink(name, dir_fd=below)
                self._names.removed(place)
        if self.growth_bytes and self._exclusive:  # what others share keeps its directories
            self._remove_directory(*place)

    def _remove_directory(self, *place: str) -> None:
        """Removes it if empty; measures its bytes again if another thread remade it."""
        with contextlib.suppress(OSError):
            with open_below(self.directory, place[:-1]) as above:
                os.rmdir(place[-1], dir_fd=above)
            self._names.removed(place[:-1])
            self._other.forget(place)
            self._note(place, self.directory.joinpath(*place))

    def _remove_namespace(self, place: tuple[str, ...]) -> None:
        """Removes what is left of a model that has no block any more."""
        names = [entry.name for entry in entries(self.directory.joinpath(*place))]
        if names in ([], [DESCRIPTION_NAME]):
            with contextlib.suppress(OSError):
                with open_below(self.directory, place) as below:
                    for name in names:
                        os.unlink(name, dir_fd=below)
                self._other.forget((*place, DESCRIPTION_NAME))
                self._remove_directory(*place)

    def _note(self, place: tuple[str, ...], path: Path) -> int:
        try:
            return self._other.note(place, physical_bytes(path.lstat()))
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def _found(self, place: tuple[str, ...]) -> None:
        path = self.directory.joinpath(*place)
        self._note(place, path)
        if self._exclusive:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._names.found(place, path.lstat().st_mtime)

    def _scan_shard(
        self, namespace: NamespaceId, directory: os.DirEntry[str]
    ) -> Iterator[StoredBlock]:
        for what, key, entry in files(directory):
            if key is None:
                self._foreign(entry)
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(info.st_mode):
                log.warning("not a regular file, ignored: path=%s", entry.path)
            elif self.refused.is_not_ours(entry.path, info):
                self._not_ours((*shard(namespace, key), entry.name), physical_bytes(info))
            elif what is What.BLOCK:
                stored_bytes = physical_bytes(info)
                yield StoredBlock(namespace, key, info.st_size, stored_bytes, info.st_mtime)
            elif what is What.QUARANTINED:
                self._bad[namespace, entry.name] = physical_bytes(info)
                self._damaged(namespace, entry.name)
            elif what is What.TEMPORARY:
                self._unfinished(namespace, key, entry.name, info)

    def _unfinished(
        self, namespace: NamespaceId, key: BlockKey, name: str, info: os.stat_result
    ) -> None:
        """What an interrupted write left behind."""
        self._unlink(namespace, key, name)
        log.info("unfinished write removed: key=%s name=%s", key.hex(), name)

    def _damaged(self, namespace: NamespaceId, name: str) -> None: ...

    def _not_ours(self, place: tuple[str, ...], stored_bytes: int) -> None:
        """Leaves the file alone, but counts its bytes."""
        self._other.note(place, stored_bytes)

    def _trusted(self, entry: os.DirEntry[str]) -> bool:
        """Whether blocks below a directory may be used: not if somebody else may have put them
        there.
        """
        reason = own_directory(entry)
        if reason and entry.is_dir(follow_symlinks=False):
            self.refused.note(entry.path, reason)
        return not reason

    def _foreign(self, entry: os.DirEntry[str]) -> None:
        """A file among the blocks that is not ours is left alone."""


def _is_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)
