"""`namespace.json` beside the blocks of a namespace: its description. It is written once."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from ollama_tiering.store.block.description import Fields, checked_fields
from ollama_tiering.store.block.key import NamespaceId
from ollama_tiering.store.tiers.names import DESCRIPTION_NAME, TMP_SUFFIX, VERSION_DIRECTORY
from ollama_tiering.system.directories import open_below
from ollama_tiering.system.lacking import sync

_MAX_BYTES: Final = 1 << 20
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_description(directory: Path, namespace: NamespaceId) -> Fields:
    """Pairs (name, value) in the order in which they are hashed; none if there is no valid file."""
    try:
        with open_below(directory, (VERSION_DIRECTORY, namespace.hex())) as below:
            fd = os.open(DESCRIPTION_NAME, _READ, dir_fd=below)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return ()
            data = file.read(_MAX_BYTES + 1)
    except OSError:
        return ()
    try:
        document = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        return ()
    return checked_fields(list(document.items()) if isinstance(document, dict) else [], namespace)


def write_description(
    directory: Path, place: tuple[str, ...], text: bytes, *, durable: bool
) -> bool:
    """Writes the file in root/place…, and makes that directory. False if there is a file already.
    `durable`: after a power cut the file is complete or absent.
    """
    with open_below(directory, place, create=True) as below:
        try:
            os.stat(DESCRIPTION_NAME, dir_fd=below, follow_symlinks=False)
        except FileNotFoundError:
            name = f".{secrets.token_hex(4)}{TMP_SUFFIX}"
            fd = os.open(name, _NEW, 0o600, dir_fd=below)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(text)
                    file.flush()
                    if durable:
                        sync(fd)
                os.rename(name, DESCRIPTION_NAME, src_dir_fd=below, dst_dir_fd=below)
            except BaseException:
                os.unlink(name, dir_fd=below)
                raise
            if durable:
                sync(below)
            return True
    return False
