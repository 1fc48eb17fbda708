"""A directory that several sidecars use, typically on NFS. No lock, no server, no state but files.

Besides what FsTier keeps in a directory:

    <directory>/.sidecar-<owner>    generation and claimed bytes; the mtime is a heartbeat
    <key>.<owner>-<random>.tmp      a block while it is being written, and by whom

A block's mtime is the time at which any sidecar last used it, by the clock of the file server.
Temporary files of others are left alone unless they are older than any write may take. What this
needs of NFS is in docs/design.md, "The remote tier". Calls may block for ever: see RemoteTier.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import Neighbour, StoredBlock, TempBlock, TierKind, WriteAt
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.files import READ, WRITE, FsTempBlock
from ollama_tiering.store.tiers.names import ANNOUNCEMENT_PREFIX, TMP_SUFFIX, file_name, shard
from ollama_tiering.store.tiers.other_bytes import physical_bytes
from ollama_tiering.system.deadline import InUse
from ollama_tiering.system.directories import open_below
from ollama_tiering.system.files import write_all
from ollama_tiering.system.filesystems import filesystem_type, is_network
from ollama_tiering.system.lacking import allocate, make_read_only, sync

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

UNFINISHED_SECONDS: Final = 3600.0  # an older temporary file is nobody's
DEAD_SECONDS: Final = 900.0  # after this time without a heartbeat, a sidecar counts as gone
FORGET_SECONDS: Final = 86400.0  # then its announcement is removed

_MAX_ANNOUNCEMENT_BYTES: Final = 4096
_MAX_NEIGHBOURS: Final = 1024


class HeldTempBlock(FsTempBlock):
    """Keeps its file open until it is published, because NFS writes back and
    waits at every close.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        namespace: NamespaceId,
        key: BlockKey,
        file_bytes: int,
        fd: int,
    ) -> None:
        place = shard(namespace, key)
        super().__init__(root, place, name, namespace, key, file_bytes, 0, in_memory=False)
        self.path = None
        self.fd = fd
        self.in_use = InUse(lambda: os.close(fd))

    def write_at(self, offset: int, data: Buffer) -> None:
        with self.in_use:
            write_all(self.fd, offset, data)

    @contextlib.contextmanager
    def writer(self, *, pages: bool = False) -> Iterator[WriteAt]:
        yield self.write_at


