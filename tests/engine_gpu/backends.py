"""GGML's backends of GPUs, as the tests find them: which libraries, and what a log calls them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering import config


@dataclass(frozen=True)
class Backend:
    """`folder`: of its libraries in an installed Ollama. `env`: so that one device is used. `two`:
    so that two are; empty where a machine must have them. `prompt_seconds`: what some hundreds of
    tokens of a small model take, about.
    """

    name: str
    folder: str
    env: Mapping[str, str]
    two: Mapping[str, str]
    prompt_seconds: float

    @property
    def library(self) -> str:
        return f"libggml-{self.name.lower()}.so"

    def devices(self, env: Mapping[str, str]) -> str:
        """As llama-server wants them named."""
        count = 2 if self.two and self.two.items() <= env.items() else 1
        return ",".join(f"{self.name}{number}" for number in range(count))


VULKAN = Backend(
    "Vulkan",
    "vulkan",
    {
        "OLLAMA_VULKAN": "1",
        # A device of type CPU is used only where it is named.
        "GGML_VK_VISIBLE_DEVICES": "0",
        # Compiled pipelines are kept for other tests.
        "XDG_CACHE_HOME": str(config.cache_dir() / "vulkan" / "pipelines"),
    },
    {"GGML_VK_VISIBLE_DEVICES": "0,0"},
    2.0,
)
CUDA = Backend("CUDA", "cuda_v13", {"CUDA_VISIBLE_DEVICES": "0"}, {}, 0.02)


def backend_of(libraries: Path) -> Backend | None:
    """The one whose library lies in this folder."""
    return next((one for one in (VULKAN, CUDA) if (libraries / one.library).is_file()), None)


def install(binary: Path, libraries: Path, backend: Backend, folder: Path) -> Path:
    """An Ollama in `folder` that finds these libraries, as an installed one has them."""
    lib = folder / "lib/ollama"
    (lib / backend.folder).mkdir(parents=True)
    (folder / "bin").mkdir()
    for file in libraries.glob("*.so*"):
        if file.name.startswith("libggml-base."):
            shutil.copy2(file, lib, follow_symlinks=False)
        else:  # with what it needs: gigabytes, where it is NVIDIA's
            (lib / backend.folder / file.name).symlink_to(file.resolve())
    return Path(shutil.copy2(binary, folder / "bin/ollama"))


def with_device(
    program: Path, libraries: Path, folder: Path, backend: Backend, env: Mapping[str, str]
) -> Path:
    """A program that starts this llama-server with a device. It has to be the first option: else
    the library is not looked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "llama-server"
    script.write_text(
        f"#!/bin/sh\nexport GGML_BACKEND_PATH='{libraries / backend.library}'\n"
        f"export LD_LIBRARY_PATH='{libraries}'${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"
        f"exec '{program}' --device {backend.devices(env)} -ngl 99 \"$@\"\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return script
