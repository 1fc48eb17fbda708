"""What a build that failed says: the compiler's first errors, and the cure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ollama_tiering.errors import BuildError
from ollama_tiering.patchset.progress import is_package
from ollama_tiering.patchset.run import Finished
from ollama_tiering.patchset.tree import disk_full

SHOWN_LINES: Final = 12
SHOWN_ERRORS: Final = 6
SHOWN_CHARACTERS: Final = 300  # of a line: that of a linker names all objects
_ERROR: Final = re.compile(
    r"error:|undefined reference|undefined symbol|multiple definition|No rule to make|CMake Error|"
    r"cannot find -l|\.go:\d+",
    re.IGNORECASE,
)
_NO_WARNING: Final = re.compile(r"\bwarning:|\bnote:")
_NO_NETWORK: Final = (
    r"dial tcp|no such host|connection refused|TLS handshake|i/o timeout|proxyconnect|"
    r"module lookup disabled by GOPROXY|reading https?://\S+: [45]\d\d "
)


class DoesNotCompile(BuildError):
    """The code did not compile or link. Other flags may help, unlike with a full disk."""


def failed(program: str, done: Finished, log: Path, folder: Path) -> BuildError:
    """`log` has all that the program said."""
    if done.disk_was_full:
        return disk_full(folder)
    shown = "\n".join(f"  {line}" for line in _told(done, log))
    message = f"{program} failed with exit code {done.returncode}; log: {log}"
    if cure := _weather(done):
        return BuildError(message, hint=cure, told=shown)
    cure = "read the log; to start over delete the folder it lies in"
    return DoesNotCompile(message, hint=cure, told=shown)


def first_error(error: BuildError) -> str:
    """One line: what a compiler said first, else the message."""
    lines = error.message.splitlines()
    found = next((line for line in lines[1:] if _ERROR.search(line)), lines[0])
    return found.strip()


def _told(done: Finished, log: Path) -> list[str]:
    try:
        said = log.read_text(encoding="utf-8", errors="replace").rpartition("\n+ ")[2].splitlines()
    except OSError:
        said = list(done.tail)
    errors = [line for line in said[1:] if _ERROR.search(line) and not _NO_WARNING.search(line)]
    if errors:
        return [_clipped(line.strip()) for line in dict.fromkeys(errors)][:SHOWN_ERRORS]
    return [_clipped(line) for line in done.tail if not is_package(line)][-SHOWN_LINES:]


def _clipped(line: str) -> str:
    if len(line) <= SHOWN_CHARACTERS:
        return line
    half = SHOWN_CHARACTERS // 2
    return f"{line[:half]} … {line[-half:]}"


def _weather(done: Finished) -> str:
    """The cure of what has nothing to do with the code; else empty."""
    text = "\n".join(done.tail)
    if re.search(_NO_NETWORK, text):
        return "Go modules could not be downloaded: check the network or GOPROXY, then run again"
    if re.search(r"signal: killed|Killed signal|out of memory", text):
        return "memory ran out: run again with --jobs 1"
    return ""
