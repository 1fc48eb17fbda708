"""Numbers, texts and lists of the engine socket as bytes, and the frames around them. Pure.

Little endian throughout. A text is a u16 and that number of bytes of UTF-8; a list is a u32 and
that number of entries. A reader believes no length: what a list says is compared with the bytes
that are left before anything is made of it.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import Final

VERSION: Final = 4
MAGIC: Final = b"KVTENG\r\n"
HEAD: Final = struct.Struct("<IHH")  # bytes of the body, kind of the message, 0
MAX_HELLO_BYTES: Final = 256 << 10  # a model of 4,096 layers takes 100 KiB
MAX_BODY_BYTES: Final = 5 << 20  # a million tokens take 4 MiB
MAX_REPLY_BYTES: Final = 64 << 20  # checksums of 16,384 blocks with 512 segments each


_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_I64: Final = struct.Struct("<q")
_F64: Final = struct.Struct("<d")


class FileKind(IntEnum):
    """What a file holds."""

    ROWS = 0  # of a block
    STATE = 1
    WINDOW = 2  # rows of a block, in the layers that keep only the last ones


class Malformed(ValueError):
    """Bytes that are no message of this protocol."""


class Reader:
    """Takes a body apart. Malformed where it ends too early or goes on too long."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._body):
            raise Malformed(f"{count} bytes are wanted and {len(self._body) - self._at} are left")
        part = self._body[self._at : end]
        self._at = end
        return part

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        return int(_U16.unpack(self.take(2))[0])

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def i64(self) -> int:
        return int(_I64.unpack(self.take(8))[0])

    def f64(self) -> float:
        return float(_F64.unpack(self.take(8))[0])

    def text(self) -> str:
        try:
            return self.take(self.u16()).decode()
        except UnicodeDecodeError as error:
            raise Malformed(f"a text is not UTF-8: {error}") from None

    def path(self) -> str:
        """Any bytes, as Python has them in paths, whatever the locale."""
        return os.fsdecode(self.take(self.u16()))

    def count(self, entry_bytes: int, most: int = 0xFFFFFFFF) -> int:
        """How many entries a list has, each of at least `entry_bytes`."""
        count = self.u32()
        if count > most or count * entry_bytes > len(self._body) - self._at:
            raise Malformed(f"a list of {count} entries is too long, or longer than what is left")
        return count

    def numbers(self) -> bytes:
        """A list of u32 or int32, as its bytes."""
        return self.take(4 * self.count(4))

    def end(self) -> None:
        if self._at != len(self._body):
            raise Malformed(f"{len(self._body) - self._at} bytes are left over")


class Writer:
    """Puts a body together."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def raw(self, data: bytes) -> Writer:
        self._parts.append(data)
        return self

    def u8(self, value: int) -> Writer:
        return self.raw(bytes((value,)))

    def u16(self, value: int) -> Writer:
        return self.raw(_U16.pack(value))

    def u32(self, value: int) -> Writer:
        return self.raw(_U32.pack(value))

    def u64(self, value: int) -> Writer:
        return self.raw(_U64.pack(value))

    def i64(self, value: int) -> Writer:
        return self.raw(_I64.pack(value))

    def f64(self, value: float) -> Writer:
        return self.raw(_F64.pack(value))

    def text(self, value: str) -> Writer:
        """ValueError for one of more than 65,535 bytes."""
        return self._counted(value.encode())

    def path(self, value: str) -> Writer:
        return self._counted(os.fsencode(value))

    def _counted(self, data: bytes) -> Writer:
        if len(data) > 0xFFFF:
            raise ValueError(f"a text of {len(data)} bytes is too long")
        return self.u16(len(data)).raw(data)

    def numbers(self, data: bytes) -> Writer:
        """A list of u32 or int32, from its bytes."""
        return self.u32(len(data) // 4).raw(data)

    def body(self) -> bytes:
        return b"".join(self._parts)


def frame(kind: int, body: bytes) -> bytes:
    return HEAD.pack(len(body), kind, 0) + body


def frame_head(data: bytes, most: int) -> tuple[int, int]:
    """(bytes of the body, kind). Malformed where it is longer than `most`, or no head."""
    body_bytes, kind, zero = HEAD.unpack(data)
    if zero or body_bytes > most:
        raise Malformed(f"no frame of at most {most} bytes begins here")
    return int(body_bytes), int(kind)
