"""The ledger's file in the state directory, so that it outlives the sidecar: `ledger.json`, mode
0600.

It contains file names of models and counts, but no text. One sidecar at a time holds it, by a lock.
A second sidecar with the same state directory counts in memory only, and so does one that cannot
read or write there: counting must not get in the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from ollama_tiering.errors import TieringError
from ollama_tiering.sidecar.ledger import Ledger
from ollama_tiering.system.durable_file import bounded_content, replace_file
from ollama_tiering.system.locks import lock_file
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)

FILE_NAME: Final = "ledger.json"
_MAX_BYTES: Final = 8 << 20  # several times what the ledger's bounds allow
_SAVE_SECONDS: Final = 60.0
_END_SECONDS: Final = 2.0


class LedgerFile:
    """Made by `held`. Only one thread at a time calls `save`."""

    def __init__(self, path: Path | None, ledger: Ledger) -> None:
        self._path = path
        self._ledger = ledger
        self._saved = 0
        self._seldom = QuietLog(log)

    def load(self) -> None:
        """A damaged file is logged, and replaced at the next save."""
        if self._path is None:
            return
        try:
            self._ledger.restore(json.loads(bounded_content(self._path, _MAX_BYTES)))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            log.warning("counts of models begin anew: path=%s reason=%s", self._path, _said(error))

    def save(self) -> None:
        """Writes the file if something was booked since the last time. May block; an OSError
        becomes a line in the log.
        """
        changes = self._ledger.changes
        if self._path is None or changes == self._saved:
            return
        try:
            replace_file(self._path, json.dumps(self._ledger.document(), indent=1) + "\n")
        except OSError as error:
            said = "counts of models not written: path=%s reason=%s"
            self._seldom.warning("unwritten", said, self._path, _said(error))
            return
        self._saved = changes

    async def keep(self, pool: Executor) -> None:
        """Saves now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await asyncio.get_running_loop().run_in_executor(pool, self.save)

    async def end(self, pool: Executor) -> None:
        """Saves for the last time, but does not wait for a disk that hangs."""
        saving = asyncio.get_running_loop().run_in_executor(pool, self.save)
        await asyncio.wait({saving}, timeout=_END_SECONDS)


@contextlib.contextmanager
def held(directory: Path, ledger: Ledger) -> Iterator[LedgerFile]:
    """The file in this directory, which is made if needed. The file is read, and locked until the
    end.
    """
    path = directory / FILE_NAME
    lock = -1
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_file(path.with_name(FILE_NAME + ".lock"), f"{path}")
        for left in directory.glob(f".{FILE_NAME}.*"):  # of a save that was killed
            left.unlink(missing_ok=True)
    except (OSError, TieringError) as error:
        log.warning("counts of models are in memory only: %s", _said(error))
        if lock < 0:
            yield LedgerFile(None, ledger)
            return
    try:
        file = LedgerFile(path, ledger)
        file.load()
        yield file
    finally:
        os.close(lock)


def _said(error: BaseException) -> str:
    if isinstance(error, TieringError):
        return error.message
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "a link, which is not followed"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
