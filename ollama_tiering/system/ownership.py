"""Which files below a tier are this deployment's own: those of its user that nobody else may write.

What is not is treated as absent: it is never read, never handed out, and never removed either. It
takes room, so its bytes count. Somebody who can write a file can forge a block, checksums and all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from typing import Final

log = logging.getLogger(__name__)

_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_MAX_COUNTED: Final = 10_000  # names that are remembered


class NotOurs(FileNotFoundError):
    """Of another user, or others may write it: nothing of ours is there."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(errno.ENOENT, reason, name)
        self.reason = reason


def why_not_ours(info: os.stat_result) -> str:
    """What is wrong with a file or directory; empty when it is ours."""
    if info.st_uid != os.geteuid():
        return f"it belongs to user {info.st_uid}, not to {os.geteuid()}"
    if info.st_mode & _OTHERS_MAY_WRITE:
        return f"others may write it ({stat.filemode(info.st_mode)})"
    return ""


def require_ours(info: os.stat_result, name: str) -> None:
    if reason := why_not_ours(info):
        raise NotOurs(name, reason)


class Refused:
    """Files and directories of one tier that were refused: the first is said, each is counted."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._names: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def is_not_ours(self, path: str, info: os.stat_result) -> bool:
        reason = why_not_ours(info)
        if reason:
            self.note(path, reason)
        return bool(reason)

    @contextlib.contextmanager
    def noted(self, path: str) -> Iterator[None]:
        try:
            yield
        except NotOurs as error:
            self.note(path, error.reason)
            raise

    def note(self, path: str, reason: str) -> None:
        if path in self._names:
            return
        if not self._names:
            log.warning(
                "not ours, neither used nor removed: tier=%s path=%s reason=%s; if it should be "
                "ours: chown it to the sidecar's user and chmod go-w (more like it are counted)",
                self._tier,
                path,
                reason,
            )
        if len(self._names) < _MAX_COUNTED:
            self._names[path] = None
