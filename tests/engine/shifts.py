"""Answers across a context shift, where stock itself may answer wrongly.

Stock may begin to shift a full context before the logits of the last batch have been read
(docs/design.md, "A shift waits until the last logits have been read"). On a busy machine 1 to 8 of
20 to 40 first tokens were wrong with tiering off. So no test takes stock's answer as its reference
once a context is full: it takes that of a server that waits, or compares two with tiering on.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.engine.harness import Result, Server

_OF_EACH: Final = ("OLLAMA_HOST", "OLLAMA_MODELS")


@contextlib.contextmanager
def waiting_for_logits(stock: Server) -> Iterator[Server]:
    """A server as `stock` is, but with tiering on and nobody on its socket: it stores and restores
    nothing, and its shifts wait.
    """
    of_stock = stock.environment
    env = {n: v for n, v in of_stock.items() if n.startswith("OLLAMA_") and n not in _OF_EACH}
    models = Path(of_stock["OLLAMA_MODELS"])
    with (
        tempfile.TemporaryDirectory(dir=Path(of_stock["HOME"]).parent) as folder,
        Server(
            *(stock.binary, Path(folder), models),
            socket=Path(folder) / "nobody",
            env=env,
            threads=stock.threads,
        ) as server,
    ):
        yield server


def across_a_shift(
    stock: Server, model: str, prompt: str, before: str | None = None, **options: Any
) -> Result:
    """The answer when `before`, by default the prompt itself, is in memory."""
    first = {name: value for name, value in options.items() if name != "predict"}
    with waiting_for_logits(stock) as server:
        server.generate(model, before or prompt, predict=1, **first)
        return server.generate(model, prompt, **options)
