"""What is in loaded files, as far as it is known: asked at any time, computed beside.

No answer waits for a disk: files are looked at and read by a few threads of low priority, which end
with the process. An engine whose file is still being read is told to ask again.
"""

from __future__ import annotations

import logging
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.protocol.loaded_file import FileIdentity, LoadedFile
from ollama_tiering.sidecar.content.hashing import NoFile, OtherFile, Stopped, file_digest
from ollama_tiering.sidecar.content.record import ContentRecord
from ollama_tiering.system.daemon_pool import DaemonPool

log = logging.getLogger(__name__)

MOST_FILES: Final = 4096  # that findings are kept of
MOST_RUNNING: Final = 64  # files that are read, or wait to be; others are asked for again
FRESH_SECONDS: Final = 1.0  # a finding that is older is checked with a look at the file
_THREADS: Final = 2
_END_SECONDS: Final = 1.0

BEING_READ: Final = "its file is being checked"


@dataclass(frozen=True, slots=True)
class Content:
    """The digest, or why there is none; neither: the file is being read."""

    digest: str = ""  # hex of SHA-256
    doubt: str = ""
    passing: bool = False  # the doubt: a later look may know better

    @property
    def settled(self) -> bool:
        return bool(self.digest or self.doubt)


@dataclass(frozen=True, slots=True)
class _Finding:
    content: Content
    looked_at: float
    for_good: bool = False  # nothing that comes can change it


class Contents:
    """Thread-safe."""

    def __init__(
        self, record: ContentRecord | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record = record or ContentRecord()
        self._clock = clock
        self._changed = threading.Condition()
        self._found: dict[LoadedFile, _Finding] = {}  # the last used are the last
        self._running: set[LoadedFile] = set()
        self._stopping = threading.Event()
        self._pool = DaemonPool(_THREADS, "content")
        self._looking = DaemonPool(_THREADS, "content-look")  # does not wait for what is read

    def ask(self, file: LoadedFile, *, fresh: bool = False) -> Content:
        """At once, and begins what is left to do. With `fresh` an older finding does not count: the
        file may have been changed since, under an engine that has it mapped.
        """
        with self._changed:
            recent = self._clock() - FRESH_SECONDS
            return self._ask(file, recent, fresh=fresh)

    def wait(self, files: Sequence[LoadedFile], seconds: float) -> list[Content]:
        """As `ask` with `fresh`, but each file is looked at after the call, and it waits so long at
        most for those that are being read.
        """
        until = time.monotonic() + seconds
        with self._changed:
            since = self._clock()
            while True:
                asked = [self._ask(file, since, fresh=True) for file in files]
                left = until - time.monotonic()
                if all(one.settled for one in asked) or left <= 0 or self._stopping.is_set():
                    return asked
                self._changed.wait(left)

    def close(self) -> None:
        """A read that hangs is left behind."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        closed = [pool.close(_END_SECONDS) for pool in (self._pool, self._looking)]
        if not all(closed):
            log.warning("the file of a model hangs, left behind")

    def _ask(self, file: LoadedFile, since: float, *, fresh: bool) -> Content:
        """A finding counts if the look began at `since` or later."""
        finding = self._found.pop(file, None)
        if finding is not None:
            self._found[file] = finding
            if finding.for_good or finding.looked_at >= since:
                return finding.content
        self._begin(file)
        return finding.content if finding is not None and not fresh else Content()

    def _begin(self, file: LoadedFile) -> None:
        if file in self._running or len(self._running) >= MOST_RUNNING or self._stopping.is_set():
            return
        self._running.add(file)
        try:
            pool = self._looking if self._record.knows(file.identity) else self._pool
            pool.submit(self._look, file)
        except RuntimeError:  # the sidecar ends
            self._running.discard(file)

    def _look(self, file: LoadedFile) -> None:
        began = self._clock()
        finding = None
        try:
            content, for_good = self._content(file)
            finding = _Finding(content, began, for_good)
        except Stopped:
            pass
        except Exception:
            log.exception("a model's file could not be checked: path=%a", file.path)
        with self._changed:
            self._running.discard(file)
            if finding is not None:
                self._found[file] = finding
                while len(self._found) > MOST_FILES:
                    del self._found[next(iter(self._found))]
            self._changed.notify_all()

    def _content(self, file: LoadedFile) -> tuple[Content, bool]:
        """Also whether that is for good. Stopped."""
        known = self._record.digest(file.identity)
        try:
            info = Path(file.path).stat()
            now = FileIdentity.of(info)
            if now != file.identity:
                return _of_another(file, now, known)
            if not stat.S_ISREG(info.st_mode):
                raise NoFile
            if not known:
                known = file_digest(file, self._stopping)
                self._record.note(file.identity, known)
                log.info("model's file read: path=%a sha256=%s", file.path, known)
        except NoFile:
            return Content(doubt=f"{file.path!a} is no regular file"), True
        except OtherFile:
            return _another(file), False
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            if not known:
                reason = getattr(error, "strerror", None) or error
                said = f"the sidecar cannot read {file.path!a}: {reason}"
                return Content(doubt=said, passing=True), False
        return Content(digest=known), False


def _of_another(file: LoadedFile, now: FileIdentity, known: str) -> tuple[Content, bool]:
    """The path leads to something else than what was loaded. If that is another file, as after a
    pull, the one that was loaded is still what it was; if it is the same, it was written to.
    """
    if now.same_file(file.identity):
        said = f"{file.path!a} was changed after it was loaded: load the model again"
        return Content(doubt=said), True
    return (Content(digest=known) if known else _another(file)), False


def _another(file: LoadedFile) -> Content:
    said = f"{file.path!a} is another file than the one that was loaded: load the model again"
    return Content(doubt=said)
