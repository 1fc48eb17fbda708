"""The folder of a self-test's files: one whose name leaves room for a socket's."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ollama_tiering.config import SOCKET_PATH_MAX_BYTES
from ollama_tiering.errors import ServiceError

FOLDER: Final = "kvt-"
_PART: Final = re.compile(r"store|models|tmp\w{8}")  # what lies in it
_LEFT_SECONDS: Final = 6 * 3600.0
_DEEPEST: Final = len("/kvt-12345678/store/run/s.engine")  # a socket, below the folder of all


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    place = short_place()
    sweep(place)
    with tempfile.TemporaryDirectory(prefix=FOLDER, dir=place) as folder:
        yield Path(folder)


def short_place() -> Path:
    """Names a folder in which a socket can lie: TMPDIR may have too long a name."""
    for place in map(Path, (tempfile.gettempdir(), "/tmp", "/dev/shm")):
        short = len(os.fsencode(place)) + _DEEPEST <= SOCKET_PATH_MAX_BYTES
        if short and os.access(place, os.W_OK | os.X_OK):
            return place
    raise ServiceError(
        f"self-test: {tempfile.gettempdir()} is too long a name for a folder with a socket",
        hint="set TMPDIR to a shorter one",
    )


def sweep(place: Path) -> None:
    """What a self-test of this user left there that was killed, and is long over."""
    for left in place.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            info = left.lstat()
            is_ours = info.st_uid == os.geteuid()
            parts = {path.name for path in left.iterdir()} if is_ours else set()
            is_old = time.time() - info.st_mtime > _LEFT_SECONDS
            if is_ours and is_old and parts and all(_PART.fullmatch(part) for part in parts):
                shutil.rmtree(left, ignore_errors=True)
