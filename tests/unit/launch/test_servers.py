"""The first server of a `tiering up`, and the one that takes over."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.launch import ollama, servers
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.servers import Servers, other_program
from ollama_tiering.launch.up import UpRequest
from ollama_tiering.patchset.llama_server import installation, tree_use
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.report import Report

SOCKET = "OLLAMA_KV_TIER_ENGINE_SOCKET"


@dataclass
class FakeServer:
    binary: Path
    env: dict[str, str | None]
    pid: int = 1
    stopped: bool = False

    def stop(self, **_: Any) -> bool:
        self.stopped = True
        return True


@dataclass
class FakePair:
    server: FakeServer
    service: object = "runs"

    def stop_server(self) -> bool:
        return self.server.stop()


@dataclass
class FakeOutdated:
    program: Path
    is_due: bool = False

    def due(self, _pid: int) -> bool:
        return self.is_due


@dataclass
class FakeTree:
    binary: Path
    program: str
    folder: Path
    version: str = "v0.33.0"


@dataclass
class FakeRenewal:
    begins: bool = True
    made: FakeTree | None = None
    stopped: bool = False

    def begin(self) -> bool:
        return self.begins

    def tree(self, _pid: int) -> FakeTree | None:
        return self.made

    def stop(self) -> None:
        self.stopped = True


@dataclass
class World:
    request: UpRequest
    tree: Path
    outdated: FakeOutdated
    renewal: FakeRenewal = field(default_factory=FakeRenewal)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    held: bool = True
    started: list[FakeServer] = field(default_factory=list)

    def servers(self) -> Servers:
        return Servers(self.request, self.tree, Report(quiet=True), lambda: False)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    installed = InstalledOllama(tmp_path / "installed/bin/ollama", tmp_path / "installed/lib")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    request = UpRequest(
        *(Address(), tmp_path / "s"),
        **{"llama_server": True, "engine_socket": tmp_path / "e", "installed": installed},
    )
    made = World(request, tmp_path / "tree/bin/ollama", FakeOutdated(tmp_path / "by-name/ollama"))

    def start(binary: Path, _address: Address, *, env: dict[str, str | None], **_: Any) -> Any:
        made.started.append(FakeServer(binary, env))
        return made.started[-1]

    monkeypatch.setattr(ollama, "start_server", start)
    monkeypatch.setattr(servers, "of_tree", lambda *_: made.outdated)
    monkeypatch.setattr(servers, "other_program", lambda *_: "")
    monkeypatch.setattr(servers, "named_source", lambda _binary: "/src/llama.cpp")
    monkeypatch.setattr(servers, "Renewal", lambda *of: made.asked.append(of) or made.renewal)
    monkeypatch.setattr(tree_use, "hold", lambda *_: made.held)
    monkeypatch.setattr(installation, "at", lambda program: InstalledOllama(program, program))
    return made


def outdated(world: World) -> tuple[Servers, Any]:
    """The installed one serves as stock, after an update."""
    one = world.servers()
    pair: Any = FakePair(one.first(tiered=True))  # type: ignore[arg-type]
    world.outdated.is_due = True
    pair.server = one.successor(pair)
    world.outdated.is_due = False
    return one, pair


def test_after_an_update_the_new_tree_takes_over_as_soon_as_it_is_made(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, pair = outdated(world)
    (asked,) = world.asked
    assert asked[:2] == (world.outdated.program, "/src/llama.cpp")
    assert one.successor(pair) is None  # it is still made, or a model computes
    new = FakeTree(tmp_path / "new/bin/ollama", str(world.outdated.program), tmp_path / "new")
    world.renewal.made = new
    assert one.successor(pair) is world.started[2]  # type: ignore[comparison-overlap]
    assert world.started[1].stopped
    third = world.started[2]
    assert (third.binary, third.env[SOCKET]) == (new.binary, str(world.request.engine_socket))
    assert one.binary == new.binary
    pair.server = third
    assert one.successor(pair) is None
    world.outdated.is_due = True  # another update
    assert one.successor(pair) is world.started[3]  # type: ignore[comparison-overlap]
    assert world.started[3].env[SOCKET] is None
    assert len(world.asked) == 2


def test_a_new_tree_that_is_gone_again_or_has_no_sidecar_is_left(
    world: World, tmp_path: Path
) -> None:
    for service, held in ((None, True), ("runs", False)):
        one, pair = outdated(world)
        pair.service, world.held = service, held
        world.renewal.made = FakeTree(tmp_path / "o", str(world.outdated.program), tmp_path)
        assert one.successor(pair) is None
        assert not pair.server.stopped


def test_without_a_sidecar_no_tree_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(FakeRenewal, "begin", lambda _self: begun.append(True) or True)
    one = world.servers()
    pair: Any = FakePair(one.first(tiered=False), service=None)  # type: ignore[arg-type]
    world.outdated.is_due = True
    assert one.successor(pair) is world.started[1]  # type: ignore[comparison-overlap]
    assert begun == []
    one.close()
    assert not world.renewal.stopped


def test_what_is_made_for_nobody_any_more_is_ended(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = outdated(world)
    one.close()
    assert world.renewal.stopped


def test_where_no_tree_can_be_made_a_person_hears_how(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(_: Report, text: str) -> None:
        said.extend([text] if text.startswith("going over") else [])

    monkeypatch.setattr(Report, "say", say)
    world.renewal.begins = False
    one, pair = outdated(world)
    assert "run `tiering patch`, then `tiering up` again" in said[-1]
    assert one.successor(pair) is None
    one.close()
    world.renewal.begins = True
    outdated(world)
    assert said[-1].endswith(str(world.request.patch_log))


def test_the_tree_is_started_with_the_engine_socket(world: World) -> None:
    world.servers().first(tiered=True)
    (server,) = world.started
    assert (server.binary, server.env[SOCKET]) == (world.tree, str(world.request.engine_socket))


def test_one_that_only_starts_another_program_makes_way_for_stock(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "other_program", lambda *_: "/opt/.ollama-wrapped")
    assert world.request.installed is not None
    one = world.servers()
    serving = one.first(tiered=True)
    first, second = world.started
    assert first.stopped
    assert serving is second  # type: ignore[comparison-overlap]
    assert (second.binary, second.env[SOCKET]) == (world.request.installed.program, None)
    assert "LLAMA_ARG_CACHE_RAM" not in second.env
    assert one.binary == second.binary
    assert "starts /opt/.ollama-wrapped" in capsys.readouterr().err


def test_the_installed_one_takes_over_as_stock_when_the_tree_is_outdated(world: World) -> None:
    assert world.request.installed is not None
    one = world.servers()
    pair: Any = FakePair(one.first(tiered=True))  # type: ignore[arg-type]
    assert one.successor(pair) is None
    assert not world.started[0].stopped
    world.outdated.is_due = True
    assert one.successor(pair) is world.started[1]  # type: ignore[comparison-overlap]
    assert world.started[0].stopped
    second = world.started[1]
    assert (second.binary, second.env[SOCKET]) == (world.outdated.program, None)
    assert one.binary == second.binary
    assert one.successor(pair) is None  # until there is a tree for it
    assert len(world.started) == 2


def test_an_end_that_is_asked_for_meanwhile_is_an_orderly_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.servers()
    pair: Any = FakePair(one.first(tiered=True))  # type: ignore[arg-type]
    world.outdated.is_due = True

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ollama, "start_server", interrupted)
    assert one.successor(pair) is None


@contextmanager
def running(*command: str | Path) -> Iterator[int]:
    with subprocess.Popen(command) as process:
        try:
            time.sleep(0.5)
            yield process.pid
        finally:
            process.kill()


def test_a_hard_link_runs_itself_and_a_script_something_else(tmp_path: Path) -> None:
    sleep = Path(shutil.which("sleep") or "").resolve()
    installed, tree = tmp_path / "installed", tmp_path / "tree"
    shutil.copy2(sleep, installed)
    tree.hardlink_to(installed)
    with running(tree, "60") as pid:
        assert other_program(pid, tree) == ""
        assert other_program(pid, installed) == str(tree)
    script = tmp_path / "ollama"
    script.write_text(f"#!/bin/sh\nexec {sleep} 60\n")
    script.chmod(0o755)
    with running(script) as pid:
        assert other_program(pid, script) == str(sleep)
