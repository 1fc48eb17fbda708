"""How far a Go build is: `go build -v` names each package that it compiles, `go list -deps` names
all.

What the build cache has is not named, so a count ends below the total unless the cache was empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ollama_tiering.patchset.run import run

OWN = "github.com/ollama/ollama/"
_IMPORT_PATH = re.compile(r"[A-Za-z0-9][\w.~-]*(/[\w.~-]+)*")


class PackageCount:
    """Is given every line of a Go build, and calls `show` with "312 of ~599 packages, ml/nn"."""

    def __init__(self, total: int, show: Callable[[str], None]) -> None:
        self.total = total  # 0: not known
        self.compiled = 0
        self._show = show

    def __call__(self, line: str) -> None:
        if is_package(line):
            self.compiled += 1
            of = f" of ~{self.total}" if self.total else ""
            self._show(f"{self.compiled}{of} packages, {line.removeprefix(OWN)}")
        elif line.startswith("go: downloading "):
            self._show(line.removeprefix("go: "))


def is_package(line: str) -> bool:
    """Whether a line of `go build -v` is an import path and nothing else."""
    return _IMPORT_PATH.fullmatch(line) is not None


def package_total(
    go: Path, tree: Path, tags: tuple[str, ...], env: Mapping[str, str | None]
) -> int:
    """How many packages the binary consists of; 0 if Go cannot say, which the build will then
    explain.
    """
    chosen = ("-tags", ",".join(tags)) if tags else ()
    listed = run(go, "list", "-mod=readonly", "-deps", *chosen, ".", cwd=tree, env=env)
    return sum(map(is_package, listed.stdout.splitlines())) if listed.returncode == 0 else 0
