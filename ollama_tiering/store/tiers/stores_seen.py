"""Notes where stores were: a directory that a person named and that had one is not made anew in
silence.

If its file system is not mounted, a directory of the same name would be filled on the disk below.
The state directory remembers each place of a store, and where its file system was mounted.
"""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Final

from ollama_tiering.config import default_local_dir, state_dir
from ollama_tiering.store.tiers.names import VERSION_DIRECTORY
from ollama_tiering.system.directories import UnsafeDirectory, UnusableDirectory, secure_directory
from ollama_tiering.system.durable_file import bounded_content, replace_file
from ollama_tiering.system.filesystems import in_memory, mount_point

log = logging.getLogger(__name__)

_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 20
_MOST_PLACES: Final = 1000


class NotMounted(UnusableDirectory):
    """A directory whose file system is not there, as far as one can tell."""


def record_file() -> Path:
    return state_dir() / "stores.json"


def require_place(directory: Path, *, volatile: bool = False) -> None:
    """NotMounted if making this directory would fill another disk than a person meant who named
    it: only the last part of a path is made. A file system in memory is empty after each boot, so
    there all of it is, and so are the default places. `volatile`: that a store is gone is no news.
    """
    if directory in (default_local_dir(), state_dir() / "ram"):
        return
    existing = next(one for one in (directory, *directory.parents) if one.exists())
    _require_mounted(directory, existing)
    if existing == directory or in_memory(existing):
        return
    above = directory.parent
    if existing != above:
        raise NotMounted(
            f"{directory}: there is no {above}",
            hint=f"is its disk mounted? If it is, make the directory: mkdir -p -m 700 {above}",
        )
    if str(directory) in _read() and not volatile:
        raise NotMounted(
            f"{directory}: it had a store and is gone",
            hint="is its disk mounted? If the store was removed on purpose: "
            f"mkdir -m 700 {directory}",
        )


def remember(directory: Path) -> None:
    """Call it once there is a store. Best effort: without it the next start asks less."""
    known = _read()
    try:
        mounted = str(mount_point(directory))
        if known.get(str(directory)) == mounted:
            return
        known[str(directory)] = mounted
        kept = dict(list(known.items())[-_MOST_PLACES:])
        secure_directory(record_file().parent)
        replace_file(record_file(), json.dumps({"version": _VERSION, "stores": kept}) + "\n")
    except (OSError, UnsafeDirectory) as error:
        log.info("place of a store not remembered: path=%s error=%s", directory, error)


def _require_mounted(directory: Path, existing: Path) -> None:
    if (directory / VERSION_DIRECTORY).exists():
        return
    now = mount_point(existing)
    was = Path(_read().get(str(directory), now))
    if was == now or now not in was.parents:
        return
    raise NotMounted(
        f"{directory}: it had a store on the file system of {was}, and is on that of {now} now",
        hint=f"is its disk mounted? To begin anew here, remove {record_file()}",
    )


def _read() -> dict[str, str]:
    try:
        document = json.loads(bounded_content(record_file(), _MOST_BYTES))
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r} is unknown")
        return {str(path): str(mounted) for path, mounted in document["stores"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            return {}
        log.warning("places of stores not read: path=%s error=%s", record_file(), error)
        return {}
