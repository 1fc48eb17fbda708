"""The `llama-server` of a tree: at each start it looks whether our library still fits."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.errors import MissingTool, UnsupportedUpstream
from ollama_tiering.patchset.llama_server import guard, links
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, InstalledOllama
from tests.unit.patchset import fake_installed as fake

SERVER = """#!/bin/sh
echo "$0"; echo $$; echo "$*"
echo "${LD_LIBRARY_PATH-none}"; echo "${GGML_BACKEND_PATH-none}"
echo "${OLLAMA_KV_TIER_ENGINE_SOCKET-none}"
"""


@dataclass
class Started:
    program: Path
    same_process: bool
    arguments: str
    library_path: str
    backend: str
    socket: str
    complaint: str


class World:
    def __init__(self, root: Path) -> None:
        fake.installed(root / "in stalled's $HOME")
        self.installed: InstalledOllama = fake.at(root / "in stalled's $HOME")
        fake.script(self.installed.server, SERVER)
        (self.installed.lib / "libllama.so.0").symlink_to("libllama.so")
        self.tree = root / "tr ee"
        library = root / "library"
        library.write_text("our library")
        state = self.installed.state()
        links.lay(self.tree, links.entries(self.installed, state, "v0.32.15", library))

    @property
    def lib(self) -> Path:
        return self.tree / "lib/ollama"

    def start(self, *arguments: str, **env: str) -> Started:
        process = subprocess.Popen(
            [self.lib / "llama-server", *arguments],
            env={"PATH": os.environ["PATH"], ENV_ENGINE_SOCKET: "/socket", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said, complaint = process.communicate(timeout=60)
        assert process.returncode == 0, complaint
        program, pid, *rest = said.splitlines()
        return Started(Path(program), int(pid) == process.pid, *rest, complaint)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_copy_is_started_as_it_would_be_without_the_guard(world: World) -> None:
    backend = str(world.lib / "cuda_v12/libggml-cuda.so")
    started = world.start("--model", "a b", LD_LIBRARY_PATH="/x:y", GGML_BACKEND_PATH=backend)
    assert started.program == world.lib / guard.COPY
    assert started.same_process  # Ollama ends it by its number
    assert (started.arguments, started.complaint) == ("--model a b", "")
    assert (started.library_path, started.backend, started.socket) == ("/x:y", backend, "/socket")
    assert world.start().library_path == "none"


def _older(path: Path) -> None:
    """By the least that a clock can tell."""
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns - 1))


CHANGES: dict[str, Callable[[InstalledOllama], object]] = {
    "another content": lambda found: (found.lib / "libllama.so").write_text("updated"),
    "another size": lambda found: _grow(found.lib / "libggml-base.so"),
    "another time": lambda found: _older(found.lib / "libllama-common.so"),
    "a library is gone": lambda found: (found.lib / "libmtmd.so").unlink(),
    "another of a GPU": lambda found: (found.lib / "cuda_v12/libggml-cuda.so").write_text("new"),
    "the library that ours replaces": lambda found: (found.lib / IMPLEMENTATION).write_text("new"),
    "another program": lambda found: _older(found.program),
}


def _grow(path: Path) -> None:
    info = path.stat()
    path.write_text(path.read_text() + " ")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("change", list(CHANGES))
def test_after_an_update_the_installed_one_is_started(world: World, change: str) -> None:
    CHANGES[change](world.installed)
    started = world.start("--model", "a b")
    assert started.program == world.installed.server
    assert started.same_process
    assert (started.arguments, started.socket) == ("--model a b", "none")
    assert "updated or changed since it was patched as v0.32.15" in started.complaint
    assert "run `tiering patch`" in started.complaint


def test_nothing_of_the_tree_is_found_by_the_installed_one(world: World) -> None:
    (world.installed.lib / "libllama.so").write_text("updated")
    lib, installed = world.lib, world.installed.lib
    started = world.start(
        LD_LIBRARY_PATH=f"{lib}:{lib}/cuda_v12:/usr/lib:{lib}-other",
        GGML_BACKEND_PATH=f"{lib}/cuda_v12/libggml-cuda.so",
    )
    assert started.library_path == f"{installed}:{installed}/cuda_v12:/usr/lib:{lib}-other"
    assert started.backend == f"{installed}/cuda_v12/libggml-cuda.so"
    bare = world.start()
    assert (bare.library_path, bare.backend) == ("none", "none")


@pytest.mark.parametrize("name", [guard.COPY, IMPLEMENTATION])
def test_in_half_a_tree_the_installed_one_is_started(world: World, name: str) -> None:
    """As a cleaner of caches leaves it."""
    (world.lib / name).unlink()
    started = world.start("--model", "a b", LD_LIBRARY_PATH=str(world.lib))
    assert started.program == world.installed.server
    assert (started.library_path, started.socket) == (str(world.installed.lib), "none")
    assert "is not whole any more" in started.complaint
    assert "run `tiering patch`" in started.complaint


def test_where_files_cannot_be_compared_the_installed_one_is_started(world: World) -> None:
    started = world.start(PATH="/nowhere")
    assert started.program == world.installed.server
    assert "no `stat` that says size and time of a file" in started.complaint
    assert "updated" not in started.complaint


OTHER_STATS = {
    "rounded": "sed -E 's/^([0-9]+ [0-9]+\\.[0-9]{4})[0-9]*/\\1/'",
    "seconds alone": "sed -E 's/^([0-9]+ [0-9]+)\\.[0-9]*/\\1/'",
    "none at all": "sed -E 's/^([0-9]+) [0-9.]+/\\1 %.9Y/'",
}


@pytest.mark.parametrize("kind", list(OTHER_STATS))
def test_another_stat_than_that_of_gnu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """That of uutils writes a time with fewer places."""
    real = shutil.which("stat")
    fake.script(tmp_path / "bin/stat", f'#!/bin/sh\n{real} "$@" | {OTHER_STATS[kind]}\n')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    if kind == "none at all":
        with pytest.raises(MissingTool, match="`stat` does not say") as caught:
            World(tmp_path)
        assert caught.value.hint == "install GNU coreutils"
        return
    world = World(tmp_path)
    assert world.start().program == world.lib / guard.COPY
    _grow(world.installed.lib / "libggml-base.so")
    assert world.start().program == world.installed.server


def test_a_version_that_is_shell_is_none(world: World) -> None:
    state = world.installed.state()
    for version in ("v1; reboot", "$(reboot)", "v1'", "v1\n", ""):
        with pytest.raises(UnsupportedUpstream, match="no version of Ollama"):
            guard.text(world.installed, state, version)
    assert guard.text(world.installed, state, "v0.33.0-rc1+dev_2")


def test_the_guard_is_laid_last(world: World) -> None:
    """An install over a tree that serves replaces one file after the other."""
    state, library = world.installed.state(), world.lib / IMPLEMENTATION
    *others, last = links.entries(world.installed, state, "v0.32.15", library)
    assert last.path == links.LIB / "llama-server"
    assert last.text == guard.text(world.installed, state, "v0.32.15")
    assert links.LIB / IMPLEMENTATION in {entry.path for entry in others}
