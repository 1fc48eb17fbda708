"""Who else could change what a service runs.

Whoever may write to a program, or to a folder on the way to it, chooses what is run in the name of
the service's user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path


def foreign(folder: Path, users: Collection[int]) -> Path | None:
    """What in `folder`, or on the way to it, somebody but these users (uids) may change; None if
    there is nothing. What a link leads to counts, too, and what is not there yet does not. OSError
    where it cannot be looked at.

    Above the folder only an owner, and a right of everybody to write, count: /usr/local belongs to
    a group on some systems. A sticky folder such as /tmp keeps others from replacing what is in it.
    """
    return _foreign(folder.resolve(), users, set())


def _foreign(path: Path, users: Collection[int], seen: set[Path]) -> Path | None:
    """`path` is without links."""
    seen.add(path)
    for step in reversed(path.parents):
        if not step.exists():
            return None
        info = step.lstat()
        open_to_all = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
        if info.st_uid not in users or open_to_all:
            return step
    for here in _all_of(path):
        info = here.lstat()
        if not stat.S_ISLNK(info.st_mode):
            if info.st_uid not in users or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return here
            continue
        target = here.resolve()
        inside = any(target.is_relative_to(known) for known in seen)
        if not inside and target.exists() and (found := _foreign(target, users, seen)):
            return found
    return None


def _all_of(path: Path) -> Iterator[Path]:
    """Itself, and all below it; nothing if it is not there."""

    def fail(error: OSError) -> None:
        raise error

    if path.exists():
        yield path
    if path.is_dir():
        for place, folders, files in os.walk(path, onerror=fail):
            yield from (Path(place, name) for name in sorted((*folders, *files)))
