"""A MAC over every byte of a block file that lies where other machines may write.

    <block file: a multiple of 4096 bytes> <trailer: 64 bytes>
    trailer: "KVTMAC1\\n", key id (8 bytes), 16 zero bytes, MAC (32 bytes)

The checksums in a block file are CRCs, which anybody who can write the file can make right. The MAC
is BLAKE2b, keyed with the deployment's secret, so nobody without the key can make one. A file is
read into memory as a whole before any of it is used: the bytes that are used are the bytes that
were checked, even if somebody writes to the file meanwhile. The key id distinguishes a block of
another deployment from a forged one.
"""

from __future__ import annotations

import dataclasses
import errno
import hmac
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from ollama_tiering.store.block.segments import ALIGNMENT
from ollama_tiering.store.errors import NotAuthentic
from ollama_tiering.store.tiers.contract import OpenBlock, StoredBlock, WriteAt

if TYPE_CHECKING:
    from typing_extensions import Buffer

KEY_BYTES: Final = 32
TRAILER_BYTES: Final = 64
MAX_AUTHENTIC_BYTES: Final = 256 << 20  # of a file: held in memory while it is checked or written

_MAGIC: Final = b"KVTMAC1\n"
_ID_BYTES: Final = 8
_MAC_BYTES: Final = 32
_PART_BYTES: Final = 1 << 20  # of one call: a tier may limit the time of each


class Authenticity:
    """Makes and checks the MACs of one tier's files. Without a key it does neither. Thread-safe."""

    def __init__(self, key: bytes | None, cure: str = "give both sides the same key") -> None:
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._cure = cure
        self.key_id = b""
        if key is not None:
            self.key_id = blake2b(key=key, digest_size=_ID_BYTES, person=b"kvt-key-id").digest()

    @property
    def required(self) -> bool:
        return self._key is not None

    @property
    def trailer_bytes(self) -> int:
        """How many bytes a written file has beyond its block."""
        return TRAILER_BYTES if self.required else 0

    def mac(self, content: Buffer) -> bytes:
        assert self._key is not None
        mac = blake2b(key=self._key, digest_size=_MAC_BYTES, person=b"kvt-block-file")
        mac.update(content)
        return mac.digest()

    def trailer(self, content: Buffer) -> bytes:
        """The trailer of a block file with these bytes."""
        head = (_MAGIC + self.key_id).ljust(TRAILER_BYTES - _MAC_BYTES, b"\0")
        return head + self.mac(content)

    def check_trailer(self, trailer: bytes) -> None:
        """NotAuthentic unless there is a MAC with our key's id. The MAC itself is not checked."""
        if trailer[: len(_MAGIC)] != _MAGIC:
            raise self._refusal("it carries no MAC")
        key_id = trailer[len(_MAGIC) : len(_MAGIC) + _ID_BYTES]
        if key_id != self.key_id:
            reason = f"its MAC is of key {key_id.hex()}, this sidecar's is {self.key_id.hex()}"
            raise self._refusal(reason)

    def check(self, content: Buffer, trailer: bytes) -> None:
        """NotAuthentic unless a holder of the key wrote exactly these bytes."""
        self.check_trailer(trailer)
        if not hmac.compare_digest(trailer, self.trailer(content)):
            raise self._refusal("its MAC does not match: it was changed, or forged")

    def seen(self, stored: StoredBlock) -> StoredBlock:
        """A file that a scan found, with the size of the block file in it."""
        return dataclasses.replace(
            stored,
            file_bytes=content_bytes(stored.file_bytes),
            has_mac=has_trailer(stored.file_bytes) or not self.required,
        )

    def opened(self, block: OpenBlock) -> OpenBlock:
        """The block file without the trailer. Reading it raises NotAuthentic if the MAC does not
        match.
        """
        return AuthenticBlock(block, self) if self.required else Trimmed(block)

    def peeked(self, block: OpenBlock) -> OpenBlock:
        """The block file without the trailer, to see what it says it is. Only the key's id is
        checked.
        """
        if self.required:
            self.check_trailer(self.trailer_of(block))
        return Trimmed(block)

    def trailer_of(self, block: OpenBlock) -> bytes:
        if not has_trailer(block.file_bytes):
            raise self._refusal("it carries no MAC")
        return block.read_at(content_bytes(block.file_bytes), TRAILER_BYTES)

    def _refusal(self, reason: str) -> NotAuthentic:
        return NotAuthentic(reason, hint=self._cure)


def content_bytes(file_bytes: int) -> int:
    """The size of the block file without the trailer, if there is one."""
    return file_bytes - TRAILER_BYTES if has_trailer(file_bytes) else file_bytes


def has_trailer(file_bytes: int) -> bool:
    """Judged by the size: a block file ends at a multiple of 4096."""
    return file_bytes % ALIGNMENT == TRAILER_BYTES


class Trimmed:
    """An open file without its trailer."""

    def __init__(self, block: OpenBlock) -> None:
        self.file_bytes = content_bytes(block.file_bytes)
        self.read_at = block.read_at
        self.read_into = block.read_into
        self.resident = block.resident


class AuthenticBlock:
    """A block file that is read as a whole at the first read. Any read may raise NotAuthentic, or
    OSError as the file does.
    """

    def __init__(self, block: OpenBlock, authenticity: Authenticity) -> None:
        self.file_bytes = content_bytes(block.file_bytes)
        self.resident = block.resident
        self._block = block
        self._authenticity = authenticity
        self._content: memoryview | None = None

    def read_at(self, offset: int, length: int) -> bytes:
        return bytes(self._part(offset, length))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._part(offset, buffer.nbytes)

    def _part(self, offset: int, length: int) -> memoryview:
        if self._content is None:
            self._content = self._checked()
        if offset + length > self.file_bytes:
            raise OSError(errno.EIO, f"short read: {length} bytes at {offset}")
        return self._content[offset : offset + length]

    def _checked(self) -> memoryview:
        trailer = self._authenticity.trailer_of(self._block)
        if self.file_bytes > MAX_AUTHENTIC_BYTES:
            raise NotAuthentic(f"no writer makes a file of {self.file_bytes} bytes")
        self._authenticity.check_trailer(trailer)  # before all of it is read
        content = memoryview(bytearray(self.file_bytes))
        for offset in range(0, self.file_bytes, _PART_BYTES):
            self._block.read_into(offset, content[offset : offset + _PART_BYTES])
        self._authenticity.check(content, trailer)
        return content.toreadonly()


class ToAuthenticate:
    """The content of a block that is being written, kept until it is complete; parts may come in
    any order.
    """

    def __init__(self, file_bytes: int) -> None:
        self._content = bytearray(file_bytes)

    def write_at(self, offset: int, data: Buffer) -> None:
        with memoryview(data).cast("B") as view:
            self._content[offset : offset + view.nbytes] = view

    def write_to(self, write: WriteAt, authenticity: Authenticity) -> None:
        """Writes everything, the trailer last."""
        with memoryview(self._content) as view:
            for offset in range(0, view.nbytes, _PART_BYTES):
                write(offset, view[offset : offset + _PART_BYTES])
            write(view.nbytes, authenticity.trailer(view))
