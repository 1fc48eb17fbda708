"""Directories that can be trusted: mode 0700, owned by this user, writable by nobody else.

A path is walked with O_NOFOLLOW, one component at a time below the root, so that nothing planted
below it leads elsewhere. Each directory on the way must be ours, and so must the file at its end.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.system.files import without_links
from ollama_tiering.system.lacking import OF_OTHERS, PROBE_PREFIX, sync
from ollama_tiering.system.ownership import require_ours, why_not_ours

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_ANOTHER_THING: Final = (errno.ELOOP, errno.ENOTDIR, errno.EEXIST)  # a link, a file

_CURES: Final = {
    errno.ENOSPC: "free some space there, or name another directory",
    errno.EDQUOT: "free some of the quota there, or name another directory",
    errno.EROFS: "mount it writable, or name another directory",
    errno.EACCES: "name a directory of your own",
    errno.EPERM: "name a directory of your own",
    errno.EIO: "check that disk, or name a directory on another one",
}

Made = Callable[[tuple[str, ...]], None]


class UnsafeDirectory(ServiceError):
    """A directory for our files or socket that another user could write to."""


class UnusableDirectory(UnsafeDirectory):
    """A directory that cannot be used now, or not by this user; nobody has tampered with it."""


class NotPrivate(UnusableDirectory):
    """A directory on a file system where others may read every file."""


def not_private(directory: Path, info: os.stat_result) -> NotPrivate:
    """`info` is of a file that was made there for nobody else."""
    return NotPrivate(
        f"{directory}: its file system keeps no owners and modes, so others could read what is "
        f"stored (a new file is {stat.filemode(info.st_mode)} of user {info.st_uid})",
        hint="name a directory on another file system (ext4, xfs, btrfs), or mount this one with "
        f"uid={os.geteuid()},umask=077",
    )


def secure_directory(path: Path) -> Path:
    """Makes the directory with mode 0700 if it is missing. UnsafeDirectory if others could write to
    it, UnusableDirectory if it cannot be had. Its name is durable, and so are the names of those
    above it that had to be made.
    """
    try:
        missing = list(itertools.takewhile(lambda one: not one.exists(), (path, *path.parents)))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in missing:
            with contextlib.suppress(OSError):  # one that this user may not list
                sync_directory(made.parent)
        fd = os.open(path, _DIRECTORY)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeDirectory(
                f"{path} is a link", hint=f"name the directory itself: {without_links(path)}"
            ) from None
        place = error.filename or path
        if error.errno in _ANOTHER_THING:
            hint = "name a directory of your own"
            raise UnsafeDirectory(f"{place}: {error.strerror}", hint=hint) from None
        raise UnusableDirectory(f"{place}: {error.strerror}", hint=cure_of(error)) from None
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    if info.st_uid != os.geteuid():
        raise UnusableDirectory(
            f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}",
            hint="name another directory, or remove this one",
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        if (new := _mode_of_new(path)) is not None and new.st_mode & OF_OTHERS:
            raise not_private(path, new)
        raise UnsafeDirectory(
            f"{path} is writable by others ({stat.filemode(info.st_mode)})",
            hint=f"chmod 700 {path}",
        )
    return path


def _mode_of_new(directory: Path) -> os.stat_result | None:
    """What becomes of a file that is made for nobody else; None if none can be made."""
    path = directory / f"{PROBE_PREFIX}{secrets.token_hex(4)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def cure_of(error: OSError) -> str:
    """What a person can do where a directory cannot be had."""
    return _CURES.get(error.errno or 0, "check that path, or name another directory")


def sync_directory(path: Path) -> None:
    """Makes the names in the directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_below(root: Path, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
    """A descriptor of root/parts…. A link on the way is an error (ELOOP or ENOTDIR), and so is a
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
    """Works as `open_below`, for a caller that closes the descriptor. `made` is called with the
    parts that lead to a directory with a new name in it, and must make that name durable; without
    `made` this does so.
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
                        sync(fd)
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
    """FileNotFoundError if it is no regular file or not ours: then nothing of ours is there."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise FileNotFoundError(f"{name} is not a regular file")
    require_ours(info, name)
    return info


def own_directory(entry: os.DirEntry[str]) -> str:
    """Why the entry of a listing is no directory of ours; empty if it is one."""
    if not entry.is_dir(follow_symlinks=False):
        return "it is no directory"
    try:
        return why_not_ours(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return "it is gone"


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """Sorted by name; none if there is no directory."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
