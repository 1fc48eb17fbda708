"""The devices that a tree's llama-server names must be those of the installed one."""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.errors import ResultDiffers
from ollama_tiering.launch import llama_devices
from ollama_tiering.launch.self_test.store import NOT_KEPT
from ollama_tiering.patchset.llama_server.installation import InstalledOllama


def require_same_devices(installed: InstalledOllama, tree: InstalledOllama) -> list[Path | None]:
    """Compares them with GGML's library for each kind of device in turn, as `ollama` does it.
    Returns those with which there is a GPU; None stands for the libraries beside llama-server.
    """
    found: list[Path | None] = []
    for backend in (None, *llama_devices.backends(installed.lib)):
        one, other = (llama_devices.listed(side.server, backend) for side in (installed, tree))
        if one != other:
            raise ResultDiffers(
                f"self-test: the installed llama-server names the devices {list(one.lines)}, ours "
                f"{list(other.lines)}" + (f" (with {backend})" if backend else ""),
                hint=NOT_KEPT,
            )
        if one.has_gpu:
            found.append(backend)
    return found
