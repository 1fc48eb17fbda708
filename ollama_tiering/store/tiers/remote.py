"""A shared tier with deadlines: whatever hangs below it, every call to it ends in time.

It wraps any SharedTier. Each call runs in one of a few threads (DeadlineThreads). A call that does
not return is a TimeoutError, which is an OSError, that is, weather. No call is made before it is
needed, not even to open the directory, so that a mount that hangs does not delay a start. If MACs
are in use, what is read is checked (authenticity.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.block.segments import ALIGNMENT
from ollama_tiering.store.tiers.authenticity import Authenticity, ToAuthenticate
from ollama_tiering.store.tiers.contract import (
    Neighbour,
    OpenBlock,
    SharedTier,
    StoredBlock,
    TempBlock,
    TierKind,
    WriteAt,
)
from ollama_tiering.store.tiers.kinds import TierOfKind
from ollama_tiering.system.deadline import DeadlineThreads, InUse
from ollama_tiering.system.directories import UnsafeDirectory

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_THREADS: Final = 8
_SCAN_ENTRIES: Final = 128  # per call


class RemoteOpenBlock:
    def __init__(self, threads: DeadlineThreads, block: OpenBlock, in_use: InUse) -> None:
        self.file_bytes = block.file_bytes
        self._threads = threads
        self._block = block
        self._in_use = in_use

    def read_at(self, offset: int, length: int) -> bytes:
        """FileNotFoundError also if another host removed the file during the read."""

        def read() -> bytes:
            with self._in_use:
                return self._block.read_at(offset, length)

        try:
            return self._threads.call(read)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise FileNotFoundError(errno.ENOENT, "removed by another sidecar") from error
            raise

    def read_into(self, offset: int, buffer: memoryview) -> None:
        # By way of memory of its own: a read that is given up may still write there, any time.
        buffer[:] = self.read_at(offset, buffer.nbytes)

    def resident(self) -> bool | None:
        return None  # not asked: the pages are dropped after every transfer (drop_pages)


class RemoteTempBlock:
    path: Path | None = None  # no client may open it
    grown_bytes = 0

    def __init__(self, threads: DeadlineThreads, temp: TempBlock, file_bytes: int) -> None:
        self.namespace = temp.namespace
        self.key = temp.key
        self.file_bytes = file_bytes
        self.temp = temp
        self.hangs = False
        self._threads = threads
        # Its MAC needs all bytes in order, and writers keep no order.
        self._waiting = ToAuthenticate(file_bytes) if file_bytes != temp.file_bytes else None

    def write_at(self, offset: int, data: Buffer) -> None:
        if self._waiting is not None:
            self._waiting.write_at(offset, data)
        else:
            self._write_through(offset, data)

    def complete(self, authenticity: Authenticity) -> None:
        """Writes what still waits, and the trailer."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.write_to(self._write_through, authenticity)

    def _write_through(self, offset: int, data: Buffer) -> None:
        try:
            self._threads.call(lambda: self.temp.write_at(offset, data))
        except TimeoutError:
            self.hangs = True
            raise

    @contextlib.contextmanager
    def writer(self, *, pages: bool = False) -> Iterator[WriteAt]:
        yield self.write_at

    @contextlib.contextmanager
    def open(self) -> Iterator[RemoteOpenBlock]:
        with _opened(self._threads, self.temp.open) as block:
            yield block


