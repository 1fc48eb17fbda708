"""Real memory groups with a limit, where this user may make them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOTS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


class MemoryGroup:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entering(self, *command: str) -> list[str]:
        """The command, in this group from its first instruction on."""
        enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.folder), *command]

    @property
    def killed(self) -> int:
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                lines = (self.folder / name).read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        raise AssertionError("the group does not say whom it has killed")


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """The test is skipped where none can be made."""
    for root, name in _ROOTS.items():
        folder = root / f"ollama-tiering-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / name).write_text(str(limit_bytes))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield MemoryGroup(folder)
        finally:
            end = time.monotonic() + 20
            while (folder / "cgroup.procs").read_text() and time.monotonic() < end:
                time.sleep(0.05)
            folder.rmdir()
        return
    pytest.skip("no memory group can be made here")
