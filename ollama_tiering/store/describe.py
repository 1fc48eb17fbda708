"""What a namespace is the digest of, as `namespace.json` beside its blocks says, checked."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Final

from ollama_tiering.store.dirs import open_below
from ollama_tiering.store.fs_tier import DESCRIPTION_NAME, VERSION_DIRECTORY
from ollama_tiering.store.key import NamespaceId, namespace_digest

Fields = tuple[tuple[str, str], ...]

_MAX_BYTES: Final = 1 << 20
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_description(directory: Path, namespace: NamespaceId) -> Fields:
    """(name, value) pairs in the order they are hashed; none when there is no valid one."""
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


def checked_fields(pairs: list[tuple[object, object]], namespace: NamespaceId) -> Fields:
    """The pairs, if they are text and the namespace is their digest; else none."""
    fields = tuple((n, v) for n, v in pairs if isinstance(n, str) and isinstance(v, str))
    try:
        right = len(fields) == len(pairs) and namespace_digest(fields) == namespace
    except UnicodeEncodeError:  # lone surrogates
        return ()
    return fields if right else ()
