"""What `status` says of a llama-server: by the program that the process runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.launch.runner_tree import engine_of
from ollama_tiering.patchset.llama_server import guard, link_tree, links
from ollama_tiering.patchset.llama_server.link_tree import RECORD, LinkTree


@pytest.fixture
def tree(tmp_path: Path) -> LinkTree:
    folder = tmp_path / "v0.40.0-1"
    (folder / links.LIB).mkdir(parents=True)
    (folder / links.PROGRAM).parent.mkdir()
    (folder / links.PROGRAM).touch()
    made = LinkTree(folder, "/usr/bin/ollama", "v0.40.0", "b11002", [], "ours", False, 18)
    (folder / RECORD).write_text(link_tree.text_of(made))
    return made


@pytest.fixture
def process(tree: LinkTree) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that waits, under the name of the tree's llama-server."""
    program = tree.lib / guard.COPY
    shutil.copy("/bin/sh", program)
    with subprocess.Popen([program, "-c", "read x"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def test_the_pin_and_how_far_it_is_tested(process: subprocess.Popen[bytes]) -> None:
    assert engine_of(process.pid) == (
        "llama-server of llama.cpp b11002, not on the list of tested ones: 18 checks passed"
    )


def test_of_another_program_nothing_is_said(
    process: subprocess.Popen[bytes], tree: LinkTree
) -> None:
    assert engine_of(os.getpid()) == ""
    assert engine_of(1) == ""
    assert engine_of(2**22 + 1) == "", "no such process"
    (tree.folder / RECORD).unlink()
    assert engine_of(process.pid) == "", "the tree was removed under it"
