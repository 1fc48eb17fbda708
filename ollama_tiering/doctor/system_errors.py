"""What a person is told of an error of the operating system: cause, place and cure."""

from __future__ import annotations

import contextlib
import errno
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ollama_tiering.system import own_process
from ollama_tiering.system.filesystems import is_full

_DEBUG: Final = "run it again with --debug to see what failed"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_PRINTING: Final = ("click/utils.py", "rich/console.py")
_CURES: Final = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or have your quota raised",
    errno.EROFS: "that disk is mounted read-only: mount it for writing, or name another place",
    errno.EACCES: "run this as the owner of that path, or name another",
    errno.EPERM: "run this as the owner of that path, or name another",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ENOMEM: "end other programs, or allow this one more memory",
}


def cause_and_cure(error: OSError) -> tuple[str, str]:
    """The message names the path, or where it was printed to. What the system tells without a path
    (a write to a file that is open) says which of our disks are full, or which line of ours it was.
    """
    said = error.strerror or str(error)
    number = error.errno or 0
    if error.filename is not None:
        paths = [str(name) for name in (error.filename, error.filename2) if name]
        return f"{' to '.join(paths)}: {said}", _CURES.get(number, "check that path and its owner")
    lines = traceback.extract_tb(error.__traceback__)
    if any(line.filename.endswith(_PRINTING) for line in lines):
        own_process.silence_stdout()
        return f"standard output: {said}", "print to a place that takes it"
    if number in _FULL:
        full = list(_full_places())
        where = f" at {', '.join(full)}" if full else ", but none of the usual places is full"
        return f"{said}{where}", _CURES[number] if full else _DEBUG
    where = f"{lines[-1].filename.rpartition('/')[2]}:{lines[-1].lineno}" if lines else "no line"
    return f"{said} (in {where})", _CURES.get(number, _DEBUG)


def _full_places() -> Iterator[str]:
    from ollama_tiering import config
    from ollama_tiering.errors import TieringError
    from ollama_tiering.store import ram_place

    places = [config.state_dir(), config.data_dir(), config.cache_dir(), config.run_dir()]
    places += [ram_place.SHARED_MEMORY, Path(tempfile.gettempdir())]
    with contextlib.suppress(TieringError):
        settings = config.load_sidecar()
        places += [settings.local_dir, *filter(None, (settings.ram_dir, settings.remote_dir))]
    yield from (str(place) for place in dict.fromkeys(places) if is_full(place))
