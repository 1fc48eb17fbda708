"""When an installed Ollama that was updated takes over from its tree, and when it does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ollama_tiering.launch import computing
from ollama_tiering.launch.outdated import (
    LONGEST_SECONDS,
    SETTLED_SECONDS,
    Outdated,
    of_tree,
)
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from tests.unit.patchset import fake_installed as fake


class World:
    """An installed Ollama with a tree that was made for it, a clock, and llama-servers."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.installation = fake.at(fake.installed(root / "1"))
        self.name = root / "ollama"
        self.name.symlink_to(self.installation.program)
        self.made_for = self.installation.state()
        self.now = 1000.0
        self.work = 0.0
        self.said: list[str] = []
        monkeypatch.setattr(computing, "_processor_seconds", lambda _pid: {7: self.work})
        self.outdated = Outdated(
            self.installation,
            self.name,
            lambda: self.installation.state() == self.made_for,
            self.said.append,
            lambda: self.now,
        )
        self.looks(1)

    def update(self, content: str = "updated") -> None:
        (self.installation.lib / "libllama.so").write_text(content)

    def looks(self, seconds: float, *, computing: bool = False) -> float | None:
        """After how many seconds it is due, looking every two; None: not within so many."""
        started = self.now
        while self.now - started < seconds:
            self.now += 2
            self.work += 1.9 if computing else 0.01
            if self.outdated.due(1):
                return self.now - started
        return None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_what_fits_serves_for_ever(world: World) -> None:
    assert world.looks(10_000) is None
    assert world.said == []


def test_after_an_update_it_is_due_once_nothing_changes_any_more(world: World) -> None:
    world.update()
    assert world.looks(SETTLED_SECONDS - 2) is None
    world.update("and updated again")
    assert world.looks(100) == pytest.approx(SETTLED_SECONDS, abs=3)
    (said,) = world.said
    assert f"{world.name} was updated or changed" in said


@pytest.mark.parametrize("part", ["bin/ollama", "lib/ollama/llama-server"])
def test_what_is_not_whole_never_takes_over(world: World, part: str) -> None:
    path = world.installation.program.parents[1] / part
    text = path.read_text()
    path.unlink()
    assert world.looks(10_000) is None
    fake.script(path, text)
    assert world.looks(100) is not None


def test_a_version_in_another_folder_takes_over_once_it_is_whole(
    world: World, tmp_path: Path
) -> None:
    """The old one is removed, and the name leads to the new one."""
    shutil.rmtree(world.installation.program.parents[1])
    assert world.looks(1000) is None
    newer = fake.at(fake.installed(tmp_path / "2"))
    world.name.unlink()
    world.name.symlink_to(newer.program)
    assert world.looks(4) is None
    (newer.lib / "libllama.so").write_text("still being unpacked")
    assert world.looks(100) == pytest.approx(SETTLED_SECONDS, abs=3)


def test_an_answer_is_waited_for_but_not_without_end(world: World) -> None:
    world.update()
    assert world.looks(100, computing=True) is None
    assert world.looks(10) == 2
    other = World(world.installation.program.parents[1] / "other", pytest.MonkeyPatch())
    other.update()
    assert other.looks(1000, computing=True) == pytest.approx(LONGEST_SECONDS, abs=3)


def test_what_is_as_it_was_again_goes_on(world: World) -> None:
    path = world.installation.lib / "libllama.so"
    info, text = path.stat(), path.read_text()
    world.update()
    assert world.looks(4) is None
    path.write_text(text)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert world.looks(10_000) is None
    world.update()
    assert world.looks(100) is not None
    assert len(world.said) == 2


def test_one_that_computes_is_told_from_one_that_waits() -> None:
    work = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    for program, computes in ((work, True), ("import time; time.sleep(60)", False)):
        with subprocess.Popen([sys.executable, "-S", "-c", program]) as child:
            try:
                time.sleep(0.3)  # the start computes in both
                before = computing._processor_seconds(os.getpid())[child.pid]
                end = time.monotonic() + (30 if computes else 1)
                grown = 0.0
                while grown < 0.2 and time.monotonic() < end:
                    time.sleep(0.1)
                    grown = computing._processor_seconds(os.getpid())[child.pid] - before
                assert (grown >= 0.2) is computes
            finally:
                child.kill()


def test_only_a_tree_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path))
    installation = InstalledOllama(tmp_path / "ollama", tmp_path)
    assert of_tree(installation, installation.program, print) is None
