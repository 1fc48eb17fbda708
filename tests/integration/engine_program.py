"""Programs of llama_server/tests: compiled with a sanitizer, and spoken with by lines."""

from __future__ import annotations

import atexit
import functools
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

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
    """The test is skipped without a compiler."""
    built = folder / name
    sources = [SOURCE / "tests" / f"{name}.cpp"]
    _compile(sanitizer, *sources, *_library(sanitizer), "-o", built)
    return built


@functools.cache
def _library(sanitizer: str) -> tuple[Path, ...]:
    """Objects of all its sources: most of the time goes into them."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-objects-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sources = sorted((SOURCE / "src").glob("*.cpp"))
    objects = tuple(folder / f"{source.stem}.o" for source in sources)
    for source, built in zip(sources, objects, strict=True):
        _compile(sanitizer, "-c", source, "-o", built)
    return objects


def _compile(sanitizer: str, *words: str | Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sanitize = ["-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = [compiler, "-std=c++17", "-O1", *WARNINGS, *sanitize, "-pthread"]
    subprocess.run([*command, *map(str, words)], check=True, timeout=600)


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
