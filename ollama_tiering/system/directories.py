"""Directories that may be trusted: made 0700, owned by this user, writable by nobody else.

A path is walked with O_NOFOLLOW one component at a time below the root, so nothing planted below it
leads elsewhere, and each directory on the way has to be ours, as the file at its end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.system.ownership import require_ours, why_not_ours

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Made = Callable[[tuple[str, ...]], None]


class UnsafeDirectory(ServiceError):
    """A directory for files or a socket of ours that another user could write to."""


def secure_directory(path: Path) -> Path:
    """Makes the directory 0700 if it is missing; UnsafeDirectory when others could write to it.

    Its name is durable, and so are those of the directories before it that had to be made.
    """
    try:
        missing = list(itertools.takewhile(lambda one: not one.exists(), (path, *path.parents)))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in missing:
            with contextlib.suppress(OSError):  # one that this user may not list
                sync_directory(made.parent)
        fd = os.open(path, _DIRECTORY)
    except OSError as error:
        raise UnsafeDirectory(
            f"{path}: {error.strerror}", hint="name a directory of your own, not a link"
        ) from None
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    if info.st_uid != os.geteuid():
        raise UnsafeDirectory(
            f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}",
            hint="name another directory, or remove this one",
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeDirectory(
            f"{path} is writable by others ({stat.filemode(info.st_mode)})",
            hint=f"chmod 700 {path}",
        )
    return path


def sync_directory(path: Path) -> None:
    """Makes the names in it durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_below(root: Path, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
    """Descriptor of root/parts…; links on the way are an error (ELOOP or ENOTDIR), and so is a
    directory that is not ours (NotOurs).
    """
    fd = walk_below(root, parts, create=create)
    try:
        yield fd
    finally:
        os.close(fd)


def walk_below(
    root: Path, parts: tuple[str, ...], *, create: bool = False, made: Made | None = None
) -> int:
    """The same, for a caller that closes it. `made` hears of the parts that lead to a directory
    with a new name in it, and sees to it that the name becomes durable; without it that is done.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for index, part in enumerate(parts):
            try:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                    if made is not None:
                        made(parts[:index])
                    else:
                        os.fsync(fd)
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
            require_ours(os.fstat(fd), part)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def regular_file(name: str, flags: int, below: int) -> Iterator[tuple[int, os.stat_result]]:
    fd = os.open(name, flags, dir_fd=below)
    try:
        yield fd, checked_regular(fd, name)
    finally:
        os.close(fd)


def checked_regular(fd: int, name: str) -> os.stat_result:
    """FileNotFoundError when it is no regular file or not ours: nothing of ours is there."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise FileNotFoundError(f"{name} is not a regular file")
    require_ours(info, name)
    return info


def own_directory(entry: os.DirEntry[str]) -> str:
    """Why the entry of a listing is no directory of ours; empty when it is one."""
    if not entry.is_dir(follow_symlinks=False):
        return "it is no directory"
    try:
        return why_not_ours(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return "it is gone"


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """By name; none where there is no directory (any more)."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
