"""The deployment's secret, with which blocks in a directory that several machines share are
authenticated.

It is a file of 64 hex digits, readable by its owner only, and made at first use. Whoever has it can
make blocks that every sidecar with the same key believes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ConfigError
from ollama_tiering.store.tiers.authenticity import KEY_BYTES, Authenticity
from ollama_tiering.system.directories import UnsafeDirectory, secure_directory
from ollama_tiering.system.lacking import sync

log = logging.getLogger(__name__)

_CONTENT: Final = re.compile(rb"[0-9a-f]{%d}\n?" % (2 * KEY_BYTES))
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What a file system without hard links says.
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def remote_authenticity(path: Path | None, *, mac: bool, make: bool) -> Authenticity:
    """The Authenticity of the remote tier. ConfigError for a key file that cannot be used. A
    missing file is made; with `make` false (for tools that only look) every file then counts as not
    authentic.
    """
    if not mac:
        return Authenticity(None)
    if path is None:
        raise ConfigError("no key file for the remote tier", hint="name sidecar.remote_key_file")
    key = read_key(path)
    if key is None and make:
        key = _make_key(path)
    return Authenticity(
        key or secrets.token_bytes(KEY_BYTES),
        f"to use blocks of other machines, give all of them one key: copy it to {path} (mode 0600) "
        "and restart the sidecar; to go without: sidecar.remote_mac = false",
    )


def read_key(path: Path) -> bytes | None:
    """Returns None if there is no file. ConfigError if it cannot be used."""
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "make it a file of your own") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise _unusable(path, "it is no regular file", "put the key's file there")
    with os.fdopen(fd, "rb") as file:
        if info.st_uid != os.geteuid():
            raise _unusable(path, f"it belongs to user {info.st_uid}", f"chown {os.geteuid()} it")
        if info.st_mode & _OF_OTHERS:
            reason = f"others may read or write it ({stat.filemode(info.st_mode)})"
            raise _unusable(path, reason, f"chmod 600 {path}; if others had it, make a new one")
        content = file.read(4096)
    if not _CONTENT.fullmatch(content):
        reason = f"it is not {2 * KEY_BYTES} hex digits"
        raise _unusable(path, reason, "copy it again from the machine that has it")
    return bytes.fromhex(content.decode().strip())


def _make_key(path: Path) -> bytes:
    """Makes a key that is durable before it is used. If two processes make one at once, both get
    the same. Who may write to the directory does not matter, because the file itself is checked at
    every read.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if not path.parent.is_dir():
            secure_directory(path.parent)
        text = secrets.token_hex(KEY_BYTES).encode() + b"\n"
        _write_new(temporary, text)
        with contextlib.suppress(FileExistsError):
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _write_new(path, text)
            log.info("key of the remote tier made, copy it to its other machines: path=%s", path)
        temporary.unlink()
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync(directory)
        finally:
            os.close(directory)
    except (OSError, UnsafeDirectory) as error:
        reason = error.message if isinstance(error, UnsafeDirectory) else error.strerror
        raise _unusable(
            path, reason or str(error), "name another place: sidecar.remote_key_file"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    key = read_key(path)
    assert key is not None
    return key


def _write_new(path: Path, content: bytes) -> None:
    """Writes durably a file that did not exist. If this fails, nothing stays."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            sync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _unusable(path: Path, reason: str, cure: str) -> ConfigError:
    return ConfigError(
        f"{path}: the key of the remote tier cannot be used: {reason}",
        hint=f"{cure} (or refuse keys by name: sidecar.remote_mac = false)",
    )
