"""The virtual environment with the packages of the peers, apart from ours.

Versions and hashes are those of requirements-peers.lock, and only wheels are installed: nothing is
compiled here. If the wheel of one peer is not available for this machine or Python, the other is
installed all the same.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run

LOCK = Path(__file__).with_name("requirements-peers.lock")


@dataclass(frozen=True, slots=True)
class Peer:
    """A program and its packages on PyPI; the first one has its library."""

    name: str
    packages: tuple[str, ...]


LLAMA_CPP = Peer("llama.cpp", ("xllamacpp",))
IK_LLAMA_CPP = Peer("ik_llama.cpp", ("ik-llama-cpp-python", "numpy"))
PEERS = (LLAMA_CPP, IK_LLAMA_CPP)


def python_with(
    peers: Sequence[Peer], given: Path | None, report: Report
) -> tuple[Path, dict[str, str]]:
    """An interpreter that can import the peers, and, by name, why it cannot import the others.
    `given` names an environment. One that exists is used as it is, with whatever builds are in it;
    otherwise it is made. None: ours, below the cache.
    """
    folder = given or own_folder()
    python = folder / "bin" / "python"
    if given and python.is_file():
        found = {peer: _version(python, peer.packages[0]) for peer in peers}
        return python, {p.name: f"not in {given}" for p, version in found.items() if not version}
    with locked(folder.with_name(f".{folder.name}.lock"), "another process installs peers", report):
        if not _has_pip(python) and (why := _make(folder, report)):
            return python, {peer.name: why for peer in peers}
        reasons = {peer.name: _install(python, peer, report) for peer in peers}
    return python, {name: reason for name, reason in reasons.items() if reason}


def requirements(packages: Sequence[str], lock: str) -> str:
    """The lines of some packages of a lock file, with every hash. A package may be there for
    several Pythons.
    """
    wanted = "|".join(map(re.escape, packages))
    found = re.findall(rf"^(?:{wanted})==.*(?:\n    --hash=.*)+", lock, re.MULTILINE)
    return "".join(lines.rstrip("\\ ") + "\n" for lines in found)


def own_folder() -> Path:
    """Another lock file or another Python has another environment."""
    version = "{}.{}".format(*sys.version_info)
    name = hashlib.sha256(LOCK.read_bytes() + version.encode()).hexdigest()[:16]
    return config.cache_dir() / "peers" / name


def _has_pip(python: Path) -> bool:
    """pip comes last: without it the environment was begun and not finished."""
    return python.is_file() and run(python, "-c", "import pip").returncode == 0


def _make(folder: Path, report: Report) -> str:
    """Why the environment could not be made; empty if it was."""
    done = run(sys.executable, "-m", "venv", "--clear", folder, report=report)
    return f"no virtual environment: {_last(done.tail)}" if done.returncode else ""


def _install(python: Path, peer: Peer, report: Report) -> str:
    """Why the package could not be installed; empty if it was."""
    lines = requirements(peer.packages, LOCK.read_text(encoding="utf-8"))
    pinned = lines.partition("==")[2].split()[0]
    if _version(python, peer.packages[0]) == pinned:
        return ""
    options = ("--disable-pip-version-check", "--no-input", "install", "--quiet", "--no-deps")
    exact = ("--only-binary", ":all:", "--require-hashes", "-r", "/dev/stdin")
    with report.stage(f"installing {peer.packages[0]} {pinned} into {python.parent.parent}"):
        done = run(python, "-m", "pip", *options, *exact, stdin=lines.encode(), report=report)
    if not done.returncode:
        return ""
    return f"{peer.packages[0]} {pinned} was not installed: {_last(done.tail)}"


def _version(python: Path, package: str) -> str:
    """Empty if it is not installed."""
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = run(python, "-c", ask, package)
    return "" if done.returncode else done.stdout.strip()


def _last(tail: Sequence[str]) -> str:
    said = [line for line in tail if line.strip()]
    return said[-1].strip() if said else "it said nothing"
