"""How much memory this process may use: the machine's, or less where a memory group has a limit, as
a container, a unit or a batch job has. Files on tmpfs count in the group of whoever writes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.config.sizes import MIB, format_size

_PROCESSES_BYTES: Final = 256 * MIB  # `tiering up`, the sidecar, and what a restore holds
_LEAST_GROUP_BYTES: Final = 384 * MIB
_FILES: Final = ("memory.max", "memory.high", "memory.limit_in_bytes")
# Its limit is made from the RAM tier's budget (systemd/units.py), and not the other way round.
_OWN_UNIT: Final = "ollama-tiering.service"
UNIT_HEADROOM_BYTES: Final = 1 << 30  # of its limit, beyond that budget


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """`group` is the file that says so; None: the machine has no more."""

    limit_bytes: int
    group: Path | None = None

    @property
    def shared_bytes(self) -> int:
        """What a model and the RAM tier have between them: in a group the processes of `tiering up`
        take their part of it first.
        """
        return max(0, self.limit_bytes - _PROCESSES_BYTES) if self.group else self.limit_bytes

    def why_no_sidecar(self) -> str:
        """Cause and cure, where it would take from a model what stock has; else empty."""
        if self.group is None or self.limit_bytes >= _LEAST_GROUP_BYTES:
            return ""
        return (
            f"this memory group may have {format_size(self.limit_bytes)} ({self.group}), too "
            "little for a model and a sidecar (give it "
            f"{format_size(_LEAST_GROUP_BYTES)} or more)"
        )


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The smallest of the machine's memory and the limits of all groups that this process is in,
    but for the sidecar's own unit.
    """
    others = [limit for limit in _limits(root, "self") if not _of_own_unit(limit)]
    return _smallest([MemoryLimit(machine_memory_bytes()), *others])


def unit_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Returns the limit of the sidecar's own unit, which a person may have lowered (`systemctl
    edit`).
    """
    own = [limit for limit in _limits(root, "self") if _of_own_unit(limit)]
    return _smallest(own) if own else None


def limit_of(pid: int, root: Path = Path("/")) -> MemoryLimit:
    """The smallest limit of another process, its own unit's among them."""
    return _smallest([MemoryLimit(machine_memory_bytes()), *_limits(root, str(pid))])


def machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _smallest(limits: list[MemoryLimit]) -> MemoryLimit:
    return min(limits, key=lambda limit: limit.limit_bytes)


def _of_own_unit(limit: MemoryLimit) -> bool:
    return limit.group is not None and limit.group.parent.name == _OWN_UNIT


def _limits(root: Path, process: str) -> Iterator[MemoryLimit]:
    for folder in _group_folders(root, root / "proc" / process):
        for name in _FILES:
            if (limit_bytes := _number(folder / name)) is not None:
                yield MemoryLimit(limit_bytes, folder / name)


def _group_folders(root: Path, process: Path) -> Iterator[Path]:
    """Yields the folders of each group, and of those that it lies in: a limit holds for all below
    it.
    """
    of_version_2, of_version_1 = _groups(process)
    for mounted, at, kind, options in _mounts(process):
        if kind == "cgroup2":
            group = of_version_2
        elif kind == "cgroup" and "memory" in options.split(","):
            group = of_version_1
        else:
            continue
        if group is None:
            continue
        top = root / at.lstrip("/")
        # In a container the mount may begin at its own group, or the group's name may be the host's
        below = group[len(mounted.rstrip("/")) :] if _is_in(group, mounted) else ""
        folder = top / below.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _groups(process: Path) -> tuple[str | None, str | None]:
    """Returns the memory groups of versions 2 and 1; None if there is no such group."""
    second = first = None
    for line in _lines(process / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if (number, controllers) == ("0", ""):
            second = group
        elif "memory" in controllers.split(","):
            first = group
    return second, first


def _mounts(process: Path) -> Iterator[tuple[str, str, str, str]]:
    """What of a file system is mounted, where, its type and its own options."""
    for line in _lines(process / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, system = before.split(" "), after.split(" ")
        if len(fields) > 4 and len(system) > 2:
            yield _unescaped(fields[3]), _unescaped(fields[4]), system[0], system[2]


def _is_in(group: str, mounted: str) -> bool:
    within = group == mounted or group.startswith(mounted.rstrip("/") + "/")
    return within and ".." not in group.split("/")


def _unescaped(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _lines(path: Path) -> list[str]:
    try:
        return os.fsdecode(path.read_bytes()).splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is none, or it says `max`
        return None
