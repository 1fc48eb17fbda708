"""The vocabulary of a GGUF file: which text each token id stands for.

This reads the file's metadata as far as it needs, and no tensor; the gguf package is an extra and
reads all of it. Sizes come from the file and are not trusted: each is compared with a limit and
with what is left of the file.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from ollama_tiering.models import vocab

_MODEL, _TOKENS, _TYPES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type"))
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_METADATA_BYTES: Final = 64 << 20
_MAX_TOKENS: Final = 1 << 21
_MAX_KEYS: Final = 1 << 14
_BUFFER_BYTES: Final = 1 << 20
_STRING, _ARRAY, _INT32 = 8, 9, 5
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CONTROL, _BYTE = 3, 6  # of tokenizer.ggml.token_type
_BYTE_OF: Final = {char: byte for byte, char in enumerate(vocab.BYTE_TOKENS)}
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKED: Final = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # the wide bar is DeepSeek's


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`kinds` is empty, or has tokenizer.ggml.token_type of every token."""

    tokens: Sequence[bytes]
    kinds: Sequence[int]
    byte_level: bool  # GPT-2's: each character stands for a byte; else sentencepiece
    _pieces: dict[int, bytes | None] = field(default_factory=dict)  # that were asked for

    def name(self, token: int) -> str:
        """The token as it is in the file; empty if there is no such id."""
        known = 0 <= token < len(self.tokens)
        return self.tokens[token].decode(errors="replace") if known else ""

    def piece(self, token: int) -> bytes | None:
        """The token's bytes in UTF-8. None if it is no text, such as a mark of the chat template,
        or if there is no such id.
        """
        try:
            return self._pieces[token]
        except KeyError:
            return self._pieces.setdefault(token, self._piece(token))

    def _piece(self, token: int) -> bytes | None:
        name = self.name(token)
        kind = self.kinds[token] if name and self.kinds else 0
        if not name or kind == _CONTROL or _MARKED.fullmatch(name):
            return None
        if self.byte_level:
            return b"".join(
                bytes((_BYTE_OF[char],)) if char in _BYTE_OF else char.encode() for char in name
            )
        byte_token = _BYTE_TOKEN.fullmatch(name)
        if byte_token and kind in (_BYTE, 0):
            return bytes.fromhex(byte_token[1])
        return name.replace("▁", " ").encode()


def read_vocabulary(path: Path) -> Vocabulary | None:
    """Returns None if the file is missing, damaged, no GGUF, or has no vocabulary."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=_BUFFER_BYTES) as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return None
            return _vocabulary(_Reader(file, min(info.st_size, _MAX_METADATA_BYTES)))
    except (OSError, ValueError):
        return None


class _Reader:
    """ValueError if the file states more than there is."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._left_bytes = size_bytes

    def take(self, size_bytes: int) -> bytes:
        self._spend(size_bytes)
        data = self._file.read(size_bytes)
        if len(data) != size_bytes:
            raise ValueError("the file ends early")
        return data

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> bytes:
        return self.take(self.u64())

    def strings(self, count: int) -> list[bytes]:
        return [self.string() for _ in range(count)]

    def skip(self, kind: int) -> None:
        """Skips one value of this type."""
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            kind, count = self.u32(), self.u64()
            if kind == _STRING:
                for _ in range(count):
                    self.string()
            else:
                self._skip_bytes(_size(kind) * count)
        else:
            self._skip_bytes(_size(kind))

    def _skip_bytes(self, size_bytes: int) -> None:
        self._spend(size_bytes)
        self._file.seek(size_bytes, os.SEEK_CUR)

    def _spend(self, size_bytes: int) -> None:
        if size_bytes > self._left_bytes:
            raise ValueError("the file says more than there is")
        self._left_bytes -= size_bytes


def _size(kind: int) -> int:
    if kind not in _SIZES:
        raise ValueError(f"type {kind} is no type, or an array in an array")
    return _SIZES[kind]


def _vocabulary(reader: _Reader) -> Vocabulary | None:
    magic, version, _, keys = struct.unpack("<4sIQQ", reader.take(24))
    if magic != _MAGIC or version not in _VERSIONS or keys > _MAX_KEYS:
        return None
    model: bytes | None = None
    tokens: list[bytes] | None = None
    kinds: array[int] | None = None
    for _ in range(keys):
        name, kind = reader.string().decode(), reader.u32()
        if name == _MODEL and kind == _STRING:
            model = reader.string()
        elif name in (_TOKENS, _TYPES) and kind == _ARRAY:
            kind, count = reader.u32(), reader.u64()
            if count > _MAX_TOKENS or kind != (_STRING if name == _TOKENS else _INT32):
                return None
            if name == _TOKENS:
                tokens = reader.strings(count)
            else:
                kinds = array("i", reader.take(4 * count))
        else:
            reader.skip(kind)
        if None not in (model, tokens, kinds):
            break
    if not tokens:
        return None
    whole = kinds is not None and len(kinds) == len(tokens)
    return Vocabulary(tokens, kinds if whole and kinds else (), model == b"gpt2")
