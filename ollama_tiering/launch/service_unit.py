"""The systemd unit of a process, by its control group: it tells a person how to stop the process,
or how to have a patched server in the place of the one of Ollama's own unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

SYSTEM_UNITS: Final = Path("/etc/systemd/system")
UNIT_NAME: Final = "ollama.service"  # of Ollama's installer and of distributions
DROP_IN: Final = Path(f"{UNIT_NAME}.d") / "tiering.conf"  # ours, in a folder of units
_PROCESSES: Final = Path("/proc")
_USER_MANAGER: Final = "user@"
_PLACES: Final = (
    SYSTEM_UNITS,
    Path("/usr/local/lib/systemd/system"),
    Path("/usr/lib/systemd/system"),
    Path("/lib/systemd/system"),
)


def stop_command(pid: int, processes: Path = _PROCESSES) -> str:
    """Empty for a process that is in no service, such as one started from a shell."""
    unit, by_user = _unit(pid, processes)
    command = "systemctl --user stop" if by_user else "sudo systemctl stop"
    return f"{command} {unit}" if unit else ""


def replace_command(*, system: bool) -> str:
    """It puts the patched server in the place of the one that `ollama.service` starts."""
    command = "sudo tiering systemd install" if system else "tiering systemd install --user"
    return f"{command} --replace --now"


def has_system_unit(places: Sequence[Path] = _PLACES) -> bool:
    return any((place / UNIT_NAME).exists() for place in places)


def way_in(pid: int | None, processes: Path = _PROCESSES, places: Sequence[Path] = _PLACES) -> str:
    """What a person may do instead, where `pid` is the server of `ollama.service`; else empty. None
    is a process of another user, which that of the service usually is.
    """
    unit, by_user = _unit(pid, processes) if pid else (UNIT_NAME, False)
    if unit != UNIT_NAME or not (pid or has_system_unit(places)):
        return ""
    if has_drop_in(pid, processes, places):
        return f"use it: it starts the patched one already ({places[0] / DROP_IN})"
    return f"have {UNIT_NAME} start the patched one: {replace_command(system=not by_user)}"


def has_drop_in(
    pid: int | None, processes: Path = _PROCESSES, places: Sequence[Path] = _PLACES
) -> bool:
    """Whether `pid`, or a process of another user, is the server of the system's `ollama.service`,
    and that has ours.
    """
    of_system = pid is None or _unit(pid, processes) == (UNIT_NAME, False)
    return of_system and (places[0] / DROP_IN).exists()


def unit_name(pid: int) -> str:
    """Empty for a process that is in no service."""
    return _unit(pid, _PROCESSES)[0]


def _unit(pid: int, processes: Path) -> tuple[str, bool]:
    """Its name, and whether a user's own manager has it; empty if it has no unit."""
    try:
        lines = (processes / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return "", False
    # One line with version 2 of control groups; with version 1 the one that is systemd's own.
    groups = [line for line in lines if line.startswith("0::") or ":name=systemd:" in line]
    parts = groups[0].rpartition(":")[2].split("/") if groups else []
    own = [part for part in parts if part.endswith(".service")]
    if not own or own[-1].startswith(_USER_MANAGER):
        return "", False
    return own[-1], any(part.startswith(_USER_MANAGER) for part in parts)
