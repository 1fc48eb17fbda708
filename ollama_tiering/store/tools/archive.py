"""A chain outside of a store: a plain tar, or a directory, of block files and a manifest.

    manifest.json          first in a tar
    blocks/<key hex>.kvb   block files as they are, first to last, then window blocks

    {"format": "ollama-tiering chain", "version": 1, "namespace": hex,
     "description": [[name, value], …], "blocks": [{"key": hex, "file_bytes": n, "sha256": hex}, …]}

With window blocks it is version 2, and they are in a list "windows" like "blocks".

exporting.py writes it. `open_archive` trusts nothing in it. No name from the archive is used as a
path: names are compared with those made from the manifest's keys, and files of a directory are
opened below it without following links. Sizes are checked before anything is allocated. A tar may
contain only plain files: no links, devices, sparse files or extended headers.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ollama_tiering.config import count
from ollama_tiering.store.block.blockfile import MAX_FILE_BYTES, MAX_ROWS, ReadAt
from ollama_tiering.store.block.description import Fields, checked_fields
from ollama_tiering.store.block.key import BlockKey, NamespaceId, digest_from_hex
from ollama_tiering.store.block.segments import ALIGNMENT
from ollama_tiering.store.errors import ArchiveRefused
from ollama_tiering.store.tiers.names import BLOCK_SUFFIX
from ollama_tiering.system.directories import open_below
from ollama_tiering.system.files import fd_reader

MANIFEST_NAME: Final = "manifest.json"
BLOCKS_DIRECTORY: Final = "blocks"
FORMAT: Final = "ollama-tiering chain"
VERSION: Final = 1
WITH_WINDOWS: Final = 2  # version: a reader of version 1 must not take them for junk
MAX_BLOCKS: Final = 1 << 16  # window blocks included
MAX_MANIFEST_BYTES: Final = 32 << 20
TAR_BLOCK: Final = tarfile.BLOCKSIZE

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ArchivedBlock:
    key: BlockKey
    file_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return block_name(self.key)


@dataclass(frozen=True, slots=True)
class ArchiveManifest:
    namespace: NamespaceId
    description: Fields
    blocks: tuple[ArchivedBlock, ...]  # the chain, first to last
    windows: tuple[ArchivedBlock, ...] = ()  # that hang on its blocks

    @property
    def block_tokens(self) -> int:
        return int(dict(self.description)["block_tokens"])

    @property
    def files(self) -> tuple[ArchivedBlock, ...]:
        """All block files, in the order in which they can be stored."""
        return self.blocks + self.windows

    @property
    def file_bytes(self) -> int:
        return sum(block.file_bytes for block in self.files)

    def to_bytes(self) -> bytes:
        """The length does not depend on the checksums."""
        document = {
            "format": FORMAT,
            "version": WITH_WINDOWS if self.windows else VERSION,
            "namespace": self.namespace.hex(),
            "description": [list(pair) for pair in self.description],
            "blocks": _entries(self.blocks),
        }
        if self.windows:
            document["windows"] = _entries(self.windows)
        return (json.dumps(document, indent=1) + "\n").encode()


def _entries(blocks: tuple[ArchivedBlock, ...]) -> list[dict[str, Any]]:
    return [
        {"key": block.key.hex(), "file_bytes": block.file_bytes, "sha256": block.sha256}
        for block in blocks
    ]


class Archive:
    """An open archive: its manifest, and for each block where to read it."""

    def __init__(
        self, manifest: ArchiveManifest, places: dict[str, tuple[int, int]], root: int
    ) -> None:
        self.manifest = manifest
        self._places = places  # of a tar: name -> (offset, bytes)
        self._fd = root

    @contextlib.contextmanager
    def open(self, block: ArchivedBlock) -> Iterator[ReadAt]:
        """ArchiveRefused if it is missing or its size is not the manifest's. OSError passes."""
        if self._places:
            offset, _ = self._places[block.name]
            yield _shifted(fd_reader(self._fd), offset)
            return
        with _below(self._fd, BLOCKS_DIRECTORY, block.key.hex() + BLOCK_SUFFIX) as (fd, size):
            if size != block.file_bytes:
                raise ArchiveRefused(f"{block.name} has {size} bytes, not {block.file_bytes}")
            yield fd_reader(fd)


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Opens a tar file or a directory. Manifest and sizes are checked, the contents of blocks are
    not.
    """
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            root = stack.enter_context(open_below(path, ()))
            with _below(root, "", MANIFEST_NAME) as (fd, size):
                manifest = parse_manifest(_manifest_bytes(fd_reader(fd), 0, size))
            yield Archive(manifest, {}, root)
            return
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ArchiveRefused(f"{path} is neither a file nor a directory")
        places = _tar_places(fd_reader(fd), info.st_size)
        if MANIFEST_NAME not in places:
            raise ArchiveRefused(f"{path} has no {MANIFEST_NAME}: it is no exported chain")
        manifest = parse_manifest(_manifest_bytes(fd_reader(fd), *places.pop(MANIFEST_NAME)))
        wanted = {block.name: block.file_bytes for block in manifest.files}
        for name, (_, size) in places.items():
            if wanted.get(name) != size:
                raise ArchiveRefused(f"member {name[:120]!r} is not what the manifest says")
        if len(wanted) != len(places):
            raise ArchiveRefused(
                f"of the manifest {count(len(wanted) - len(places), 'block', 'is')} missing"
            )
        yield Archive(manifest, places, fd)


def parse_manifest(data: bytes) -> ArchiveManifest:
    """ArchiveRefused unless it is well formed and bounded, and its description
    gives its namespace.
    """
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise ArchiveRefused("the manifest is of something else")
        if document["version"] not in (VERSION, WITH_WINDOWS):
            raise ArchiveRefused(f"manifest version {document['version']!r} is unknown")
        namespace = NamespaceId(_digest(document["namespace"]))
        pairs = [(name, value) for name, value in document["description"]]
        blocks = tuple(_block(entry) for entry in document["blocks"])
        windows: tuple[ArchivedBlock, ...] = ()
        if document["version"] == WITH_WINDOWS:
            windows = tuple(_block(entry) for entry in document["windows"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArchiveRefused(f"the manifest is malformed: {type(error).__name__}") from None
    fields = checked_fields(pairs, namespace)
    if not fields:
        raise ArchiveRefused("the namespace is not the digest of its description")
    block_tokens = dict(fields).get("block_tokens", "")
    if not (block_tokens.isascii() and block_tokens.isdecimal() and len(block_tokens) <= 4):
        raise ArchiveRefused("the description names no block_tokens")
    if not 1 <= int(block_tokens) <= MAX_ROWS:
        raise ArchiveRefused(f"block_tokens {block_tokens} is not valid")
    manifest = ArchiveManifest(namespace, fields, blocks, windows)
    if not blocks or len(manifest.files) > MAX_BLOCKS:
        raise ArchiveRefused(f"{len(manifest.files)} blocks are not 1 to {MAX_BLOCKS}")
    if len({block.key for block in manifest.files}) != len(manifest.files):
        raise ArchiveRefused("the manifest names a block twice")
    return manifest


def block_name(key: BlockKey) -> str:
    return f"{BLOCKS_DIRECTORY}/{key.hex()}{BLOCK_SUFFIX}"


def tar_head(name: str, size: int) -> bytes:
    """The header of a plain member; it contains nothing about this machine."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.USTAR_FORMAT if size < 1 << 33 else tarfile.GNU_FORMAT)


