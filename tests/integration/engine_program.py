"""Programs of llama_server/tests: compiled with a sanitizer, and spoken with by lines."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report

SOURCE = Path(__file__).parents[2] / "llama_server"
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wshadow",
    "-Wconversion",
    "-Wsign-conversion",
    "-Werror",
]
SANITIZERS = ["address,undefined", "thread"]
SECONDS = 30.0


def compiled(name: str, sanitizer: str, folder: Path) -> Path:
    """In `folder`. What was compiled of these sources is kept in the cache, for all processes and
    later runs: it takes a minute. The test is skipped without a compiler.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", "-O1", "-g", *WARNINGS, f"-fsanitize={sanitizer}"]
    command += ["-fno-sanitize-recover=all", "-pthread"]
    seen = hashlib.sha256(" ".join(command).encode())
    seen.update(subprocess.check_output([compiler, "--version"]))
    for file in sorted(file for part in ("src", "tests") for file in (SOURCE / part).glob("*.*")):
        seen.update(file.name.encode() + b"\0" + file.read_bytes())
    kept = config.cache_dir() / "engine-program-test" / sanitizer.replace(",", "-")
    kept.mkdir(parents=True, exist_ok=True)
    built = kept / seen.hexdigest()[:16]
    with locked(kept.with_name(f"{kept.name}.lock"), "another test compiles it", Report()):
        for other in set(kept.iterdir()) - {built}:
            shutil.rmtree(other)  # of earlier sources
        built.mkdir(exist_ok=True)
        if not (built / name).exists():
            parts = SOURCE / "tests" / f"{name}.cpp", *_library(command, built)
            fresh = _compile(command, built / f"{name}.new", *parts)
            fresh.rename(built / name)
        # Another clone's tests may remove the other at any time.
        return Path(shutil.copy2(built / name, folder / name))


def _library(command: list[str], folder: Path) -> list[Path]:
    """Objects of all its sources, on all cores: most of the time goes into them."""
    sources = sorted((SOURCE / "src").glob("*.cpp"))
    whole = folder / "objects"
    if not whole.exists():
        fresh = folder / "objects.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(_compile, command, fresh / f"{source.stem}.o", "-c", source)
                for source in sources
            ]
        for job in jobs:
            job.result()
        fresh.rename(whole)
    return [whole / f"{source.stem}.o" for source in sources]


def _compile(command: list[str], made: Path, *words: str | Path) -> Path:
    subprocess.run([*command, *words, "-o", made], check=True, timeout=600)
    return made


class Talk:
    """A running program. A context manager: it must end well."""

    def __init__(self, program: Path, path: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [program, path, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.greeting = self._line()

    def say(self, *words: object) -> str:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        killed = self.process.poll() is not None or kind is not None
        if kind is not None:
            self.process.kill()
        self.process.communicate(timeout=SECONDS)
        assert killed or self.process.returncode == 0  # sanitizers found nothing
