"""What `tiering patch` and `tiering patch revert` remove of trees of links, and what they leave."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering import cli
from ollama_tiering.launch import llama_up, tree_upkeep
from ollama_tiering.patchset.llama_server import built, source, tree_use
from ollama_tiering.patchset.report import Report
from tests.unit.patchset import fake_installed as fake
from tests.unit.patchset.conftest import git

QUIET = Report(quiet=True)
Command = Callable[..., tuple[int, str, str]]


class World:
    """Two installed ones, and a clone of llama.cpp."""

    def __init__(self, root: Path) -> None:
        self.place, self.other = (fake.installed(root / name) for name in ("one", "other"))
        self.source = fake.llama_source(root / "llama.cpp")
        fake.compiler(root / "compiler")
        git("init", "-q", cwd=self.source)
        self.commit(fake.PIN, self.place, self.other)

    def commit(self, pin: str, *places: Path) -> None:
        (self.source / "pin.txt").write_text(pin)
        git("add", ".", cwd=self.source)
        git("commit", "-qm", pin, cwd=self.source)
        git("tag", pin, cwd=self.source)
        commit = git("rev-parse", "HEAD", cwd=self.source)[:9]
        said = f"#!/bin/sh\necho 'version: {pin[1:]} ({commit})' >&2\n"
        for place in places:
            fake.script(fake.at(place).server, said)

    def update(self, *places: Path) -> None:
        self.commit("b10434", *places)
        for place in places:
            fake.script(place / "bin/ollama", "#!/bin/sh\necho 'ollama version is 0.32.14'\n")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    fake.only_here(monkeypatch)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler/c++"))
    return made


@pytest.fixture
def tiering(world: World, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(args)
        said = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, said.out, said.err

    return run


@pytest.fixture
def patch(world: World, tiering: Command) -> Callable[[Path], Path]:
    def run(place: Path) -> Path:
        """The tree's folder."""
        given = ("--ollama", str(place), "--llama-source", str(world.source))
        code, out, err = tiering("patch", *given)
        assert code == 0, err
        return Path(out.splitlines()[-1]).parents[1]

    return run


def test_the_tree_before_an_update_goes_and_so_does_its_source(
    world: World, patch: Callable[[Path], Path], tiering: Command
) -> None:
    first, other = patch(world.place), patch(world.other)
    assert source.SourceCache(source.cache_folder()).tags() == [fake.PIN]
    world.update(world.place)
    second = patch(world.place)
    assert {tree.folder for tree in built.trees()} == {second, other}
    assert not first.exists()
    assert source.SourceCache(source.cache_folder()).tags() == ["b10434", fake.PIN]
    assert tiering("patch", "revert", "--ollama", str(world.other))[0] == 0
    patch(world.place)  # nothing but that is to be done
    assert source.SourceCache(source.cache_folder()).tags() == ["b10434"]


def test_a_tree_that_serves_stays(
    world: World, patch: Callable[[Path], Path], tiering: Command
) -> None:
    first = patch(world.place)
    with contextlib.ExitStack() as uses:
        assert tree_use.hold(first, uses)
        world.update(world.place)
        second = patch(world.place)
        assert {tree.folder for tree in built.trees()} == {first, second}
        code, _, err = tiering("patch", "revert", "--ollama", "auto")
        assert (code, f"serves from {first}" in err) == (9, True)
        assert {tree.folder for tree in built.trees()} == {first, second}
    patch(world.place)
    assert not first.exists()


HOLDS = """
import contextlib, pathlib, subprocess, sys, time
from ollama_tiering.patchset.llama_server import tree_use
with contextlib.ExitStack() as uses:
    assert tree_use.hold(pathlib.Path(sys.argv[1]), uses)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_killed_up_keeps_nothing(world: World, patch: Callable[[Path], Path]) -> None:
    """Nor does what it has started, and what has its number now."""
    first = patch(world.place)
    world.update(world.place)
    command = [sys.executable, "-c", HOLDS, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        child = int(up.stdout.readline())
        try:
            patch(world.place)
            assert first.is_dir()
            up.kill()
            up.wait()
            patch(world.place)
            assert not first.exists()
        finally:
            up.kill()
            os.kill(child, signal.SIGKILL)


def test_a_tree_of_a_name_that_leads_elsewhere_now_goes(
    world: World, patch: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each version in a folder of its own, and one link to the latest."""
    name = tmp_path / "path/ollama"
    name.parent.mkdir()
    monkeypatch.setenv("PATH", f"{name.parent}:{os.environ['PATH']}")
    name.symlink_to(world.place / "bin/ollama")
    first = patch(world.place)
    name.unlink()
    name.symlink_to(world.other / "bin/ollama")
    second = patch(world.other)
    assert {tree.folder for tree in built.trees()} == {second}
    assert not first.exists()


