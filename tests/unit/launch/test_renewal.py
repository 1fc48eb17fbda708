"""A tree for an Ollama that was updated: when it is made, taken, and given up."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.launch import computing, renewal
from ollama_tiering.launch.renewal import QUIET_SECONDS, Renewal
from ollama_tiering.patchset.llama_server import built
from tests.unit.patchset import fake_installed as fake

TREE: Any = object()


@dataclass
class Maker:
    command: tuple[Any, ...]
    running: bool = True
    exit_code: int | None = None
    stopped: bool = False

    def end(self, code: int) -> None:
        self.running, self.exit_code = False, code

    def how_it_ended(self) -> str:
        return f"ended with exit code {self.exit_code}"

    def stop(self, **_: Any) -> None:
        self.stopped = True


@dataclass
class World:
    renewal: Renewal
    library: Path
    makers: list[Maker] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    models: dict[int, float] = field(default_factory=dict)
    sought: int = 0  # how often the tree was looked for, which reads our sources
    tree: Any = TREE
    now: float = 1000.0

    def look(self, seconds: float = 2.0, *, computing: bool = False) -> Any:
        self.now += seconds
        for pid in self.models:
            self.models[pid] += seconds if computing else 0.0
        return self.renewal.tree(1)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    installation = fake.at(fake.installed(tmp_path / "1"))
    named = tmp_path / "usr/bin/ollama"
    named.parent.mkdir(parents=True)
    named.symlink_to(installation.program)
    made = World(
        Renewal(named, "/src/llama.cpp", tmp_path / "log", lambda text: made.said.append(text)),
        installation.lib / "libllama.so",
    )
    made.renewal.clock = lambda: made.now

    def start(_name: str, *command: Any, **_: Any) -> Any:
        made.makers.append(Maker(command))
        return made.makers[-1]

    def current(_found: Any) -> Any:
        made.sought += 1
        return made.tree

    monkeypatch.setattr(renewal, "start", start)
    monkeypatch.setattr(built, "current", current)
    monkeypatch.setattr(computing, "_processor_seconds", lambda _pid: dict(made.models))
    return made


def test_it_is_made_by_the_name_that_an_update_keeps(world: World, tmp_path: Path) -> None:
    assert world.renewal.begin()
    (maker,) = world.makers
    words = ["-m", "ollama_tiering", "patch", "--ollama", tmp_path / "usr"]
    at = maker.command.index(sys.executable)
    assert list(maker.command[at + 1 :]) == [*words, "--llama-source", "/src/llama.cpp"]
    assert world.look() is None
    world.renewal.stop()
    assert maker.stopped


def test_it_is_taken_once_it_is_made_where_no_model_is_loaded(world: World) -> None:
    world.renewal.begin()
    assert world.look() is None
    world.makers[0].end(0)
    assert world.look() is TREE


def test_a_loaded_model_keeps_what_it_holds_until_nobody_asks_for_long(world: World) -> None:
    world.renewal.begin()
    world.makers[0].end(0)
    world.models = {7: 3.0}
    for _ in range(5):
        assert world.look(QUIET_SECONDS, computing=True) is None
    for _ in range(int(QUIET_SECONDS // 2) - 1):
        assert world.look() is None
    assert world.sought == 0
    assert world.look(4) is TREE
    assert world.look(computing=True) is None
    world.models = {}  # unloaded
    assert world.look() is TREE


def test_if_it_cannot_be_made_that_is_said_once(world: World) -> None:
    world.renewal.begin()
    world.makers[0].end(7)
    assert [world.look(), world.look()] == [None, None]
    (said,) = world.said
    assert "ended with exit code 7" in said
    assert str(world.renewal.log) in said
    assert len(world.makers) == 1


def test_after_another_update_it_is_made_once_more(world: World) -> None:
    world.renewal.begin()
    world.tree = None  # what was made is for other files
    world.library.write_text("another update")
    world.makers[0].end(0)
    assert world.look() is None
    assert len(world.makers) == 2
    assert world.said == []
    world.tree = TREE
    world.makers[1].end(0)
    assert world.look() is TREE


def test_while_an_installer_is_at_work_nothing_is_decided(world: World) -> None:
    world.renewal.begin()
    world.makers[0].end(7)
    server = world.library.with_name("llama-server")
    server.rename(server.with_name("away"))
    assert world.look() is None
    assert world.said == []


def test_a_program_that_has_no_folder_of_the_usual_kind_is_not_patched(
    world: World, tmp_path: Path
) -> None:
    world.renewal.program = tmp_path / "usr/ollama"
    (tmp_path / "usr/ollama").symlink_to(tmp_path / "usr/bin/ollama")
    assert not world.renewal.begin()
    assert world.makers == []
