"""A tree from which a server runs is not removed, whoever has started that server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.patchset.llama_server import tree_use
from ollama_tiering.patchset.llama_server.link_tree import RECORD


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "cache/v1-0"
    (folder / "bin").mkdir(parents=True)
    (folder / RECORD).write_text("{}")
    shutil.copy2("/bin/sleep", folder / "bin/ollama")
    return folder


@pytest.fixture
def server(tree: Path) -> Iterator[subprocess.Popen[bytes]]:
    """As a shell of a service starts it: without a lock."""
    process = subprocess.Popen([tree / "bin/ollama", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_tree_whose_program_runs_stays(tree: Path, server: subprocess.Popen[bytes]) -> None:
    assert not tree_use.remove_unused(tree)
    with pytest.raises(ServiceError, match=f"serves from {tree}"):
        tree_use.remove_all([tree])
    assert (tree / "bin/ollama").is_file()
    server.kill()
    server.wait()
    assert tree_use.remove_unused(tree)
    assert not tree.exists()


def test_one_of_which_another_has_the_beginning_goes(
    tree: Path, server: subprocess.Popen[bytes]
) -> None:
    """That of the other begins alike."""
    shorter = tree.with_name("v1")
    shorter.mkdir()
    (shorter / RECORD).write_text("{}")
    assert server.poll() is None
    assert tree_use.remove_unused(shorter)


def test_a_program_that_was_replaced_meanwhile_still_runs(
    tree: Path, server: subprocess.Popen[bytes]
) -> None:
    (tree / "bin/ollama").unlink()
    assert server.poll() is None
    assert not tree_use.remove_unused(tree)
