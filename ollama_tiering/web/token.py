"""The secret of the page: who has it may open the page from anywhere."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ConfigError
from ollama_tiering.system.directories import secure_directory
from ollama_tiering.system.durable_file import bounded_content, replace_file

FILE_NAME: Final = "web.token"
_BYTES: Final = 32
_CONTENT: Final = re.compile(rb"[A-Za-z0-9_-]{43}\n?")


def page_token(state: Path) -> str:
    """Reads the token in the state directory; makes one, with mode 0600, if there is none.
    ConfigError for a file that others may read, that is another user's, or that holds no token.
    """
    path = secure_directory(state) / FILE_NAME
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    token = secrets.token_urlsafe(_BYTES)
    replace_file(path, f"{token}\n")
    return token


def _read(path: Path) -> str:
    info = path.lstat()
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.filemode(info.st_mode)
        raise _unusable(path, f"others may use it ({mode}, user {info.st_uid})")
    try:
        content = bounded_content(path, 2 * _BYTES)
    except (OSError, ValueError):
        raise _unusable(path, "it cannot be read") from None
    if not _CONTENT.fullmatch(content):
        raise _unusable(path, "it holds no token")
    return content.decode().strip()


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", hint="remove it: the next start makes another token")
