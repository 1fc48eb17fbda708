"""Digests of files that were read once, in the state directory: `contents.json`, mode 0600.

A large model takes a minute to read; this way each is read once, not after every start. The file is
a cache: what cannot be read or does not add up is computed anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any, Final

from ollama_tiering.protocol.loaded_file import FileIdentity
from ollama_tiering.system.durable_file import MALFORMED, bounded_content, replace_file
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)

FILE_NAME: Final = "contents.json"
MOST_FILES: Final = 1024
_MAX_BYTES: Final = 1 << 20  # several times what so many files take
_HEX: Final = re.compile(r"[0-9a-f]{64}")


class ContentRecord:
    """Thread-safe. In memory only where there is no directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._path = directory / FILE_NAME if directory is not None else None
        self._lock = threading.Lock()
        self._digests: dict[FileIdentity, str] = {}  # the last used are the last
        self._seldom = QuietLog(log)
        self._load()

    def digest(self, identity: FileIdentity) -> str:
        """Empty where it is not known."""
        with self._lock:
            found = self._digests.pop(identity, "")
            if found:
                self._digests[identity] = found
            return found

    def knows(self, identity: FileIdentity) -> bool:
        """Never waits, not even for `note`."""
        return identity in self._digests

    def note(self, identity: FileIdentity, digest: str) -> None:
        """May block; an OSError becomes a line in the log."""
        with self._lock:
            self._digests[identity] = digest
            while len(self._digests) > MOST_FILES:
                del self._digests[next(iter(self._digests))]
            if self._path is None:
                return
            text = _text(self._digests)
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(self._path, text)
            except OSError as error:
                said = "digests of models not written, read again after a start: path=%s reason=%s"
                self._seldom.warning("unwritten", said, self._path, error.strerror)

    def _load(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # of a save that was killed
            for left in self._path.parent.glob(f".{FILE_NAME}.*"):
                left.unlink(missing_ok=True)
        try:
            self._digests = _digests(json.loads(bounded_content(self._path, _MAX_BYTES)))
        except FileNotFoundError:
            return
        except (OSError, *MALFORMED) as error:
            said = "digests of models are computed anew: path=%s reason=%s"
            log.warning(said, self._path, getattr(error, "strerror", None) or error)


def _text(digests: dict[FileIdentity, str]) -> str:
    files = [
        [one.device, one.inode, one.size_bytes, one.mtime_ns, one.ctime_ns, digest]
        for one, digest in digests.items()
    ]
    return json.dumps({"version": 1, "files": files, "sum": _sum(files)}) + "\n"


def _digests(document: Any) -> dict[FileIdentity, str]:
    files = document["files"]
    if document["version"] != 1 or document["sum"] != _sum(files):
        raise ValueError("its sum is another one")
    found = {}
    for *numbers, digest in files[-MOST_FILES:]:
        if len(numbers) != 5 or not all(type(one) is int for one in numbers):
            raise ValueError("an entry is none")
        if not _HEX.fullmatch(digest):
            raise ValueError("a digest is none")
        found[FileIdentity(*numbers)] = digest
    return found


def _sum(files: Any) -> str:
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
