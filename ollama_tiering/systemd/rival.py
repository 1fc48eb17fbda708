"""An `ollama.service` that would take the port of ours. Ollama's own installer enables and starts
it again with each update, also where a person had disabled it.

Our unit has no `Conflicts=`: then that start would end our server, and nobody would be told. As it
is, ours keeps the port that it has, and whoever looks is told what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ollama_tiering.errors import UsageError
from ollama_tiering.launch.address import Address, parse_address
from ollama_tiering.launch.service_unit import UNIT_NAME
from ollama_tiering.systemd.stock import UNIT_DIRECTORIES
from ollama_tiering.systemd.units import variable_in

_HOST: Final = re.compile(r"^Environment=.*?\bOLLAMA_HOST=([^\"'\s]+)", re.MULTILINE)
_ENABLED: Final = ("*.wants", "*.requires")


def rival(root: Path | None, user_units: Path, address: str) -> str:
    """What is enabled for the same port, and the cure; empty where nothing is. `address` is that of
    our server.
    """
    folders = [*map(Path, UNIT_DIRECTORIES), user_units]
    for folder in folders:
        if is_enabled(root, folder):
            texts = [text for one in folders for text in _texts(one, root)]
            if _address(texts).port == parse_address(address).port:
                is_own = folder.name == "user"  # …/systemd/user, of a user's own manager
                command = f"systemctl{' --user' if is_own else ''} disable --now ollama"
                return (
                    f"{UNIT_NAME} is enabled for the same port {parse_address(address).port}, so "
                    "after the next restart it may have it (an update of Ollama enables it): "
                    + (command if is_own else f"sudo {command}")
                )
    return ""


def is_enabled(root: Path | None, folder: Path) -> bool:
    """Whether a folder of units has it started with the machine, or at a login."""
    here = root / folder.relative_to("/") if root else folder
    return any((by / UNIT_NAME).is_symlink() for kind in _ENABLED for by in here.glob(kind))


def address_in(unit: Path) -> str:
    """Says where the server of a unit that install wrote listens; empty if there is none."""
    try:
        return variable_in(unit.read_text(encoding="utf-8"), "OLLAMA_HOST")
    except OSError:
        return ""


def _address(texts: list[str]) -> Address:
    """The last one counts, as for systemd."""
    said = [host for text in texts for host in _HOST.findall(text)]
    try:
        return parse_address(said[-1]) if said else Address()
    except UsageError:
        return Address()


def _texts(folder: Path, root: Path | None) -> Iterator[str]:
    here = root / folder.relative_to("/") if root else folder
    for path in (here / UNIT_NAME, *sorted(here.glob(f"{UNIT_NAME}.d/*.conf"))):
        try:
            yield path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
