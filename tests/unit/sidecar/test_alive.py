"""The service manager hears of a sidecar that works, and stops hearing of one that stands still."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar.alive import Alive, status_line
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import SidecarProcess
from tests.unit.sidecar.manager import Manager, is_ping
from tests.unit.store.support import Bench

STALLING = Path(__file__).with_name("stalling.py")


class StallingDaemon(SidecarProcess):
    def command(self) -> list[str]:
        return [sys.executable, str(STALLING), str(self.root), *super().command()[3:]]


class Mover:
    """Looks like a store whose thread has been silent for so long."""

    silent = 0.0

    def mover_silent_seconds(self) -> float:
        return self.silent


def alive(store: Any, monkeypatch: pytest.MonkeyPatch, period: float) -> tuple[Alive, list[str]]:
    monkeypatch.setenv("WATCHDOG_USEC", str(int(period * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    said: list[str] = []
    return Alive(store, said.append), said


def test_pings_stop_when_the_mover_is_silent_for_the_whole_period(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mover = Mover()
    signs, said = alive(mover, monkeypatch, 60.0)
    for silent, pings in ((0.0, 1), (59.0, 2), (61.0, 2), (600.0, 2), (0.5, 3)):
        mover.silent = silent
        signs.ping()
        assert said == ["WATCHDOG=1"] * pings
    assert caplog.text.count("mover stalled") == 1
    assert caplog.text.count("mover goes on") == 1


def test_a_resting_mover_is_no_stalled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = Mover()
    signs, said = alive(mover, monkeypatch, 0.2)
    mover.silent = 1.1
    signs.ping()
    assert said == ["WATCHDOG=1"]


def test_no_pings_without_a_watchdog_or_for_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    Alive(Mover(), said.append).ping()  # type: ignore[arg-type]
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    Alive(Mover(), said.append).ping()  # type: ignore[arg-type]
    assert said == []


def test_the_status_line_is_said_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ram=None, local=8)
    signs, said = alive(bench.store, monkeypatch, 60.0)
    signs.say_status()
    signs.say_status()
    bench.put([1, 2, 3])
    bench.rows([1, 2, 3, 4])
    signs.say_status()
    assert said == [
        "STATUS=local 0 blocks, 0 B",
        "STATUS=local 1 block, 12.0 KiB; 75 % of 4 asked tokens found",
    ]
    with bench.state.lock:
        bench.state.failed(bench.state.levels[0], OSError(5, "gone"))
    assert "(resting after an error)" in status_line(bench.store.report())


def test_a_store_without_a_thread_has_none_that_is_silent() -> None:
    bench = Bench()
    bench.tick(1000)
    assert bench.store.mover_silent_seconds() == 0


def test_a_mover_that_stands_still_ends_the_signs_of_life_until_it_goes_on(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        environment = manager.environment(0.4)
        with StallingDaemon(tmp_path / "d", env=environment) as daemon:
            manager.wait(is_ping)
            (daemon.root / "mover").touch()
            manager.wait_silence(1.5)
            assert daemon.stat().tiers  # the event loop still answers
            (daemon.root / "mover").unlink()
            manager.wait(is_ping)
            assert daemon.stop() == 0
        assert daemon.said("mover stalled")
        manager.wait(lambda said: said == "STOPPING=1")


def test_an_event_loop_that_stands_still_ends_the_signs_of_life(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        environment = manager.environment(0.4)
        with StallingDaemon(tmp_path / "d", env=environment) as daemon, daemon.channel() as channel:
            manager.wait(is_ping)
            (daemon.root / "loop").touch()
            answer = rpc.BlockStoreStub(channel).Stat.future(pb.StatRequest(), timeout=60)
            manager.wait_silence(1.5)
            (daemon.root / "loop").unlink()
            assert answer.result().tiers
            assert answer.code() is grpc.StatusCode.OK
            manager.wait(is_ping)


def test_a_busy_sidecar_gives_its_signs_of_life(tmp_path: Path) -> None:
    with (
        Manager(tmp_path) as manager,
        SidecarProcess(tmp_path / "d", env=manager.environment(0.4)) as daemon,
    ):
        for _ in range(10):
            assert manager.next(10.0) is not None
            assert daemon.stat().tiers
        assert manager.heard.count("WATCHDOG=1") >= 5
        assert manager.heard.count("READY=1") == 1
