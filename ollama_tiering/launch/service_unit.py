"""The systemd unit of a process, by its control group: it tells a person how to
stop the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

SYSTEM_UNITS: Final = Path("/etc/systemd/system")
_PROCESSES: Final = Path("/proc")
_USER_MANAGER: Final = "user@"


def stop_command(pid: int, processes: Path = _PROCESSES) -> str:
    """Empty for a process that is in no service, such as one started from a shell."""
    try:
        lines = (processes / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    # One line with version 2 of control groups; with version 1 the one that is systemd's own.
    groups = [line for line in lines if line.startswith("0::") or ":name=systemd:" in line]
    parts = groups[0].rpartition(":")[2].split("/") if groups else []
    own = [part for part in parts if part.endswith(".service")]
    if not own or own[-1].startswith(_USER_MANAGER):
        return ""
    by_user = any(part.startswith(_USER_MANAGER) for part in parts)
    return f"systemctl --user stop {own[-1]}" if by_user else f"sudo systemctl stop {own[-1]}"
