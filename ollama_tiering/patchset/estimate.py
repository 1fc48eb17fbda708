"""How long a first build takes, and how much disk: said before it starts. Measured by
measure/first_run.py.
"""

from __future__ import annotations

import os
from pathlib import Path

NATIVE_CPU_SECONDS = 335  # docs/measurements/first-run.md
NATIVE_DISK_BYTES = 1_000_000_000
OTHER_DISK_BYTES = 3_000_000_000  # every instruction set, or a GPU


def needed_bytes(native: bool) -> int:
    """Disk for the source, Go's modules and caches, and the binary."""
    return NATIVE_DISK_BYTES if native else OTHER_DISK_BYTES


def first_build(tag: str, native: bool, jobs: int | None, folder: Path) -> str:
    """One line: how long and how much, on this machine's cores."""
    cores = min(jobs or usable_cores(), usable_cores())
    disk = f"{needed_bytes(native) / 1e9:.0f} GB below {folder}"
    if not native:
        return f"building {tag} for many processors or a GPU: a long time ({cores} cores), {disk}"
    minutes = max(1, round(NATIVE_CPU_SECONDS / cores / 60))
    return f"building {tag} for this processor: about {minutes} min on {cores} cores, {disk}"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def is_first(build_cache: Path) -> bool:
    """Whether Go's build cache is nearly empty, so that everything will be compiled."""
    return not build_cache.is_dir() or sum(1 for _ in build_cache.glob("*/*-d")) < 100