def test_a_tree_of_an_ollama_that_is_gone_goes(world: World, patch: Callable[[Path], Path]) -> None:
    first = patch(world.place)
    shutil.rmtree(world.place)
    second = patch(world.other)
    assert {tree.folder for tree in built.trees()} == {second}
    assert not first.exists()


def test_half_a_tree_goes_with_the_next_patch_unless_somebody_serves_from_it(
    world: World, patch: Callable[[Path], Path], tiering: Command
) -> None:
    first = patch(world.other)
    (first / "lib/ollama/libllama.so").unlink()
    with contextlib.ExitStack() as uses:
        assert tree_use.hold(first, uses)
        patch(world.place)
        assert first.is_dir()
        assert f"in use       {first}\n" in tiering("patch", "revert", "--ollama", "auto")[1]
        assert first.is_dir()
    patch(world.place)
    assert not first.exists()


def test_revert_leaves_nothing_once_the_last_tree_is_gone(
    world: World, patch: Callable[[Path], Path], tiering: Command
) -> None:
    one, other = patch(world.place), patch(world.other)
    damaged = built.folder() / "v0.31.0-damaged"
    (damaged / "bin").mkdir(parents=True)
    (damaged / built.RECORD).write_text('{"format": 0}')
    (built.folder() / ".building-x/source").mkdir(parents=True)
    mine = built.folder() / "mine/build/bin"  # no tree: somebody's own build
    mine.mkdir(parents=True)
    assert tiering("patch", "revert", "--ollama", str(world.place))[1] == f"removed {one}\n"
    assert source.cache_folder().is_dir()  # of the other tree
    assert damaged.is_dir()
    wanted = [other, built.folder() / ".building-x", damaged, source.cache_folder()]
    dry = tiering("patch", "revert", "--ollama", "auto", "--dry-run")[1]
    assert dry.splitlines() == [f"would remove {path}" for path in wanted]
    assert all(path.is_dir() for path in wanted)
    said = tiering("patch", "revert", "--ollama", "auto")[1]
    assert said.splitlines() == [f"removed {path}" for path in wanted]
    assert not [path for path in wanted if path.exists()]
    assert mine.is_dir()
    assert "nothing to do" in tiering("patch", "revert", "--ollama", "auto")[2]


def test_revert_alone_means_what_up_would_serve(
    world: World,
    patch: Callable[[Path], Path],
    tiering: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = patch(world.place)
    monkeypatch.setenv("OLLAMA_TIERING_BINARY", "/bin/sh")
    assert str(tree) not in tiering("patch", "revert", "--dry-run")[1]
    monkeypatch.delenv("OLLAMA_TIERING_BINARY")
    assert str(tree) not in tiering("patch", "revert", "--dry-run", "--tag", "v0.16.3")[1]
    assert f"removed {tree}\n" in tiering("patch", "revert")[1]
    assert not tree.exists()


def test_an_end_that_is_asked_for_leaves_nothing_unfinished(
    world: World, monkeypatch: pytest.MonkeyPatch, tiering: Command
) -> None:
    monkeypatch.setattr(llama_up, "self_test", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    given = ("--ollama", str(world.place), "--llama-source", str(world.source))
    try:
        assert tiering("patch", *given)[0] != 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in built.folder().iterdir()] == ["lock"]


def test_no_git_is_no_failure_where_nothing_is_fetched(
    world: World, patch: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(world.place)
    monkeypatch.setenv("PATH", "/nowhere")
    (tree,) = built.trees()
    tree_upkeep.remove_superseded(tree, QUIET)
    assert source.cache_folder().is_dir()
