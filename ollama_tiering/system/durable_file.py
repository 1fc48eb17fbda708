"""Small files that are replaced as a whole, durably, and read up to a limit."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, Final

from ollama_tiering.system.files import naming
from ollama_tiering.system.lacking import sync

# What taking a document of JSON apart may raise, where somebody else has written it.
MALFORMED: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def replace_file(path: Path, text: str) -> None:
    """A reader sees either the old or the new content, even after a power cut. OSError passes."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with naming(path), os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            sync(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(directory)
    finally:
        os.close(directory)


def bounded_content(path: Path, max_bytes: int) -> bytes:
    """ValueError if it is no regular file or too long; ELOOP for a link."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("not a regular file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError("the file is too long")
    return data


def versioned_document(path: Path, max_bytes: int, version: int) -> dict[str, Any]:
    """The JSON object in the file, of this version. OSError, or one of MALFORMED."""
    document: dict[str, Any] = json.loads(bounded_content(path, max_bytes))
    if document["version"] != version:
        raise ValueError(f"version {document['version']} is not known")
    return document
