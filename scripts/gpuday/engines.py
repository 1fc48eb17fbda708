"""Steps of a day with a GPU that run what there is without one: the tests of three engines on a
device, and the measurement of llama-server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.gpuday.asking import MODEL
from scripts.gpuday.steps import (
    CUDA_LLAMA_CPP,
    CUDA_OLLAMA,
    DONE,
    FAILED,
    LACKING,
    PROGRAM,
    ROOT,
    SERVER,
    STOCK_SERVER,
    Day,
    Outcome,
)

TESTS = "tests/engine_gpu"
AT_ONCE = 12  # tests; the models are small
LENGTHS = "8192,32768"  # tokens
NO_GPU = "no GPU: what stands in is no backend that these can name"


def engines(day: Day) -> Outcome:
    """tests/engine_gpu: after an unload, a restart and a kill -9 answers are those of memory."""
    if day.stand_in:
        return Outcome(LACKING, why=NO_GPU)
    servers = day.work / "llama-server"
    places = {
        "OLLAMA_TIERING_TEST_BINARY": day.work / PROGRAM / "ollama",
        "OLLAMA_TIERING_TEST_LLAMA_SERVER": servers / SERVER,
        "OLLAMA_TIERING_TEST_LLAMA_SERVER_STOCK": servers / STOCK_SERVER,
        "OLLAMA_TIERING_TEST_GPU": day.work / CUDA_OLLAMA,
        "OLLAMA_TIERING_TEST_GPU_LLAMA_CPP": day.work / CUDA_LLAMA_CPP,
    }
    env = {name: str(place) for name, place in places.items() if place.exists()}
    # plugins of that Python may warn, which is not ours to fail for
    words = ("-p", "no:cacheprovider", "-W", "default", "-n", str(AT_ONCE), "-v", "-rs")
    said = _said(day.out / "engines.txt", "pytest", *words, TESTS, **env)
    lines = [line for line in said if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    passed = " passed" in said[-1] and "failed" not in said[-1] and "error" not in said[-1]
    why = "" if passed else said[-1]
    return Outcome(DONE if passed else FAILED, ["```text", *lines, said[-1], "```"], why=why)


def llama_server(day: Day) -> Outcome:
    """measure.llama_server, all layers on the device."""
    if day.stand_in:
        return Outcome(LACKING, why=NO_GPU)
    servers, record = day.work / "llama-server", day.out / "llama-server.md"
    words: list[str | Path] = ["--program", servers / SERVER, "--stock", servers / STOCK_SERVER]
    words += ["--model", day.work / MODEL, "--gpu", day.work / CUDA_LLAMA_CPP]
    words += [
        "--tokens",
        LENGTHS,
        "--ram-gb",
        "24",
        "--rounds",
        "1",
        "--threads",
        str(min(8, os.cpu_count() or 1)),
    ]
    said = _said(day.out / "llama-server.txt", "measure.llama_server", *words, "--out", record)
    if not record.is_file():
        return Outcome(FAILED, ["```text", *said[-20:], "```"], why=said[-1])
    return Outcome(DONE, record.read_text(encoding="utf-8").split("\n\n", 2)[-1].splitlines())


def _said(to: Path, module: str, *words: str | Path, **env: str) -> list[str]:
    """Its lines. They are in the file as they come, so that a limit of time loses none."""
    command = [sys.executable, "-m", module, *words]
    with to.open("wb") as file:
        subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, stdout=file, stderr=file)
    text = to.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"]
