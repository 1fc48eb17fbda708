"""What a demonstration or a benchmark asks of an engine, and the private place it works in.

No engine is named here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from ollama_tiering.config import format_size
from ollama_tiering.errors import TieringError
from ollama_tiering.launch.block_service import BlockService

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, what its first token took, and where the rows of its prompt came from."""

    tokens: tuple[str, ...]
    logprobs: tuple[tuple[tuple[str, float], ...], ...]  # the best few at each step
    seconds_to_first_token: float
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    recomputed_tokens: int


class Driver(Protocol):
    """One engine with one model and a sidecar of its own.

    Not thread-safe; `close` ends all it started.
    """

    name: str
    one_answer: bool  # a cold run must give the bits of a hit

    def start(self) -> None:
        """Sidecar and engine run, the model is loaded."""

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        """Greedy; returns when the engine has also stored what it will store of it."""
        ...

    def unload(self) -> None:
        """Takes the model out of memory and loads it again; both processes stay."""

    def restart(self) -> None:
        """Ends engine and sidecar the way a person does, then starts both again and loads the
        model.
        """

    def close(self) -> None: ...


class Scratch:
    """Private directories for one run: files below the temporary directory, the RAM tier on tmpfs
    where there is one.
    """

    def __init__(self, purpose: str, *, keep: bool = False) -> None:
        prefix = f"tiering-{purpose}-"
        self.keep = keep
        self.root = Path(tempfile.mkdtemp(prefix=prefix))
        shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else self.root
        self.ram = Path(tempfile.mkdtemp(prefix=prefix, dir=shared))
        (self.root / "home").mkdir(mode=0o700)
        (self.root / "config.toml").touch()

    @property
    def model_file(self) -> Path:
        return self.root / "model.gguf"

    @property
    def models(self) -> Path:
        """Ollama's own directory of models."""
        return self.root / "models"

    @property
    def blocks(self) -> Path:
        """The local tier."""
        return self.root / "blocks"

    def need_bytes(self, size_bytes: int) -> None:
        """TieringError where the disk has less room."""
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes < size_bytes:
            raise TieringError(
                f"{format_size(size_bytes)} are needed below {self.root.parent}, and "
                f"{format_size(free_bytes)} are free",
                hint="TMPDIR names another place",
            )

    def environment(self) -> dict[str, str | None]:
        """No setting of the person's own Ollama or sidecar leaks in, nothing of ours goes to their
        home.
        """
        own: dict[str, str | None] = {
            name: None for name in os.environ if name.startswith(("OLLAMA_", "XDG_"))
        }
        home, settings = self.root / "home", self.root / "config.toml"
        return own | {"HOME": str(home), "OLLAMA_TIERING_CONFIG": str(settings)}

    def sidecar(self, *, ram_gb: float = 2, local_gb: float = 8) -> BlockService:
        ram = ("--ram-dir", self.ram, "--ram-gb", str(ram_gb))
        local = ("--local", self.blocks, "--local-gb", str(local_gb))
        return BlockService(
            self.root / "s.sock",
            self.root / "sidecar.log",
            (*ram, *local),
            self.environment(),
            leashed=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.keep:
            return
        # An error names the logs in here as the place to look; an interrupt does not.
        if isinstance(error, TieringError):
            self.model_file.unlink(missing_ok=True)
            left = [self.ram, self.models, self.blocks]
        else:
            left = [self.ram, self.root]
        for directory in left:
            shutil.rmtree(directory, ignore_errors=True)
