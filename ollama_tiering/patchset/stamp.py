"""What a finished build was made of, in a file beside it. As long as that is unchanged, a build
does nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ollama_tiering.patchset import identity, tools
from ollama_tiering.patchset.manifest import Patchset

if TYPE_CHECKING:
    from ollama_tiering.patchset.plan import BuildOptions

FORMAT = 2

_NOT_DECISIVE = ("jobs", "allow_untested")


def state_of(
    options: BuildOptions,
    kind: str,
    flags: dict[str, str],
    patchset: Patchset,
    go: Path,
    gpu: list[list[str | int]] | None = None,
) -> str:
    """Changes with all that decides the result and is quick to look at. `flags` are ours for the
    compilers: of a native build they name the processor. `gpu`: the libraries of a stock Ollama.
    """
    chosen = {k: v for k, v in asdict(options).items() if k not in _NOT_DECISIVE}
    decisive: dict[str, object] = {
        "format": FORMAT,
        "patchset": patchset.digest,
        "options": chosen,
        "kind": kind,
        "go": tools.go_version(go),
        "environment": identity.flag_environment(),
        "flags": flags,
    }
    if gpu:  # only then: other builds stay as they are
        decisive["gpu"] = gpu
        decisive["options"] = chosen | {"cuda": "stock"}  # by whatever name the place is called
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def is_current(path: Path, binary: Path, state: str) -> bool:
    """Whether the binary is the one that was built in this state, and was not changed since."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        same = saved["stamp"] == state and saved["binary"] == _fingerprint(binary)
        return bool(same and saved["build"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def write(path: Path, binary: Path, state: str, build_id: str) -> None:
    """`build_id` is the build's name (identity.py), for callers that ask which builds are here."""
    content = {"stamp": state, "binary": _fingerprint(binary), "build": build_id}
    path.write_text(json.dumps(content), encoding="utf-8")


def _fingerprint(binary: Path) -> list[int]:
    info = binary.stat()
    return [info.st_size, info.st_mtime_ns]
