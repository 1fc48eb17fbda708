"""index.sqlite: what the tiers hold, so that a start need not open every file.

A cache of the block files and never the truth: a row counts only if the scan found its file with
the size the row names, and a database that is missing, of another version or damaged is made anew.
Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Final

from ollama_tiering.store.blockfile import MAX_FILE_BYTES
from ollama_tiering.store.key import BlockKey, NamespaceId

log = logging.getLogger(__name__)

INDEX_NAME: Final = "index.sqlite"

_VERSION: Final = 2
_SCHEMA: Final = """
CREATE TABLE blocks (
    key BLOB NOT NULL,
    tier INTEGER NOT NULL,
    namespace BLOB NOT NULL,
    parent BLOB NOT NULL,
    tokens BLOB NOT NULL,
    plain_rows INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    raw_file_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    last_use REAL NOT NULL,
    PRIMARY KEY (key, tier)
) WITHOUT ROWID;
CREATE TABLE speeds (
    tier INTEGER PRIMARY KEY,
    read REAL NOT NULL,
    write REAL NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class IndexRow:
    key: BlockKey
    tier: int
    namespace: NamespaceId
    parent: bytes
    tokens: bytes
    plain_rows: int
    file_bytes: int
    raw_file_bytes: int  # more than file_bytes where the file is encoded
    stored_bytes: int
    last_use: float

    @property
    def plausible(self) -> bool:
        digests = (self.key, self.namespace, self.parent)
        counts = (self.plain_rows, self.file_bytes, self.raw_file_bytes, self.stored_bytes)
        return (
            all(isinstance(count, int) for count in counts)
            and isinstance(self.last_use, float)
            and all(isinstance(digest, bytes) and len(digest) == 32 for digest in digests)
            and isinstance(self.tokens, bytes)
            and len(self.tokens) % 4 == 0
            and 0 <= self.plain_rows <= len(self.tokens) // 4
            and 0 < self.file_bytes <= self.raw_file_bytes <= MAX_FILE_BYTES
        )


_COLUMNS: Final = tuple(field.name for field in fields(IndexRow))
_values = attrgetter(*_COLUMNS)


class BlockIndex:
    """A failure of the database is logged and answered by starting over; none reaches the store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rebuilt = False  # whether the file that was there had to be thrown away
        self._connection = self._open()

    def load(self) -> Iterator[IndexRow]:
        try:
            rows = self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM blocks").fetchall()
        except sqlite3.Error as error:
            self._start_over(error)
            return
        for row in rows:
            entry = IndexRow(*row)
            if entry.plausible:
                yield entry

    def save(self, rows: Iterable[IndexRow], removed: Sequence[BlockKey]) -> bool:
        """Replaces all rows of these keys. False: nothing was saved."""
        entries = list(rows)
        keys = {(key,) for key in removed} | {(row.key,) for row in entries}
        try:
            with self._connection:
                self._connection.executemany("DELETE FROM blocks WHERE key = ?", keys)
                self._connection.executemany(
                    f"INSERT INTO blocks VALUES ({', '.join('?' * len(_COLUMNS))})",
                    map(_values, entries),
                )
        except sqlite3.DatabaseError as error:
            self._start_over(error)
            return False
        return True

    def load_speeds(self) -> dict[int, tuple[float, float]]:
        try:
            rows = self._connection.execute("SELECT tier, read, write FROM speeds").fetchall()
        except sqlite3.Error as error:
            self._start_over(error)
            return {}
        return {
            tier: (read, write)
            for tier, read, write in rows
            if all(isinstance(speed, float) and speed >= 0 for speed in (read, write))
        }

    def save_speeds(self, speeds: Iterable[tuple[int, float, float]]) -> None:
        try:
            with self._connection:
                self._connection.executemany("REPLACE INTO speeds VALUES (?, ?, ?)", list(speeds))
        except sqlite3.DatabaseError as error:
            self._start_over(error)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect(self.path)
        except sqlite3.Error as error:
            log.warning("index unusable, made anew: path=%s error=%s", self.path, error)
        self.rebuilt = True
        try:
            self._unlink()
            return self._connect(self.path)
        except (sqlite3.Error, OSError) as error:
            log.warning("index kept in memory only: path=%s error=%s", self.path, error)
            return self._connect(None)

    def _connect(self, path: Path | None) -> sqlite3.Connection:
        if path is not None and path.is_symlink():
            raise sqlite3.DatabaseError("the index is a symbolic link")
        target = ":memory:" if path is None else str(path)
        # Opened at the start, then used by the background thread: one at a time.
        connection = sqlite3.connect(target, timeout=5, check_same_thread=False)
        try:
            if path is not None:
                path.chmod(0o600)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version != _VERSION and tables:
                raise sqlite3.DatabaseError(f"index version {version} is not {_VERSION}")
            if not tables:
                connection.executescript(_SCHEMA)
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM blocks LIMIT 0")
            connection.execute("SELECT tier, read, write FROM speeds LIMIT 0")
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"index damaged: {verdict}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _start_over(self, error: sqlite3.Error) -> None:
        """Only for a damaged database; a full disk or a lock leaves it as it is."""
        log.warning("index failed: path=%s error=%s", self.path, error)
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
            return
        self.close()
        self._connection = self._open()

    def _unlink(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
