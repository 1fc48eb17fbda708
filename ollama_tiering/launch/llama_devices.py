"""How `ollama` starts its llama-server, as far as devices depend on it: the variables by which the
loader and GGML find the libraries for a GPU, and what llama-server lists with them.

As in v0.32.15 llm/llama_server.go, `SetupLlamaServerCommandEnv` and `findLlamaServerGPUBackend`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ResultDiffers
from ollama_tiering.patchset.run import run

ENV_BACKEND: Final = "GGML_BACKEND_PATH"
ENV_LIBRARIES: Final = "LD_LIBRARY_PATH"
LIST_SECONDS: Final = 120.0  # Ollama itself waits 30 s for a device that sleeps
_NOT_FOR_GPUS: Final = ("libggml-base", "libggml-cpu")
_MEMORY: Final = re.compile(r" \((\d+) MiB, \d+ MiB free\)$")


@dataclass(frozen=True, slots=True)
class Listed:
    """`lines` are what llama-server printed, without the memory of each device, which is another in
    each run. `has_gpu`: one of them has memory; BLAS is listed, too, with none.
    """

    lines: tuple[str, ...]
    has_gpu: bool


def backends(lib: Path) -> list[Path]:
    """GGML's libraries for GPUs, relative to `lib`: the first of each folder below it."""
    found: dict[Path, Path] = {}
    for path in sorted(lib.glob("*/libggml-*.so*")):
        if not path.name.startswith(_NOT_FOR_GPUS):
            found.setdefault(path.parent, path.relative_to(lib))
    return list(found.values())


def environment(lib: Path, backend: Path | None) -> dict[str, str | None]:
    """What llama-server of `lib` gets. Without `backend`, GGML finds only what lies in `lib`."""
    places = [str(lib), *([str(lib / backend.parent)] if backend else [])]
    places += filter(None, os.environ.get(ENV_LIBRARIES, "").split(os.pathsep))
    return {
        ENV_LIBRARIES: os.pathsep.join(dict.fromkeys(places)),
        ENV_BACKEND: str(lib / backend) if backend else None,
    }


def listed(server: Path, backend: Path | None) -> Listed:
    """ResultDiffers where it does not list its devices, TieringError where it hangs."""
    env = environment(server.parent, backend)
    done = run(server, "--list-devices", env=env, seconds=LIST_SECONDS)
    if done.returncode:
        last = done.tail[-1] if done.tail else f"it ended with {done.returncode}"
        raise ResultDiffers(
            f"{server} --list-devices: {last}", hint="run it by hand; install it again"
        )
    lines = [line.strip() for line in done.stdout.splitlines()]
    memory = [int(found[1]) for line in lines if (found := _MEMORY.search(line))]
    return Listed(tuple(_MEMORY.sub("", line) for line in lines), any(memory))
