"""What decides a build, as one digest. The folder of a finished build has its name."""

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

FORMAT = 3

DIGITS = 16
_NOT_DECISIVE = ("jobs", "allow_untested", "cuda")  # what `cuda` came to is in the kind


def state_of(
    options: BuildOptions,
    kind: str,
    flags: dict[str, str],
    patchset: Patchset,
    go: Path,
    build_id: str,
    *,
    gpu: list[list[str | int]] | None = None,
    shim: str = "",
) -> str:
    """Hex digits, which change with all that decides the result. `flags` are those of cgo: of a
    native build they name the processor. `build_id` is the build's name, which covers what the
    compilers are. `gpu`: the libraries of a stock Ollama. `shim`: the sources of that for GPUs.
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
        "build": build_id,
        "shim": shim,
    }
    if gpu:
        decisive["gpu"] = gpu
        decisive["options"] = chosen | {"cuda_arch": None}  # that is for our own kernels
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:DIGITS]
