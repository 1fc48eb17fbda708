"""What a shared library says of itself: its processor, the symbols that it has and wants, the
libraries that it needs. Only read, never loaded: it may need a driver that is not here.

64-bit little-endian ELF, by its section headers (System V ABI, chapters 4 and 5). All offsets are
checked against the file: it may be cut off, or not be a library at all. pyelftools would be a third
shorter, and reads libstdc++ in 300 ms where this takes 7 (measured once, 2026-11-27).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MACHINES = {"x86_64": 62, "amd64": 62, "aarch64": 183, "arm64": 183}  # e_machine
_HEADER = struct.Struct("<4sBB10xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_NOTE = struct.Struct("<III")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_SHARED = 3  # e_type
_DYNAMIC_SECTION, _SYMBOL_SECTION = 6, 11  # sh_type
_NEEDED = 1  # d_tag
_NOTES = 4  # p_type
_BUILD_ID = (4, 3, b"GNU\0")  # length of the name, type, name
_WEAK = 2  # binding: may stay undefined


@dataclass(frozen=True, slots=True)
class Library:
    """`wanted`: undefined symbols that are not weak; `needed`: names such as libcudart.so.12."""

    machine: int
    defined: frozenset[str]
    wanted: frozenset[str]
    needed: tuple[str, ...]


def read(path: Path) -> Library:
    """ValueError where it is no whole 64-bit shared library; OSError where it cannot be read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _read(content)
        except (struct.error, IndexError, OverflowError) as error:
            raise ValueError(f"cut off or damaged: {error}") from None


def machine(path: Path) -> int:
    """Which processor a program or library is for (e_machine); 0 if it is none. OSError where it
    cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(b"\x7fELF"):
        return 0
    return int(_HEADER.unpack(head)[4])


def build_id(path: Path) -> str:
    """The linker's name of what it was built from, in hex (NT_GNU_BUILD_ID); empty if it has none.
    OSError where it cannot be read.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return next(_build_ids(content), "")
    except (struct.error, ValueError):  # cut off; empty
        return ""


def _build_ids(content: mmap.mmap) -> Iterator[str]:
    """By the program headers, as a process that has loaded it finds them."""
    header = _HEADER.unpack_from(content)
    if header[:3] != (b"\x7fELF", 2, 1):
        return
    table, size, count = header[7], header[11], header[12]
    for i in range(count):
        kind, _, at, _, _, length, _, _ = _SEGMENT.unpack_from(content, table + size * i)
        end = at + length
        if kind != _NOTES or end > len(content):
            continue
        while at + _NOTE.size <= end:
            name_length, bytes_length, note = _NOTE.unpack_from(content, at)
            name = at + _NOTE.size
            bytes_at = name + (name_length + 3) // 4 * 4
            at = bytes_at + (bytes_length + 3) // 4 * 4
            whole = bytes_at + bytes_length <= end  # the last one need not be padded
            if whole and (name_length, note, content[name : name + 4]) == _BUILD_ID:
                yield content[bytes_at : bytes_at + bytes_length].hex()


def _read(content: mmap.mmap) -> Library:
    header = _HEADER.unpack_from(content)
    magic, bits, order, kind, machine = header[:5]
    if magic != b"\x7fELF" or (bits, order, kind) != (2, 1, _SHARED):
        raise ValueError("no 64-bit shared library")
    table, size, count = header[8], header[13], header[14]
    if size != _SECTION.size:
        raise ValueError("section headers of another size")
    sections = [_SECTION.unpack_from(content, table + size * i) for i in range(count)]
    defined, wanted, needed = set(), set(), []
    for section in sections:
        if section[1] == _SYMBOL_SECTION:
            strings = _text_of(content, sections[section[6]])
            for name, info, _, index, _, _ in _entries(content, section, _SYMBOL):
                if index:
                    defined.add(_string(strings, name))
                elif info >> 4 != _WEAK:
                    wanted.add(_string(strings, name))
        elif section[1] == _DYNAMIC_SECTION:
            strings = _text_of(content, sections[section[6]])
            for tag, value in _entries(content, section, _DYNAMIC):
                if tag == _NEEDED:
                    needed.append(_string(strings, value))
    if not defined:
        raise ValueError("no symbols")
    return Library(machine, frozenset(defined), frozenset(wanted - {""}), tuple(needed))


def _text_of(content: mmap.mmap, section: tuple[int, ...]) -> bytes:
    offset, length = section[4], section[5]
    found = content[offset : offset + length]
    if len(found) != length:
        raise ValueError("cut off")
    return found


def _entries(
    content: mmap.mmap, section: tuple[int, ...], form: struct.Struct
) -> Iterator[tuple[int, ...]]:
    text = _text_of(content, section)
    return form.iter_unpack(text[: len(text) // form.size * form.size])


def _string(strings: bytes, at: int) -> str:
    end = strings.index(b"\0", at)
    return strings[at:end].decode("ascii", errors="replace")
