"""go.mod is changed by `go mod edit -require`, go.sum by appending pinned sums. Never by `go mod
tidy`, which rewrites what is not ours.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from ollama_tiering.errors import PatchConflict
from ollama_tiering.patchset.go_env import go_environment
from ollama_tiering.patchset.manifest import GoRequire
from ollama_tiering.patchset.run import run

GO_MOD, GO_SUM = "go.mod", "go.sum"


def go_version_wanted(go_mod: bytes) -> tuple[int, ...]:
    """The `go` line of a go.mod as numbers: (1, 24, 1)."""
    match = re.search(rb"^go (\d+(?:\.\d+)*)", go_mod, re.MULTILINE)
    return tuple(int(part) for part in match[1].split(b".")) if match else (0,)


def render(
    go_mod: bytes, go_sum: bytes, needs: tuple[GoRequire, ...], go: str | Path
) -> dict[str, bytes]:
    """Both files with `needs` in them; unchanged if there are none."""
    if not needs:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / GO_MOD
        file.write_bytes(go_mod)
        edits = [f"-require={need.module}@{need.version}" for need in needs]
        done = run(
            go,
            "mod",
            "edit",
            *edits,
            file,
            cwd=Path(scratch),
            env=go_environment() | {"GOFLAGS": ""},
        )
        if done.returncode:
            raise PatchConflict(
                f"go mod edit failed: {'; '.join(done.tail[-3:])}",
                hint="is go.mod as upstream left it?",
            )
        edited = file.read_bytes()
    return {GO_MOD: edited, GO_SUM: _with_sums(go_sum, needs)}


def _with_sums(go_sum: bytes, needs: tuple[GoRequire, ...]) -> bytes:
    present = set(go_sum.decode().splitlines())
    wanted = [
        line
        for need in needs
        for line in (
            f"{need.module} {need.version} {need.sum}",
            f"{need.module} {need.version}/go.mod {need.mod_sum}",
        )
    ]
    for line in wanted:
        name = line.rpartition(" ")[0]
        if other := next(
            (have for have in present if have.startswith(name + " ") and have != line), None
        ):
            raise PatchConflict(
                f"go.sum has another sum: {other}", hint="the pinned sum or the source is forged"
            )
    joint = b"" if go_sum.endswith(b"\n") or not go_sum else b"\n"
    added = "".join(f"{line}\n" for line in wanted if line not in present)
    return go_sum + joint + added.encode()
