"""What a release archive of Ollama has for GPUs, unpacked into the cache.

Taken are `bin/ollama`, GGML's base and the folders `cuda_*`, `rocm` and `vulkan` of `lib/ollama`,
by name; all else is passed over. Nothing that an archive says is trusted: a path that leads out of
it, a link that leaves its folder, a device, a file with holes, one name twice, or more bytes than a
release can have end it, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

import zstandard

from ollama_tiering import config
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.system.files import without_links

MOST_BYTES = 32 << 30  # of the whole tar file; the releases of 2026 have about 4
MOST_MEMBERS = 100_000
_WANTED = re.compile(
    r"bin/ollama|lib/ollama/libggml-base\.so[\w.]*|lib/ollama/(cuda_\w+|rocm\w*|vulkan)/lib[^/]+"
    r"|lib/ollama/rocm\w*/(rocblas|hipblaslt)/.+"
)
_PROGRAM = "bin/ollama"
_ZSTD, _GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_HINT = "get it anew from https://github.com/ollama/ollama/releases"
_DAMAGE = (tarfile.TarError, zstandard.ZstdError, zlib.error, gzip.BadGzipFile, EOFError)
_END = 1024  # bytes of zeros at the end of a tar file
_AHEAD = 1 << 16  # more than tarfile reads ahead, which is 20 blocks of 512 bytes


def folder() -> Path:
    """Below it lies what was unpacked."""
    return config.cache_dir() / "stock"


def is_archive(path: Path) -> bool:
    return path.is_file()


def unpacked(archive: Path, report: Report) -> Path:
    """The folder with what is wanted; unpacked now if it is not there yet. UsageError names what is
    wrong with an archive.
    """
    info = archive.stat()
    identity = f"{without_links(archive)}\0{info.st_size}\0{info.st_mtime_ns}"
    target = folder() / hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    with locked(target.with_name("lock"), f"another process unpacks {archive.name}", report):
        if not target.is_dir():
            _unpack(archive, target, report)
    return target


def _unpack(archive: Path, target: Path, report: Report) -> None:
    """Whole or not at all."""
    with (
        report.stage(f"unpacking {archive.name} into {target}") as detail,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as scratch,
    ):
        fresh = Path(scratch, "root")
        fresh.mkdir()
        try:
            with _opened(archive) as members:
                for name, member, content in _wanted(archive, members):
                    detail(name)
                    _write(archive, fresh / name, member, content)
        except _DAMAGE as error:
            why = f"no whole tar archive ({error or type(error).__name__})"
            raise _refusal(archive, why) from None
        _require_ends_of_links(archive, fresh)
        fresh.rename(target)


class _Plain(io.RawIOBase):
    """What was compressed, front to end. Knows how much it was and how it ended: tarfile takes a
    file that is cut off or damaged behind its first member for a whole one.
    """

    def __init__(self, archive: Path, source: IO[bytes]) -> None:
        self._archive, self._source = archive, source
        self._total = 0
        self._last = bytearray()  # of what was read, at least _AHEAD

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = self._source.read(size)
        self._total += len(content)
        self._last += content
        if len(self._last) > 8 * _AHEAD:
            del self._last[:-_AHEAD]
        if self._total > MOST_BYTES:
            raise _refusal(self._archive, "it is larger than a release of Ollama")
        return content

    def require_end(self, offset: int) -> None:
        """From there on, which is where the last member ends: empty blocks, two at least."""
        rest = self._last[offset - self._total :] if offset < self._total else b""
        empty, length = not any(rest), len(rest)
        while content := self.read(_AHEAD):
            empty, length = empty and not any(content), length + len(content)
        if not empty or length < _END:
            raise EOFError("cut off")


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """Read from front to end, once: a release takes gigabytes."""
    with archive.open("rb") as file, contextlib.ExitStack() as stack:
        begin = file.read(len(_ZSTD))
        file.seek(0)
        source: IO[bytes] = file
        if begin == _ZSTD:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            source = stack.enter_context(reader)
        elif begin.startswith(_GZIP):
            source = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=file)))
        plain = _Plain(archive, source)
        with tarfile.open(fileobj=plain, mode="r|") as members:
            yield members
            plain.require_end(members.offset)


def _wanted(
    archive: Path, members: tarfile.TarFile
) -> Iterator[tuple[str, tarfile.TarInfo, IO[bytes] | None]]:
    """Name, what it is and, of a file, its content. All members are looked at."""
    for count, member in enumerate(members):
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            raise _refusal(archive, f"it has {member.name!r}, a path that leads out of it")
        if count >= MOST_MEMBERS:
            raise _refusal(archive, "it is larger than a release of Ollama")
        name = str(path)  # without a leading ./
        if _WANTED.fullmatch(name) and not member.isdir():
            whole = member.isreg() and not member.issparse()  # a hole costs the archive nothing
            yield name, member, members.extractfile(member) if whole else None


def _write(archive: Path, target: Path, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or target.exists():
        raise _refusal(archive, f"it has {member.name!r} twice")
    if content is not None:
        with target.open("xb") as file:  # never through a link
            shutil.copyfileobj(content, file, 1 << 20)
        target.chmod(0o755 if target.name == "ollama" else 0o644)
    elif member.issym() and _plain(member.linkname) and not member.name.endswith(_PROGRAM):
        target.symlink_to(member.linkname)
    elif member.issym():
        raise _refusal(archive, f"its link {member.name!r} leaves the folder: {member.linkname!r}")
    else:
        raise _refusal(archive, f"its {member.name!r} is neither a file nor a symbolic link")


def _plain(name: str) -> bool:
    """Whether it is the name of a file beside the link."""
    return "/" not in name and "\0" not in name and name not in ("", ".", "..")


def _require_ends_of_links(archive: Path, root: Path) -> None:
    """A link names a file of its folder, so its chain ends there, or nowhere."""
    for path in root.rglob("*"):
        if path.is_symlink() and not path.is_file():
            raise _refusal(archive, f"its link {path.relative_to(root)} leads to no file")


def _refusal(archive: Path, why: str) -> UsageError:
    return UsageError(f"{archive}: {why}", hint=_HINT)