def tar_padding(size: int) -> bytes:
    return b"\0" * (-size % TAR_BLOCK)


def _tar_places(read_at: ReadAt, file_bytes: int) -> dict[str, tuple[int, int]]:
    """name -> (offset, bytes) of every member, up to the end mark."""
    places: dict[str, tuple[int, int]] = {}
    at = 0
    while at + TAR_BLOCK <= file_bytes:
        head = read_at(at, TAR_BLOCK)
        if not any(head):
            return places
        try:
            info = tarfile.TarInfo.frombuf(head, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise ArchiveRefused(f"no tar of an exported chain: {error}") from None
        at += TAR_BLOCK
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ArchiveRefused(f"member {info.name[:120]!r} is not a plain file")
        if not 0 <= info.size <= file_bytes - at:
            raise ArchiveRefused(f"member {info.name[:120]!r} goes beyond the end of the file")
        if info.name in places or len(places) > MAX_BLOCKS:
            raise ArchiveRefused(f"member {info.name[:120]!r} is there twice, or one too many")
        places[info.name] = at, info.size
        at += -(-info.size // TAR_BLOCK) * TAR_BLOCK
    raise ArchiveRefused("the archive is truncated: it has no end mark")


def _manifest_bytes(read_at: ReadAt, offset: int, size: int) -> bytes:
    if size > MAX_MANIFEST_BYTES:
        raise ArchiveRefused(f"a manifest of {size} bytes is longer than allowed")
    return read_at(offset, size)


@contextlib.contextmanager
def _below(root: int, directory: str, name: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file. No link on the way is followed."""
    at = os.dup(root)
    try:
        try:
            if directory:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(directory, flags, dir_fd=at)
                os.close(at)
                at = inner
            fd = os.open(name, _READ, dir_fd=at)
        except OSError as error:
            raise ArchiveRefused(f"{name}: {error.strerror}") from None
    finally:
        os.close(at)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ArchiveRefused(f"{name} is not a regular file")
        yield fd, info.st_size
    finally:
        os.close(fd)


def _shifted(read_at: ReadAt, start: int) -> ReadAt:
    return lambda offset, length: read_at(start + offset, length)


def _block(entry: Any) -> ArchivedBlock:
    size, digest = entry["file_bytes"], entry["sha256"]
    if type(size) is not int or not 2 * ALIGNMENT <= size <= MAX_FILE_BYTES or size % ALIGNMENT:
        raise ValueError("impossible size")
    return ArchivedBlock(BlockKey(_digest(entry["key"])), size, _digest(digest).hex())


def _digest(text: Any) -> bytes:
    digest = digest_from_hex(text)
    if digest is None:
        raise ValueError("no digest")
    return digest
