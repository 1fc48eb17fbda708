"""`tiering patch --wait`: when it begins, that it begins once more, when it gives up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ollama_tiering.errors import (
    BuildError,
    MissingTool,
    ServiceError,
    UnsupportedUpstream,
    UsageError,
)
from ollama_tiering.launch import after_update
from ollama_tiering.launch.after_update import LONGEST_SECONDS, SETTLED_SECONDS, AfterUpdate
from ollama_tiering.patchset.llama_server import installation
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report
from tests.unit.patchset import fake_installed as fake
from tests.unit.systemd import fake_tree

REQUEST = BuildRequest()
GB = 10**9


class World:
    """An installer and a `tiering patch`; time passes only while one waits."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.now = 0.0
        self.steps: dict[float, Callable[[], object]] = {}  # at a time
        self.made: list[float] = []
        self.trees: list[LinkTree] = []
        self.fail: Exception | None = None
        self.said: list[str] = []
        self.report = Report(quiet=True)
        monkeypatch.setattr(after_update, "make_tree", self.make)
        monkeypatch.setattr(after_update.built, "current", self.current)

    def find(self) -> InstalledOllama | None:
        if not (self.root / "lib/ollama/llama-server").exists():
            raise MissingTool("no Ollama", hint="install it")
        return fake.at(self.root)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for time in [time for time in self.steps if time <= self.now]:
            self.steps.pop(time)()

    def current(self, found: InstalledOllama) -> LinkTree | None:
        return next((tree for tree in self.trees if tree.fits(found)), None)

    def make(self, found: InstalledOllama, request: BuildRequest, _: Report) -> LinkTree:
        assert request is REQUEST
        self.made.append(self.now)
        tree = fake_tree.patched(self.root / f"cache{len(self.made)}", found)
        if self.fail:
            failure, self.fail = self.fail, None
            raise failure
        self.trees.append(tree)
        return tree

    def tree(self) -> LinkTree:
        given = (self.find, self.report, self.said.append)
        return AfterUpdate(*given, clock=lambda: self.now, sleep=self.sleep).tree(REQUEST)

    def write(self, text: str) -> None:
        (self.root / "lib/ollama/libllama.so").write_text(text)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    fake_tree.installed(tmp_path)
    return World(tmp_path, monkeypatch)


def test_what_has_its_tree_is_not_waited_for(world: World) -> None:
    world.trees.append(fake_tree.patched(world.root / "cache", fake.at(world.root)))
    assert world.tree() is world.trees[0]
    assert (world.now, world.made) == (0.0, [])
    assert world.said == [f"{world.trees[0].binary} is up to date"]


def test_it_is_made_once_nothing_has_changed_for_a_while(world: World) -> None:
    last = 8.0
    world.steps = {4.0: lambda: world.write("half"), last: lambda: world.write("the whole")}
    assert world.tree().fits(fake.at(world.root))
    assert world.made == [last + SETTLED_SECONDS]
    assert world.said[-1] == f"the next start of Ollama {fake.VERSION} is tiered"


def test_an_installer_that_has_removed_it_is_waited_for(world: World) -> None:
    server = world.root / "lib/ollama/llama-server"
    text = server.read_text()
    server.unlink()
    world.steps[100.0] = lambda: fake.script(server, text)
    world.tree()
    assert world.made == [100.0 + SETTLED_SECONDS]
    assert world.said[0] == "waiting for Ollama: no Ollama"


def test_an_update_while_it_is_made_is_taken(world: World) -> None:
    """Whatever the failure: half an update breaks a build in many ways."""

    def fails(found: InstalledOllama, request: BuildRequest, report: Report) -> LinkTree:
        world.write("another" * len(world.made))
        return real(found, request, report)

    real = world.make
    world.fail = BuildError("compiling failed", hint="see the log")
    after_update.make_tree = fails  # type: ignore[assignment]  # the fixture puts it back
    assert world.tree() is world.trees[0]
    assert len(world.made) == 2
    assert world.made[1] - world.made[0] >= SETTLED_SECONDS
    assert any("was changed meanwhile: compiling failed" in line for line in world.said)


def test_what_fails_without_a_change_is_not_tried_again(world: World) -> None:
    world.fail = MissingTool("no C++ compiler", hint="install one")
    with pytest.raises(MissingTool, match="no C\\+\\+ compiler"):
        world.tree()
    assert len(world.made) == 1


def test_files_that_never_rest_end_it(world: World) -> None:
    wait = world.sleep

    def restless(seconds: float) -> None:
        wait(seconds)
        world.write(str(world.now))

    world.sleep = restless  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="change again and again"):
        world.tree()
    assert LONGEST_SECONDS <= world.now < LONGEST_SECONDS + SETTLED_SECONDS
    assert world.made == []


def test_an_ollama_that_stays_away_ends_it_with_its_own_error(world: World) -> None:
    (world.root / "lib/ollama/llama-server").unlink()
    with pytest.raises(MissingTool, match="no Ollama"):
        world.tree()
    assert world.now >= LONGEST_SECONDS


def test_an_older_ollama_in_its_place_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No llama-server comes with v0.24, however long one waits."""
    (world.root / "lib/ollama/llama-server").unlink()
    fake.script(world.root / "bin/ollama", "#!/bin/sh\necho ollama version is 0.24.0\n")
    monkeypatch.setattr(world, "find", lambda: installation.find(str(world.root)))
    with pytest.raises(UnsupportedUpstream, match=r"it is older than v0\.30"):
        world.tree()
    assert world.now == 0.0


@pytest.mark.parametrize(
    ("total", "free", "is_made"),
    [
        (10 * GB, 2 * GB, True),
        (10 * GB, 2 * GB - 1, False),
        (100 * GB, 5 * GB, True),
        (100 * GB, 5 * GB - 1, False),
    ],
)
def test_a_disk_that_is_nearly_full_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, total: int, free: int, is_made: bool
) -> None:
    asked = []

    def disk(place: Path) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(total=total, free=free)

    cache = world.root / "not/there/yet"
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(cache))
    monkeypatch.setattr(after_update.shutil, "disk_usage", disk)
    if is_made:
        world.tree()
    else:
        with pytest.raises(BuildError, match=rf"^{cache}: .* of its disk are free, and ") as caught:
            world.tree()
        assert "\n" not in caught.value.message
        assert caught.value.hint
    assert asked == [world.root]
    assert len(world.made) == is_made


def test_where_another_engine_is_chosen_nothing_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "find", lambda: None)
    with pytest.raises(UsageError, match=r"v0\.30 or later"):
        world.tree()
    assert world.now == 0.0
