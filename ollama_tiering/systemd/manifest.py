"""What install wrote, each file with its SHA-256. Uninstall removes this and nothing else.

The manifest lies in the prefix. It is written before the files, so that an install that was cut off
can be removed or repeated. A file whose content is not what was written belongs to a person, and
stays.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final

from ollama_tiering.errors import ServiceError, UsageError

MANIFEST_NAME: Final = "manifest.json"
_AGAIN: Final = "make it again: tiering patch"


@dataclass(frozen=True, slots=True)
class NewFile:
    """One thing to write: `content`, a copy of `source`, or a link to `link`."""

    path: Path  # on the machine it is for, without the root
    mode: int | None = 0o644  # None: that of `source`, less what others may write
    content: bytes | None = None
    source: Path | None = None
    link: str | None = None
    owners: tuple[int, ...] = ()  # whose `source` must be; empty: anybody's

    @property
    def digest(self) -> str:
        if self.link is not None:
            return _of_link(self.link)
        if self.content is not None:
            return hashlib.sha256(self.content).hexdigest()
        with self.opened() as source:
            return hashlib.file_digest(source, "sha256").hexdigest()

    @contextlib.contextmanager
    def opened(self) -> Iterator[BufferedReader]:
        """The source. Root reads for a user here, so what that user may put in its place is refused
        with a UsageError: a link, no regular file, somebody else's, or what root alone may read.
        """
        assert self.source is not None
        try:
            fd = os.open(self.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UsageError(f"{self.source} is a link", hint=_AGAIN) from None
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise UsageError(f"{self.source} is no regular file", hint=_AGAIN)
            if self.owners and info.st_uid not in self.owners:
                raise UsageError(
                    f"{self.source} belongs to user {info.st_uid}, who did not call this",
                    hint=f"{_AGAIN}; or install with sudo as that user",
                )
            if any(self.owners) and not info.st_uid and not info.st_mode & stat.S_IROTH:
                raise UsageError(f"{self.source} is for root alone", hint=_AGAIN)
            yield file


@dataclass(slots=True)
class InstallManifest:
    files: dict[str, str] = field(default_factory=dict)  # path -> SHA-256
    directories: list[str] = field(default_factory=list)  # made by install, outermost first
    units: list[str] = field(default_factory=list)
    stock: dict[str, str] = field(default_factory=dict)  # as it was when installed


@dataclass(slots=True)
class Changes:
    """What was done, or would be. Paths are without the root."""

    written: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # changed by a person
    missing: list[str] = field(default_factory=list)


class Installed:
    """The files of one prefix below one root. Not for two processes at once."""

    def __init__(self, prefix: Path, root: Path | None = None) -> None:
        self._prefix = prefix
        self._root = root
        self._path = self.at(prefix / MANIFEST_NAME)

    def at(self, path: Path | str) -> Path:
        """Says where a path of that machine lies on this one."""
        return self._root / Path(path).relative_to("/") if self._root else Path(path)

    def load(self) -> InstallManifest | None:
        try:
            return InstallManifest(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ServiceError(
                f"{self._path} is not what install wrote: {error}",
                hint="remove what it names by hand, then the file",
            ) from None

    def state(self, path: str, wanted: str) -> str:
        """`same`, `changed` or `missing`."""
        found = digest(self.at(path))
        return "missing" if found is None else "same" if found == wanted else "changed"

    def install(
        self, files: Sequence[NewFile], wanted: InstallManifest, *, dry_run: bool = False
    ) -> Changes:
        """Writes the files and completes `wanted`. ServiceError, and nothing is written, if a file
        is in the way that is not ours, or not as we wrote it.
        """
        old = self.load() or InstallManifest()
        new = {str(file.path): file.digest for file in files}
        blocked = [
            path
            for path, wanted_digest in new.items()
            if digest(self.at(path)) not in (None, wanted_digest, old.files.get(path))
        ]
        if blocked:
            raise ServiceError(
                "not written by install, or changed since: " + ", ".join(blocked),
                hint="move them away; settings of your own belong into a drop-in "
                "(systemctl edit UNIT)",
            )
        changes = Changes()
        for path, digest_ in new.items():
            same = self.state(path, digest_) == "same"
            (changes.same if same else changes.written).append(path)
        gone = {path: digest_ for path, digest_ in old.files.items() if path not in new}
        if not dry_run:
            wanted.files = gone | new
            wanted.directories = self._make_directories(new, old.directories)
            self._save(wanted)
            for file in files:
                if str(file.path) in changes.written:
                    self._write(file, new[str(file.path)])
        self._take_away(gone, changes, dry_run=dry_run)
        if not dry_run:
            wanted.files = new
            self._save(wanted)
        return changes

    def uninstall(self, *, dry_run: bool = False) -> Changes:
        """Removes what is as install wrote it, the manifest last, then the directories that are
        empty.
        """
        manifest = self.load() or InstallManifest()
        changes = Changes()
        self._take_away(manifest.files, changes, dry_run=dry_run)
        if not dry_run:
            self._path.unlink(missing_ok=True)
            for directory in reversed(manifest.directories):
                with contextlib.suppress(OSError):  # not empty: somebody else's things are in it
                    self.at(directory).rmdir()
        return changes

    def take_back(self, path: str) -> None:
        """Removes one file, which is as install wrote it, and the folders that install made for it
        and that are empty now.
        """
        manifest = self.load() or InstallManifest()
        self.at(path).unlink(missing_ok=True)
        manifest.files.pop(path, None)
        for directory in reversed(manifest.directories[:]):
            if Path(path).is_relative_to(directory):
                with contextlib.suppress(OSError):  # not empty: somebody else's things are in it
                    self.at(directory).rmdir()
                    manifest.directories.remove(directory)
        self._save(manifest)

    def _take_away(self, files: dict[str, str], changes: Changes, *, dry_run: bool) -> None:
        for path, wanted in files.items():
            state = self.state(path, wanted)
            if state == "same":
                if not dry_run:
                    self.at(path).unlink()
                changes.removed.append(path)
            else:
                (changes.kept if state == "changed" else changes.missing).append(path)

    def _make_directories(self, paths: Iterable[str], known: Sequence[str]) -> list[str]:
        made = list(known)
        for path in [*paths, str(self._prefix / MANIFEST_NAME)]:
            missing = []
            for parent in Path(path).parents:
                if self.at(parent).is_dir():
                    break
                missing.append(parent)
            for parent in reversed(missing):
                self.at(parent).mkdir()
                self.at(parent).chmod(0o755)  # whatever the umask says: the service's user enters
                made.append(str(parent))
        return made

    def _write(self, file: NewFile, digest_: str) -> None:
        """Whole or not at all, and with that digest. A binary that runs is replaced, not
        overwritten.
        """
        target = self.at(file.path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            if file.link is not None:
                temporary.symlink_to(file.link)
            else:
                with temporary.open("xb") as sink:
                    mode = file.mode
                    if file.source is not None:
                        copied = _copy(file, sink, digest_)
                        mode = copied if mode is None else mode
                    else:
                        sink.write(file.content or b"")
                    os.fchmod(sink.fileno(), 0o644 if mode is None else mode)
                    sink.flush()
                    os.fsync(sink.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _save(self, manifest: InstallManifest) -> None:
        text = json.dumps(asdict(manifest), indent=1) + "\n"
        file = NewFile(self._prefix / MANIFEST_NAME, content=text.encode())
        self._write(file, file.digest)


def _copy(file: NewFile, sink: BinaryIO, digest_: str) -> int:
    """The bytes that are written are those that are hashed. The mode of the file that had them,
    less what others may write.
    """
    state = hashlib.sha256()
    with file.opened() as source:
        mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o755
        while data := source.read(1 << 20):
            state.update(data)
            sink.write(data)
    if state.hexdigest() != digest_:
        raise ServiceError(f"{file.source} was changed meanwhile", hint="install again")
    return mode


def digest(path: Path) -> str | None:
    """Digest of a file's content or of a link's target; None if there is nothing."""
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(info.st_mode):
        return _of_link(str(path.readlink()))
    return file_digest(path) if stat.S_ISREG(info.st_mode) else "no regular file"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_link(target: str) -> str:
    return hashlib.sha256(b"link " + os.fsencode(target)).hexdigest()
