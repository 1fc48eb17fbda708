"""index.sqlite: what the tiers hold, so that a start need not open every file.

A cache of the block files and never the truth: a row counts only if the scan found its file with
the size the row names, and a database that is missing, of another version or damaged is made anew.
SQLite keeps no checksums, so every row has one of its own.
Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ollama_tiering.store.block.blockfile import MAX_FILE_BYTES, MAX_ROWS
from ollama_tiering.store.block.key import FINGERPRINT_BYTES, BlockKey, NamespaceId
from ollama_tiering.system.lacking import make_private

log = logging.getLogger(__name__)

_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")  # of the files SQLite makes

_VERSION: Final = 6
_WITHOUT_FINGERPRINT: Final = 5  # the tables without that column
_WITHOUT_SECURE_DELETE: Final = 4  # the same tables as 5
_CHECKPOINT_PAGES: Final = 256
HEADROOM_BYTES: Final = 8 << 20  # what the files may grow by between two looks at them
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
    created REAL NOT NULL,
    hits INTEGER NOT NULL,
    crc32 INTEGER NOT NULL,
    fingerprint BLOB NOT NULL DEFAULT x'',
    PRIMARY KEY (key, tier)
) WITHOUT ROWID;
CREATE TABLE speeds (
    tier INTEGER PRIMARY KEY,
    read REAL NOT NULL,
    write REAL NOT NULL
);
"""


class IndexRow(NamedTuple):  # read by the hundred thousand at a start, so no dataclass
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
    created: float
    hits: int
    fingerprint: bytes = b""


# A row that cannot be is passed over: SQLite keeps whatever type it was given.
_PLAUSIBLE: Final = " AND ".join(
    [
        *(f"typeof({name}) = 'blob'" for name in ("key", "namespace", "parent", "tokens")),
        *(f"length({name}) = 32" for name in ("key", "namespace", "parent")),
        "length(tokens) % 4 = 0",
        f"typeof(fingerprint) = 'blob' AND length(fingerprint) IN (0, {FINGERPRINT_BYTES})",
        *(
            f"typeof({name}) = 'integer' AND {name} >= 0"
            for name in (
                "tier",
                "file_bytes",
                "raw_file_bytes",
                "stored_bytes",
                "hits",
            )
        ),
        "typeof(plain_rows) = 'integer'",
        f"plain_rows BETWEEN {-1 - MAX_ROWS} AND length(tokens) / 4",
        f"0 < file_bytes AND file_bytes <= raw_file_bytes AND raw_file_bytes <= {MAX_FILE_BYTES}",
        "typeof(last_use) = 'real' AND typeof(created) = 'real'",
    ]
)
_COLUMNS: Final = (*IndexRow._fields, "crc32")
_INSERT: Final = (
    f"INSERT INTO blocks ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
)
_NUMBERS: Final = struct.Struct("<5q2dq")


class BlockIndex:
    """A failure of the database is logged and answered by starting over; none reaches the store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rebuilt = False  # whether the file that was there had to be thrown away
        self._connection = self._open()

    def load(self) -> Iterator[IndexRow]:
        """All rows that are as they were saved. Ends early where the database is damaged."""
        damaged_rows = 0
        try:
            query = f"SELECT {', '.join(_COLUMNS)} FROM blocks WHERE {_PLAUSIBLE}"
            for *values, crc32 in self._connection.execute(query):
                row = IndexRow._make(values)
                if _crc32(row) == crc32:
                    yield row
                else:
                    damaged_rows += 1
        except sqlite3.Error as error:
            self._start_over(error)
            return
        if damaged_rows:  # nobody knows what else is wrong in it
            log.warning("index damaged, made anew: path=%s rows=%d", self.path, damaged_rows)
            self.start_afresh()

    def save(self, rows: Iterable[IndexRow], removed: Sequence[BlockKey]) -> bool:
        """Replaces all rows of these keys. False: nothing was saved."""
        entries = list(rows)
        keys = {(key,) for key in removed} | {(row.key,) for row in entries}
        try:
            with self._connection:
                self._connection.executemany("DELETE FROM blocks WHERE key = ?", sorted(keys))
                self._connection.executemany(_INSERT, ((*row, _crc32(row)) for row in entries))
        except sqlite3.DatabaseError as error:
            self._start_over(error)
            return False
        return True

    def scrub(self) -> None:
        """Leaves nothing of deleted rows in any file: in the database they are overwritten already
        (secure_delete), the log of changes is emptied.
        """
        try:
            (busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.DatabaseError as error:
            self._start_over(error)
            return
        if busy:
            log.warning("index in use elsewhere, its log keeps deleted rows: path=%s", self.path)

    def compact(self) -> None:
        """Gives pages that are no longer needed back to the file system."""
        try:
            (unused,) = self._connection.execute("PRAGMA freelist_count").fetchone()
            if unused > _CHECKPOINT_PAGES:
                self._connection.execute(f"PRAGMA incremental_vacuum({unused})").fetchall()
        except sqlite3.DatabaseError as error:
            self._start_over(error)

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

    def start_afresh(self) -> None:
        """An empty database in place of what there was; `rebuilt` asks for all rows."""
        self.close()
        with contextlib.suppress(OSError):
            self._unlink()
        self._connection = self._open()
        self.rebuilt = True

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
        if path is not None:
            refuse_odd_files(path)
        target = ":memory:" if path is None else str(path)
        # Opened at the start, then used by the background thread: one at a time.
        connection = sqlite3.connect(target, timeout=5, check_same_thread=False)
        try:
            if path is not None:
                make_private(path)
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit = {HEADROOM_BYTES // 4}")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == _WITHOUT_SECURE_DELETE:  # what was deleted may lie in it still
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                version = _WITHOUT_FINGERPRINT
            if version == _WITHOUT_FINGERPRINT:
                connection.execute(
                    "ALTER TABLE blocks ADD COLUMN fingerprint BLOB NOT NULL DEFAULT x''"
                )
                connection.execute(f"PRAGMA user_version = {_VERSION}")
                version = _VERSION
            if version != _VERSION and tables:
                raise sqlite3.DatabaseError(f"index version {version} is not {_VERSION}")
            if not tables:
                connection.executescript(_SCHEMA)
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM blocks LIMIT 0")
            connection.execute("SELECT tier, read, write FROM speeds LIMIT 0")
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def usable(connection: sqlite3.Connection) -> bool:
        """Whether it is a whole database of this version. sqlite3.Error if it is no database at
        all.
        """
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        return bool(version == _VERSION and verdict == "ok")

    def _start_over(self, error: sqlite3.Error) -> None:
        """Replaces a damaged database; a full disk or a lock leaves it as it is."""
        log.warning("index failed: path=%s error=%s", self.path, error)
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
            return
        self.close()
        self._connection = self._open()

    def _unlink(self) -> None:
        remove_index(self.path)


def _crc32(row: IndexRow) -> int:
    key, tier, namespace, parent, tokens, *numbers, fingerprint = row
    return zlib.crc32(
        _NUMBERS.pack(tier, *numbers) + key + namespace + parent + tokens + fingerprint
    )


def refuse_odd_files(path: Path) -> None:
    """SQLite would follow a link, and wait for ever at a pipe. sqlite3.DatabaseError."""
    for suffix in _SUFFIXES:
        one = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(one.lstat().st_mode):
                raise sqlite3.DatabaseError(f"{one.name} is no regular file")


def remove_index(path: Path) -> None:
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