class RemoteTier(TierOfKind):
    """`open_inner` makes the wrapped tier. It is called in a thread, and again
    until it succeeds.
    """

    announces = True
    in_memory = False

    def __init__(
        self,
        directory: Path | None,
        open_inner: Callable[[], SharedTier],
        *,
        deadline_seconds: float,
        max_threads: int = MAX_THREADS,
        authenticity: Authenticity | None = None,
    ) -> None:
        super().__init__(TierKind.REMOTE)
        self.directory = directory
        self.deadline_seconds = deadline_seconds
        self._authenticity = authenticity or Authenticity(None)
        # Directories are counted by the scan; a MAC takes a page more than the block.
        self.growth_bytes = ALIGNMENT if self._authenticity.required else 0
        self._open_inner = open_inner
        self._inner: SharedTier | None = None
        # Calls that have not returned; a retry may end while the call before it still hangs.
        self._leaving: Counter[tuple[NamespaceId, BlockKey]] = Counter()
        self._noting = threading.Lock()
        self._threads = DeadlineThreads(
            "remote-tier", limit=max_threads, deadline_seconds=deadline_seconds
        )

    # --- what needs no call --------------------------------------------------------------------

    @property
    def stalled(self) -> int:
        return self._threads.stalled

    @property
    def foreign_bytes(self) -> int:
        return self._inner.foreign_bytes if self._inner else 0

    @property
    def caches_names(self) -> bool:
        return self._inner is None or self._inner.caches_names

    def path(self, namespace: NamespaceId, key: BlockKey) -> str | None:
        return None

    @property
    def refused_files(self) -> int:
        return self._inner.refused_files if self._inner else 0

    def quarantined_bytes(self) -> int:
        return self._inner.quarantined_bytes() if self._inner else 0

    def overhead_bytes(self) -> int:
        return self.quarantined_bytes()

    def measure_overhead(self) -> None:
        """Left to the scan: here it could hang."""

    # --- calls ---------------------------------------------------------------------------------

    def scan(self) -> Iterator[StoredBlock]:
        found = self._call(lambda tier: tier.scan())
        while part := self._threads.call(lambda: list(islice(found, _SCAN_ENTRIES))):
            for stored in part:
                yield self._authenticity.seen(stored)

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> RemoteTempBlock:
        def discard(temp: TempBlock | None) -> None:
            if temp is not None and self._inner is not None:
                self._inner.discard(temp)

        on_disk_bytes = file_bytes + self._authenticity.trailer_bytes
        temp = self._call(lambda tier: tier.create(namespace, key, on_disk_bytes), late=discard)
        return RemoteTempBlock(self._threads, temp, file_bytes)

    def seal(self, temp: TempBlock) -> None:
        """Left to `publish`."""

    def sync_names(self) -> None:
        """A name is durable once `publish` has returned."""

    def sync_removals(self) -> None:
        """Left to the file server."""

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        """After a TimeoutError the block may still become visible; the next scan then finds it."""
        assert isinstance(temp, RemoteTempBlock)
        with self._noting:
            leaving = self._leaving[temp.namespace, temp.key]  # reading makes no entry
        if leaving:
            raise TimeoutError(errno.ETIMEDOUT, "a call hangs that would take the new file away")
        temp.complete(self._authenticity)
        try:
            return self._call(lambda tier: tier.publish(temp.temp))
        except TimeoutError:
            temp.hangs = True
            raise

    def discard(self, temp: TempBlock) -> None:
        assert isinstance(temp, RemoteTempBlock)
        if temp.hangs:  # no second wait for the same file
            self._threads.submit(lambda: self._opened().discard(temp.temp))
        else:
            self._call(lambda tier: tier.discard(temp.temp))

    @contextlib.contextmanager
    def open(self, namespace: NamespaceId, key: BlockKey) -> Iterator[OpenBlock]:
        """What is read is authentic; otherwise reading raises NotAuthentic."""
        with _opened(self._threads, lambda: self._opened().open(namespace, key)) as block:
            yield self._authenticity.opened(block)

    @contextlib.contextmanager
    def peek(self, namespace: NamespaceId, key: BlockKey) -> Iterator[OpenBlock]:
        with _opened(self._threads, lambda: self._opened().open(namespace, key)) as block:
            yield self._authenticity.peeked(block)

    def exists(self, namespace: NamespaceId, key: BlockKey, file_bytes: int | None = None) -> bool:
        if file_bytes is not None:
            file_bytes += self._authenticity.trailer_bytes
        return self._call(lambda tier: tier.exists(namespace, key, file_bytes))

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        self._take_away(namespace, key, lambda tier: tier.remove(namespace, key))

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        self._take_away(namespace, key, lambda tier: tier.quarantine(namespace, key))

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        self._call(lambda tier: tier.remove_quarantined(namespace, key))

    def purge_quarantine(self, keep_blocks: int) -> None:
        self._call(lambda tier: tier.purge_quarantine(keep_blocks))

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        self._call(lambda tier: tier.describe(namespace, fields))

    def drop_pages(self, namespace: NamespaceId, key: BlockKey) -> None:
        self._call(lambda tier: tier.drop_pages(namespace, key))

    def probe(self) -> None:
        self._call(lambda tier: tier.probe())

    def announce(self, generation: int, claim_bytes: int) -> float:
        return self._call(lambda tier: tier.announce(generation, claim_bytes))

    def neighbours(self) -> list[Neighbour]:
        return self._call(lambda tier: tier.neighbours())

    def touch(self, namespace: NamespaceId, key: BlockKey) -> None:
        self._call(lambda tier: tier.touch(namespace, key))

    def close(self) -> None:
        """Does not wait for calls that hang. Every later call fails at once."""
        inner = self._inner
        if inner is not None and not self.stalled:
            with contextlib.suppress(OSError):
                self._threads.call(inner.close)
        self._threads.close()

    def _call(
        self, work: Callable[[SharedTier], T], *, late: Callable[[T | None], None] | None = None
    ) -> T:
        return self._threads.call(lambda: work(self._opened()), late=late)

    def _take_away(
        self, namespace: NamespaceId, key: BlockKey, work: Callable[[SharedTier], None]
    ) -> None:
        """Notes the name for as long as the call lasts, past its deadline too."""

        def noted(tier: SharedTier) -> None:
            with self._noting:
                self._leaving[namespace, key] += 1
            try:
                work(tier)
            finally:
                with self._noting:
                    self._leaving[namespace, key] -= 1
                    if not self._leaving[namespace, key]:
                        del self._leaving[namespace, key]

        self._call(noted)

    def _opened(self) -> SharedTier:
        """Runs in a thread. If two calls open it at once, the first result stays."""
        if self._inner is None:
            try:
                opened = self._open_inner()
            except UnsafeDirectory as error:
                cure = f" ({error.hint})" if error.hint else ""
                raise PermissionError(errno.EACCES, f"{error.message}{cure}") from None
            if self._inner is None:
                self._inner = opened
            else:
                opened.close()
        return self._inner


@contextlib.contextmanager
def _opened(
    threads: DeadlineThreads,
    enter: Callable[[], contextlib.AbstractContextManager[OpenBlock]],
) -> Iterator[RemoteOpenBlock]:
    def begin() -> tuple[OpenBlock, ExitStack]:
        stack = ExitStack()
        return stack.enter_context(enter()), stack

    def too_late(opened: tuple[OpenBlock, ExitStack] | None) -> None:
        if opened is not None:
            opened[1].close()

    try:
        block, stack = threads.call(begin, late=too_late)
    except OSError as error:
        if error.errno == errno.ESTALE:  # what the client knew of it was old
            raise FileNotFoundError(errno.ENOENT, "removed by another sidecar") from error
        raise
    in_use = InUse(stack.close)
    try:
        yield RemoteOpenBlock(threads, block, in_use)
    finally:
        threads.submit(in_use.close)
