"""One file of C or C++, compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path


def object_of(command: list[str], source: Path, target: Path) -> Path:
    """`command`: the compiler and its options. A failure shows what the compiler says."""
    done = subprocess.run(
        [*command, "-c", str(source), "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, f"{source.name}: {done.stderr[:2000]}"
    return target
