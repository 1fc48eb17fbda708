"""A directory as a tier: RAM when it lies on tmpfs, else SSD.

    <directory>/v1/<namespace hex>/<first 2 hex digits of key>/<key hex>.kvb

Written under a temporary name, made durable (not on tmpfs), renamed; then never modified. The
directory is synced at once or, for many blocks, by `sync_names`. `.bad` is a quarantined block,
`.tmp` one that was not finished. Nothing below the directory is followed if it is a link, nothing
but regular files is opened. A directory goes with the last block in it. Thread-safe: there is no
state but physical bytes of quarantined files and of what is no block, and names to be synced.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.store.blockfile import BLOCK_SUFFIX
from ollama_tiering.store.daemon_pool import DaemonPool
from ollama_tiering.store.dirs import (
    entries,
    in_memory,
    lock_file,
    open_below,
    regular_file,
    secure_directory,
    walk_below,
)
from ollama_tiering.store.fs_files import READ, WRITE, FsOpenBlock, FsTempBlock
from ollama_tiering.store.key import BlockKey, NamespaceId, digest_from_hex
from ollama_tiering.store.namespace_text import namespace_text
from ollama_tiering.store.other_bytes import OtherBytes, physical_bytes
from ollama_tiering.store.pagecache import forget
from ollama_tiering.store.speed import PROBE_PREFIX
from ollama_tiering.store.tier import StoredBlock, TempBlock, TierKind

log = logging.getLogger(__name__)

VERSION_DIRECTORY: Final = "v1"
BAD_SUFFIX: Final = ".bad"  # a damaged block, kept for a person to look at
TMP_SUFFIX: Final = ".tmp"  # a block while it is being written
LOCK_NAME: Final = ".lock"
DESCRIPTION_NAME: Final = "namespace.json"

_GROWTH_BLOCKS: Final = 5  # three directories, one of them new, and one for the file's own extents
_LARGEST_BLOCK_BYTES: Final = 128 << 10  # NFS names its transfer size instead
_SYNCS_AT_ONCE: Final = 4
_TRIES: Final = 4  # another thread may remove a directory that was just found
_SHARD: Final = re.compile(r"[0-9a-f]{2}")
_TOP: Final = ("",)  # place of the files beside the version directory


class FsTier:
    """One directory. `exclusive` refuses a second user of it on this host (ServiceError)."""

    shared = False

    def __init__(self, kind: TierKind, directory: Path, *, exclusive: bool = True) -> None:
        self.kind = kind
        self.directory = secure_directory(directory)
        self._root = directory / VERSION_DIRECTORY
        self.in_memory = in_memory(directory)
        self._bad: dict[tuple[NamespaceId, str], int] = {}  # oldest first -> physical bytes
        self._other = OtherBytes()
        # Directories with names that are not durable yet; a number that changes with every name.
        self._unsynced: dict[tuple[str, ...], int] = {}
        self._names = itertools.count()
        self._syncing = DaemonPool(_SYNCS_AT_ONCE, "sync")
        block_bytes = min(os.statvfs(directory).f_frsize, _LARGEST_BLOCK_BYTES)
        self.growth_bytes = 0 if self.in_memory else _GROWTH_BLOCKS * block_bytes
        self._exclusive = exclusive
        self._lock = lock_file(directory / LOCK_NAME, f"{directory}") if exclusive else -1
        try:
            secure_directory(directory / VERSION_DIRECTORY)
        except BaseException:
            self.close()
            raise

    def scan(self) -> Iterator[StoredBlock]:
        for entry in entries(self.directory):
            if entry.name.startswith(PROBE_PREFIX) and entry.is_file(follow_symlinks=False):
                Path(entry.path).unlink(missing_ok=True)
        self.measure_overhead()
        self._note((VERSION_DIRECTORY,), self._root)
        for namespace_entry in entries(self.directory / VERSION_DIRECTORY):
            namespace = digest_from_hex(namespace_entry.name)
            if namespace is None or not namespace_entry.is_dir(follow_symlinks=False):
                continue
            place = (VERSION_DIRECTORY, namespace_entry.name)
            self._note(place, Path(namespace_entry.path))
            self._note((*place, DESCRIPTION_NAME), Path(namespace_entry.path) / DESCRIPTION_NAME)
            for shard_entry in entries(Path(namespace_entry.path)):
                if shard_entry.is_dir(follow_symlinks=False):
                    self._note((*place, shard_entry.name), Path(shard_entry.path))
                    yield from self._scan_shard(NamespaceId(namespace), shard_entry)
                    if self._exclusive and _SHARD.fullmatch(shard_entry.name):
                        self._remove_directory(*place, shard_entry.name)
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
        below = walk_below(self.directory, place, create=True, made=self._to_sync)
        try:
            fd = os.open(name, WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=below)
            try:
                # Real space, not a hole: a client that fills the file through a mapping would be
                # killed by SIGBUS where the file system has no page left for it.
                os.posix_fallocate(fd, 0, file_bytes)
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
            os.fchmod(fd, 0o400)
            if not self.in_memory:
                os.fsync(fd)
                forget(fd)  # who reads it soon reads it in RAM
            temp.stored_bytes = physical_bytes(os.fstat(fd))

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        assert isinstance(temp, FsTempBlock)
        place = shard(temp.namespace, temp.key)
        with temp.directory() as below:
            if not temp.stored_bytes:
                self._seal(temp, below)
            os.rename(temp.name, file_name(temp.key), src_dir_fd=below, dst_dir_fd=below)
            if not self.in_memory and durable:
                os.fsync(below)
        temp.let_go()
        if durable:
            self._sync([place[:length] for length in range(len(place))])
        else:
            self._to_sync(place)
        return temp.stored_bytes

    def sync_names(self) -> None:
        self._sync(list(self._unsynced))

    def _to_sync(self, place: tuple[str, ...]) -> None:
        """A name in it is new, and not durable yet."""
        if not self.in_memory:
            self._unsynced[place] = next(self._names)

    def _sync(self, places: Sequence[tuple[str, ...]]) -> None:
        """Those of them that need it. Several at once: one commit of a journal does for all."""
        wanted = [place for place in places if place in self._unsynced]
        if len(wanted) == 1:
            self._sync_directory(wanted[0])
        elif wanted:
            for done in [self._syncing.submit(self._sync_directory, place) for place in wanted]:
                done.result()

    def _sync_directory(self, place: tuple[str, ...]) -> None:
        before = self._unsynced.get(place)
        with contextlib.suppress(FileNotFoundError), open_below(self.directory, place) as below:
            os.fsync(below)
        if self._unsynced.get(place) == before:  # else a name came meanwhile, and needs another one
            self._unsynced.pop(place, None)

    def discard(self, temp: TempBlock) -> None:
        assert isinstance(temp, FsTempBlock)
        temp.let_go()
        self._unlink(temp.namespace, temp.key, temp.name)

    @contextlib.contextmanager
    def open(self, namespace: NamespaceId, key: BlockKey) -> Iterator[FsOpenBlock]:
        with self.opened(namespace, key, file_name(key), READ) as (fd, info):
            try:
                yield FsOpenBlock(fd, info.st_size, in_memory=self.in_memory)
            finally:
                if not self.in_memory:
                    # What is read here is needed once; the page cache is for what is used again.
                    forget(fd)

    def exists(self, namespace: NamespaceId, key: BlockKey) -> bool:
        try:
            info = os.lstat(self._block_path(namespace, key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(info.st_mode)

    def path(self, namespace: NamespaceId, key: BlockKey) -> Path | None:
        return Path(self._block_path(namespace, key))

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        self._unlink(namespace, key, file_name(key))

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        name = file_name(key)
        with open_below(self.directory, shard(namespace, key)) as below:
            info = os.stat(name, dir_fd=below, follow_symlinks=False)
            os.rename(name, name + BAD_SUFFIX, src_dir_fd=below, dst_dir_fd=below)
        self._bad[namespace, name + BAD_SUFFIX] = physical_bytes(info)

    def quarantined_bytes(self) -> int:
        return sum(tuple(self._bad.values()))  # a copy: a scan may go on in another thread

    def overhead_bytes(self) -> int:
        return self.quarantined_bytes() + self._other.total

    def measure_overhead(self) -> None:
        total = physical_bytes(self.directory.stat())
        for entry in entries(self.directory):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    total += physical_bytes(entry.stat(follow_symlinks=False))
        self._other.note(_TOP, total)

    def purge_quarantine(self, keep_blocks: int) -> None:
        for namespace, name in list(self._bad)[: max(0, len(self._bad) - keep_blocks)]:
            self._unlink(namespace, BlockKey(bytes.fromhex(name[:64])), name)
            self._bad.pop((namespace, name), None)

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        parts = (VERSION_DIRECTORY, namespace.hex())
        text = namespace_text(fields)
        with open_below(self.directory, parts, create=True) as below:
            name = f".{secrets.token_hex(4)}{TMP_SUFFIX}"
            try:
                os.stat(DESCRIPTION_NAME, dir_fd=below, follow_symlinks=False)
            except FileNotFoundError:
                fd = os.open(name, WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=below)
                with os.fdopen(fd, "wb") as file:
                    file.write(text)
                os.rename(name, DESCRIPTION_NAME, src_dir_fd=below, dst_dir_fd=below)
                self._note(parts[:1], self._root)
                self._note(parts, self._root / parts[1])
                self._note((*parts, DESCRIPTION_NAME), self._root / parts[1] / DESCRIPTION_NAME)

    def remove_vacant(self, namespace: NamespaceId) -> None:
        """The directories and description of a namespace; if there is anything else, they stay."""
        place = (VERSION_DIRECTORY, namespace.hex())
        for entry in entries(self.directory.joinpath(*place)):
            if entry.is_dir(follow_symlinks=False):
                self._remove_directory(*place, entry.name)
        self._remove_namespace(place)

    def settle(self, namespace: NamespaceId, key: BlockKey) -> None:
        if self.in_memory:
            return
        with self.opened(namespace, key, file_name(key), READ) as (fd, _):
            forget(fd)

    def close(self) -> None:
        self._syncing.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def opened(
        self, namespace: NamespaceId, key: BlockKey, name: str, flags: int
    ) -> Iterator[tuple[int, os.stat_result]]:
        with (
            open_below(self.directory, shard(namespace, key)) as below,
            regular_file(name, flags, below) as opened,
        ):
            yield opened

    def _block_path(self, namespace: NamespaceId, key: BlockKey) -> str:
        name = key.hex()
        return f"{self._root}/{namespace.hex()}/{name[:2]}/{name}{BLOCK_SUFFIX}"

    def _unlink(self, namespace: NamespaceId, key: BlockKey, name: str) -> None:
        place = shard(namespace, key)
        with (
            contextlib.suppress(FileNotFoundError),
            open_below(self.directory, place) as below,
        ):
            os.unlink(name, dir_fd=below)
        if self.growth_bytes and self._exclusive:  # what others share keeps its directories
            self._remove_directory(*place)

    def _remove_directory(self, *place: str) -> None:
        """If it is empty. Its bytes are looked up again where another thread made it anew."""
        with contextlib.suppress(OSError):
            with open_below(self.directory, place[:-1]) as above:
                os.rmdir(place[-1], dir_fd=above)
            self._other.forget(place)
            self._note(place, self.directory.joinpath(*place))

    def _remove_namespace(self, place: tuple[str, ...]) -> None:
        """What is left of a model that has no block any more."""
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

    def _scan_shard(
        self, namespace: NamespaceId, directory: os.DirEntry[str]
    ) -> Iterator[StoredBlock]:
        for entry in entries(Path(directory.path)):
            key = digest_from_hex(entry.name[:64])
            rest = entry.name[64:]
            if key is None or entry.name[:2] != directory.name:
                self._foreign(entry)
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(info.st_mode):
                log.warning("not a regular file, ignored: path=%s", entry.path)
            elif rest == BLOCK_SUFFIX:
                stored_bytes = physical_bytes(info)
                yield StoredBlock(
                    namespace, BlockKey(key), info.st_size, stored_bytes, info.st_mtime
                )
            elif rest == BLOCK_SUFFIX + BAD_SUFFIX:
                self._bad[namespace, entry.name] = physical_bytes(info)
                self._damaged(namespace, entry.name)
            elif rest.endswith(TMP_SUFFIX):
                self._unfinished(namespace, BlockKey(key), entry.name, info)

    def _unfinished(
        self, namespace: NamespaceId, key: BlockKey, name: str, info: os.stat_result
    ) -> None:
        """What an interrupted write left behind."""
        self._unlink(namespace, key, name)
        log.info("unfinished write removed: key=%s name=%s", key.hex(), name)

    def _damaged(self, namespace: NamespaceId, name: str) -> None:
        """A quarantined block is there."""

    def _foreign(self, entry: os.DirEntry[str]) -> None:
        """A file among the blocks that is none of ours: left alone."""


def file_name(key: BlockKey) -> str:
    return key.hex() + BLOCK_SUFFIX


def shard(namespace: NamespaceId, key: BlockKey) -> tuple[str, str, str]:
    return VERSION_DIRECTORY, namespace.hex(), key.hex()[:2]