class SharedFsTier(FsTier):
    """The directory must exist: if its file system were not mounted, a new directory of the same
    name would be filled on the disk below. `unfinished_seconds` and `dead_seconds` count by the
    file server's clock.
    """

    announces = True

    def __init__(
        self,
        directory: Path,
        *,
        unfinished_seconds: float = UNFINISHED_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
    ) -> None:
        directory.stat()  # FileNotFoundError
        self._owner = secrets.token_hex(8)
        super().__init__(TierKind.REMOTE, directory, exclusive=False)
        self.growth_bytes = 0  # directories are foreign bytes, counted by the scan
        self.stalled = 0
        self.foreign_bytes = 0
        self._filesystem = filesystem_type(directory)
        self.caches_names = is_network(self._filesystem)
        self._unfinished_seconds = unfinished_seconds
        self._dead_seconds = dead_seconds
        self._now = 0.0  # of the file server, at the last announcement
        self._counting = 0
        self._seen_bad: set[tuple[NamespaceId, str]] = set()

    # --- blocks --------------------------------------------------------------------------------

    def scan(self) -> Iterator[StoredBlock]:
        self._counting = 0
        self._seen_bad = set()
        if not self._now:
            self._now = self._touched(self._announcement(self._owner))
        known_bad = set(self._bad)
        yield from super().scan()
        for gone in known_bad - self._seen_bad:  # purged by another sidecar
            self._bad.pop(gone, None)
        self.foreign_bytes = self._counting

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> FsTempBlock:
        name = f"{key.hex()}.{self._owner}-{secrets.token_hex(4)}{TMP_SUFFIX}"
        with open_below(self.directory, shard(namespace, key), create=True) as below:
            fd = os.open(name, WRITE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=below)
            try:
                allocate(fd, file_bytes)
            except OSError:
                os.close(fd)
                os.unlink(name, dir_fd=below)
                raise
        return HeldTempBlock(self.directory, name, namespace, key, file_bytes, fd)

    def seal(self, temp: TempBlock) -> None:
        """Left to `publish`: NFS writes back and waits at every sync."""

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        assert isinstance(temp, HeldTempBlock)
        with temp.in_use:
            make_read_only(temp.fd)
            sync(temp.fd)
            stored_bytes = physical_bytes(os.fstat(temp.fd))
        temp.in_use.close()
        with open_below(self.directory, shard(temp.namespace, temp.key)) as below:
            os.rename(temp.name, file_name(temp.key), src_dir_fd=below, dst_dir_fd=below)
            sync(below)
        return stored_bytes

    def overhead_bytes(self) -> int:
        return self.quarantined_bytes()

    def measure_overhead(self) -> None:
        """Left to the scan."""

    def discard(self, temp: TempBlock) -> None:
        assert isinstance(temp, HeldTempBlock)
        temp.in_use.close()
        super().discard(temp)

    def path(self, namespace: NamespaceId, key: BlockKey) -> str | None:
        return None

    def touch(self, namespace: NamespaceId, key: BlockKey) -> None:
        with open_below(self.directory, shard(namespace, key)) as below:
            # No time given: the server's own clock, the same for all.
            os.utime(file_name(key), None, dir_fd=below, follow_symlinks=False)

    def _unfinished(
        self, namespace: NamespaceId, key: BlockKey, name: str, info: os.stat_result
    ) -> None:
        # Our own, too: nothing is written during a scan, so it is what a failed write left.
        if self._now - info.st_mtime > self._unfinished_seconds:
            super()._unfinished(namespace, key, name, info)
        else:
            self._counting += physical_bytes(info)

    def _not_ours(self, place: tuple[str, ...], stored_bytes: int) -> None:
        self._counting += stored_bytes

    def _damaged(self, namespace: NamespaceId, name: str) -> None:
        self._seen_bad.add((namespace, name))

    def _foreign(self, entry: os.DirEntry[str]) -> None:
        """`.nfs…` is a file that was removed while somebody reads it. Its bytes are still used."""
        with contextlib.suppress(OSError):
            self._counting += physical_bytes(entry.stat(follow_symlinks=False))

    # --- neighbours ----------------------------------------------------------------------------

    def probe(self) -> None:
        self._require_mount()
        # Its own file's attributes may come from the client's cache; a change may not.
        self._now = self._touched(self._announcement(self._owner))

    def announce(self, generation: int, claim_bytes: int) -> float:
        self._require_mount()
        path = self._announcement(self._owner)
        temporary = path.with_name(f"{path.name}{TMP_SUFFIX}")
        text = json.dumps({"generation": generation, "claim_bytes": claim_bytes})
        flags = WRITE | os.O_CREAT | os.O_TRUNC
        fd = os.open(temporary, flags, 0o600)
        try:
            os.write(fd, text.encode())
            sync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
        self._now = self._touched(path)
        return self._now

    def neighbours(self) -> list[Neighbour]:
        found = []
        with os.scandir(self.directory) as entries:
            names = [e.name for e in entries if e.name.startswith(ANNOUNCEMENT_PREFIX)]
        for name in names[:_MAX_NEIGHBOURS]:
            owner = name[len(ANNOUNCEMENT_PREFIX) :]
            if owner in (self._owner, self._owner + TMP_SUFFIX):
                continue
            neighbour = self._read_announcement(owner)
            if neighbour is not None:
                found.append(neighbour)
        return sorted(found, key=lambda neighbour: neighbour.owner)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._announcement(self._owner).unlink(missing_ok=True)

    def _read_announcement(self, owner: str) -> Neighbour | None:
        path = self._announcement(owner)
        try:
            fd = os.open(path, READ)  # opened, not only stat: NFS asks the server then
        except OSError:
            return None  # gone meanwhile, or nothing to be read
        try:
            info = os.fstat(fd)
            age = self._now - info.st_mtime
            if not stat.S_ISREG(info.st_mode) or age > self._dead_seconds:
                if age > FORGET_SECONDS:
                    path.unlink(missing_ok=True)
                return None
            text = os.pread(fd, _MAX_ANNOUNCEMENT_BYTES, 0)
        finally:
            os.close(fd)
        if owner.endswith(TMP_SUFFIX):
            return None
        if not text:  # it is alive, and has announced nothing yet
            return Neighbour(owner, 0, 0)
        try:
            said = json.loads(text)
            generation, claim_bytes = int(said["generation"]), int(said["claim_bytes"])
        except (ValueError, TypeError, KeyError):
            log.warning("announcement of a neighbour not understood: path=%s", path)
            generation, claim_bytes = -1, 0
        return Neighbour(owner, generation, max(0, claim_bytes))

    def _require_mount(self) -> None:
        """Raises if it is not mounted: the same path is a directory of the disk below."""
        kind = filesystem_type(self.directory)
        if kind != self._filesystem:
            reason = f"{self.directory} is on {kind or 'nothing'} now, not on {self._filesystem}"
            raise OSError(errno.ENODEV, reason)

    def _announcement(self, owner: str) -> Path:
        return self.directory / f"{ANNOUNCEMENT_PREFIX}{owner}"

    @staticmethod
    def _touched(path: Path) -> float:
        """Sets the file's time by the server's clock, and returns it."""
        fd = os.open(path, WRITE | os.O_CREAT, 0o600)
        try:
            os.utime(fd)
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
