"""Writes a chain as an archive (archive.py): a tar file or a directory.

Nothing appears under the given name until all of it is written and durable. The checksums are known
only when all blocks have been read, so the manifest, whose length does not depend on them, is
written again at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from ollama_tiering.errors import UsageError
from ollama_tiering.store.block.blockfile import buffer_reader, damaged, read_meta
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.segments import align
from ollama_tiering.store.errors import CorruptBlock
from ollama_tiering.store.tiers.contract import OpenBlock
from ollama_tiering.store.tools.archive import (
    BLOCKS_DIRECTORY,
    MANIFEST_NAME,
    TAR_BLOCK,
    ArchivedBlock,
    ArchiveManifest,
    tar_head,
    tar_padding,
)
from ollama_tiering.store.tools.chain_to_export import ChainToExport
from ollama_tiering.system.directories import sync_directory
from ollama_tiering.system.lacking import sync

_COPY_BYTES: Final = 1 << 20


class _Target(Protocol):
    def begin(self, block: ArchivedBlock) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, manifest: bytes) -> None: ...


def export_chain(
    chain: ChainToExport,
    opened: Iterable[contextlib.AbstractContextManager[OpenBlock]],
    target: Path,
    *,
    as_directory: bool,
    progress: Callable[[int], None],
) -> ArchiveManifest:
    """`opened` yields `chain.files` in their order; each is checked while it is copied. UsageError
    if the target exists, CorruptBlock for a damaged block; OSError passes.
    """
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} is there already", hint="name another, or remove it first")
    manifest = chain.manifest()
    files = []
    with (_directory if as_directory else _tar)(target, manifest) as out:
        for block, context in zip(manifest.files, opened, strict=True):
            with context as source:
                out.begin(block)
                files.append(replace(block, sha256=_copy(chain, block, source, out)))
            progress(block.file_bytes)
        count = len(manifest.blocks)
        manifest = replace(manifest, blocks=tuple(files[:count]), windows=tuple(files[count:]))
        out.end(manifest.to_bytes())
    return manifest


def _copy(chain: ChainToExport, block: ArchivedBlock, source: OpenBlock, out: _Target) -> str:
    if source.file_bytes != block.file_bytes:
        raise CorruptBlock(f"block {block.key.hex()} has another size than the store says")
    meta = read_meta(source.read_at, source.file_bytes)
    head = source.read_at(0, meta.payload_offset)
    meta = read_meta(buffer_reader(head), source.file_bytes)  # what is written is what is checked
    if (meta.namespace, meta.key) != (chain.namespace, block.key):
        raise CorruptBlock(f"the file of block {block.key.hex()} holds another block")
    digest = hashlib.sha256()

    def write(data: bytes) -> None:
        digest.update(data)
        out.write(data)

    write(head)
    for segment in meta.segments:
        crc = 0
        end = segment.file_offset + segment.stored_bytes
        for data in _parts(source, segment.file_offset, end):
            crc = crc32c(data, crc)
            write(data)
        if crc != segment.crc32c:
            raise damaged(segment)
        for data in _parts(source, end, align(end)):
            write(data)
    return digest.hexdigest()


def _parts(source: OpenBlock, start: int, end: int) -> Iterator[bytes]:
    for offset in range(start, end, _COPY_BYTES):
        yield source.read_at(offset, min(_COPY_BYTES, end - offset))


class _Tar:
    def __init__(self, fd: int, manifest: ArchiveManifest) -> None:
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._left = 0
        empty = manifest.to_bytes()
        self._write(tar_head(MANIFEST_NAME, len(empty)) + empty + tar_padding(len(empty)))
        self._manifest_bytes = len(empty)

    def begin(self, block: ArchivedBlock) -> None:
        self._write(tar_head(block.name, block.file_bytes))  # sizes are multiples of 4096

    def write(self, data: bytes) -> None:
        self._write(data)

    def end(self, manifest: bytes) -> None:
        assert len(manifest) == self._manifest_bytes
        self._write(b"\0" * (2 * TAR_BLOCK))
        self._file.seek(TAR_BLOCK)
        self._write(manifest)
        sync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


@contextlib.contextmanager
def _tar(target: Path, manifest: ArchiveManifest) -> Iterator[_Target]:
    temporary = _temporary(target)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    out = _Tar(fd, manifest)
    try:
        yield out
        _appear(temporary, target)
    finally:
        out.close()
        temporary.unlink(missing_ok=True)
    sync_directory(target.parent)


class _Directory:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._file = contextlib.ExitStack()
        self._write: Callable[[bytes], object] = lambda data: None

    def begin(self, block: ArchivedBlock) -> None:
        self._file.close()
        self._open(self._root / block.name)

    def write(self, data: bytes) -> None:
        self._write(data)

    def end(self, manifest: bytes) -> None:
        self._file.close()
        self._open(self._root / MANIFEST_NAME)
        self._write(manifest)
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _open(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        file = self._file.enter_context(os.fdopen(fd, "wb"))
        self._file.callback(sync, fd)
        self._file.callback(file.flush)
        self._write = file.write


@contextlib.contextmanager
def _directory(target: Path, manifest: ArchiveManifest) -> Iterator[_Target]:
    temporary = _temporary(target)
    temporary.mkdir(mode=0o700)
    (temporary / BLOCKS_DIRECTORY).mkdir(mode=0o700)
    out = _Directory(temporary)
    try:
        yield out
        for made in (temporary / BLOCKS_DIRECTORY, temporary):
            sync_directory(made)
        temporary.rename(target)  # refused by the system when something with content is there
    finally:
        out.close()
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(target.parent)


def _appear(temporary: Path, target: Path) -> None:
    """A link, unlike a rename, replaces nothing; but not every file system has links."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        temporary.rename(target)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
