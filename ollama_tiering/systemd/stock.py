"""An installed stock Ollama: its binary, its unit and that unit's drop-ins, without ours. They are
read, never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ollama_tiering.launch.service_unit import UNIT_NAME
from ollama_tiering.systemd.manifest import file_digest
from ollama_tiering.systemd.stock_unit import is_ours

PROGRAMS: Final = ("/usr/local/bin/ollama", "/usr/bin/ollama", "/bin/ollama")
UNIT_DIRECTORIES: Final = (
    "/etc/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/etc/systemd/user",
)


def digests(root: Path | None, user_units: Path) -> dict[str, str]:
    """SHA-256 of each of its files, by the path on that machine."""
    found: dict[str, str] = {}
    seen: set[tuple[int, int]] = set()
    for path in _candidates(root, user_units):
        here = root / path.relative_to("/") if root else path
        try:
            info = here.stat()
            if here.is_file() and not is_ours(here) and (info.st_dev, info.st_ino) not in seen:
                found[str(path)] = file_digest(here)
                seen.add((info.st_dev, info.st_ino))  # /bin is /usr/bin
        except OSError:  # not there, or not ours to read: then not ours to write either
            continue
    return found


def has_unit(found: dict[str, str]) -> bool:
    return any(Path(path).name == UNIT_NAME for path in found)


def _candidates(root: Path | None, user_units: Path) -> Iterator[Path]:
    yield from map(Path, PROGRAMS)
    for directory in (*map(Path, UNIT_DIRECTORIES), user_units):
        yield directory / UNIT_NAME
        drop_ins = directory / f"{UNIT_NAME}.d"
        here = root / drop_ins.relative_to("/") if root else drop_ins
        if here.is_dir():
            yield from (drop_ins / entry.name for entry in sorted(here.iterdir()))
