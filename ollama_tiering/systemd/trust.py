"""Who else could change what a service runs.

Whoever may write to a program, or to a folder on the way to it, chooses what is run in the name of
the service's user.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_MOST_LINKS: Final = 40  # as the kernel follows them


def foreign(folder: Path, users: Collection[int]) -> Path | None:
    """What in `folder`, or on the way to it, somebody but these users (uids) may change; None if
    there is nothing. What a link leads to counts, too, and what is not there yet does not. OSError
    where it cannot be looked at.

    Above the folder only an owner, and a right of everybody to write, count: /usr/local belongs to
    a group on some systems. A sticky folder such as /tmp keeps others from replacing what is in it.
    """
    return _foreign(folder, users, set())


def _foreign(named: Path, users: Collection[int], seen: set[Path]) -> Path | None:
    path = named.resolve()
    seen.add(path)
    for step in _way(named):
        if step == path:
            continue  # below
        if not os.path.lexists(step):
            return None
        info = step.lstat()
        others_may = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
        is_link = stat.S_ISLNK(info.st_mode)  # whose mode says nothing
        if info.st_uid not in users or (others_may and not is_link):
            return step
    for here in _all_of(path):
        info = here.lstat()
        if not stat.S_ISLNK(info.st_mode):
            if info.st_uid not in users or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return here
            continue
        target = here.resolve()
        inside = any(target.is_relative_to(known) for known in seen)
        leads = here.parent / here.readlink()
        if not inside and target.exists() and (found := _foreign(leads, users, seen)):
            return found
    return None


def _way(path: Path) -> Iterator[Path]:
    """Every folder and every link through which the system comes to `path`, and itself at last."""
    left, here, links = [*path.absolute().parts[1:]], Path("/"), 0
    yield here
    while left:
        part = left.pop(0)
        step = here.parent if part == ".." else here / part
        yield step
        if not step.is_symlink():
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = step.readlink()
        here = Path("/") if target.is_absolute() else here
        left = [part for part in target.parts if part != "/"] + left


def _all_of(path: Path) -> Iterator[Path]:
    """Itself, and all below it; nothing if it is not there."""

    def fail(error: OSError) -> None:
        raise error

    if path.exists():
        yield path
    if path.is_dir():
        for place, folders, files in os.walk(path, onerror=fail):
            yield from (Path(place, name) for name in sorted((*folders, *files)))
