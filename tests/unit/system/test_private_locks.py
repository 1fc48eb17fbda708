"""Nobody but its owner can hold a lock of ours: whoever may open a file may lock it."""

from __future__ import annotations

import ast
import contextlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import ollama_tiering
from ollama_tiering.kernels import compile as compiling
from ollama_tiering.kernels import library
from ollama_tiering.launch import running_up
from ollama_tiering.launch.address import free_address
from ollama_tiering.patchset.llama_server import tree_use
from ollama_tiering.patchset.llama_server.link_tree import RECORD
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.system.locks import lock_file, open_to_lock

HOLD = """
import fcntl, os, sys
try:
    fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
except PermissionError:
    sys.exit(13)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def _tree(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as uses:
        assert tree_use.hold(path.parent, uses)
        yield


@contextlib.contextmanager
def _sidecar(path: Path) -> Iterator[None]:
    fd = lock_file(path, "it")
    yield
    os.close(fd)


@contextlib.contextmanager
def _kernels(path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLLAMA_TIERING_CACHE", str(path.parents[1]))
        patch.setattr(compiling, "compile_library", lambda *_args: None)
        library.build()
        yield


@contextlib.contextmanager
def _up(path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_up, "record_path", lambda _address: path)
        with running_up.hold(free_address()):
            yield


HOLDERS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "lock": lambda path: locked(path, "busy", Report(quiet=True)),
    RECORD: _tree,
    "sidecar.lock": _sidecar,
    "up-1.json": _up,
    "kernels/lock": _kernels,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_lock_is_its_owners_alone_also_one_that_an_older_version_made(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(0o644)
    with HOLDERS[name](path):
        assert mode(path) == 0o600


@pytest.mark.parametrize("name", ["lock", "up-1.json"])
def test_a_new_lock_lies_in_a_folder_of_its_owner(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new/one" / name
    old = os.umask(0o000)
    try:
        with HOLDERS[name](path):
            assert mode(path) == 0o600
            assert (mode(path.parent), mode(path.parent.parent)) == (0o700, 0o700)
    finally:
        os.umask(old)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_user_cannot_hold_it() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "lock")
        path.touch(0o644)
        python = "/usr/bin/python3"
        if not Path(python).exists():
            pytest.skip("no Python that every user may run")
        hold = [python, "-c", HOLD, str(path)]
        assert subprocess.run(hold, user=65534, check=False).returncode == 0, "as it was"
        os.close(open_to_lock(path))
        assert subprocess.run(hold, user=65534, check=False).returncode == 13


def test_every_flock_is_of_a_file_that_was_opened_so() -> None:
    """A new one must open its file by `open_to_lock`, or call `for_owner_only`."""
    package = Path(ollama_tiering.__file__).parent
    lockers = [
        file
        for file in package.rglob("*.py")
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("flock", "lockf")
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        )
    ]
    assert len(lockers) >= 5
    for file in lockers:
        text = file.read_text(encoding="utf-8")
        assert "open_to_lock(" in text or "for_owner_only(" in text, file
