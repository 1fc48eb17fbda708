"""The server's end is the end; the sidecar's is not. Stopping loses nothing."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import supervise
from ollama_tiering.launch.supervise import Interrupts, Pair


@dataclass
class FakeServer:
    """Lives for so many looks, then has died."""

    looks: int = 10**9
    deaf: bool = False
    order: list[str] = field(default_factory=list)
    log: Path = Path("/nowhere/log")
    name: str = "ollama serve"

    @property
    def running(self) -> bool:
        self.looks -= 1
        return self.looks > 0

    def how_it_ended(self) -> str:
        return "ended with exit code 3"

    def tail(self) -> str:
        return "  its last words"

    def stop(self, *, seconds: float, hurry: Any) -> bool:
        self.order.append("server")
        return not self.deaf


@dataclass
class FakeService:
    """A sidecar that has died `deaths` times, and fails to start `failures` times."""

    deaths: int = 0
    failures: int = 0
    interrupts: Interrupts | None = None
    order: list[str] = field(default_factory=list)
    child: object | None = "a child"
    started: int = 0

    @property
    def answers(self) -> bool:
        if self.deaths:
            self.deaths -= 1
            return False
        if self.interrupts:
            self.interrupts.count += 1
        return True

    def ensure(self, interrupted: Any) -> None:
        self.started += 1
        if self.failures:
            self.failures -= 1
            self.deaths += 1
            raise ServiceError("it does not start")

    def obituary(self) -> str:
        return "the sidecar ended"

    def stop(self, hurry: Any) -> bool:
        self.order.append("sidecar")
        return True

    def last_words(self) -> str:
        return "sidecar stopped: everything is on disk"


def pair_of(service: FakeService, server: FakeServer, said: list[str]) -> Pair:
    interrupts = service.interrupts or Interrupts()
    return Pair(
        service,  # type: ignore[arg-type]
        server,  # type: ignore[arg-type]
        interrupts,
        said.append,
        first_pause_seconds=0.001,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "TICK_SECONDS", 0)


def test_a_server_that_ends_is_an_error_with_its_last_words() -> None:
    with pytest.raises(ServiceError, match=r"exit code 3(.|\n)*its last words"):
        pair_of(FakeService(), FakeServer(looks=3), []).watch()


def test_a_successor_takes_over_and_is_watched_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "ASK_EVERY_SECONDS", 0)
    first, second, changed = FakeServer(), FakeServer(looks=3), []
    pair = pair_of(FakeService(), first, [])
    heirs: Any = iter([None, second, None, None, None])
    pair.successor = lambda: next(heirs)
    pair.changed = lambda: changed.append(pair.server)
    with pytest.raises(ServiceError, match="exit code 3"):
        pair.watch()
    assert changed == [second]


def test_a_sidecar_that_dies_is_started_again_while_the_server_goes_on() -> None:
    said: list[str] = []
    service = FakeService(deaths=1, interrupts=Interrupts())
    pair_of(service, FakeServer(), said).watch()
    assert service.started == 1
    assert said[-1] == "the sidecar runs again"


def pauses_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those before each attempt; nothing is waited for."""
    pauses: list[float] = []

    def rest(_: Pair, seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(Pair, "_rest", rest)
    pair.watch()
    return pauses


def test_a_sidecar_that_does_not_start_is_tried_again_after_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    service = FakeService(deaths=1, failures=3, interrupts=Interrupts())
    pauses = pauses_of(pair_of(service, FakeServer(), said), monkeypatch)
    assert service.started == 4
    assert pauses == [0.001, 0.002, 0.004, 0.008]


def test_each_cause_is_said_once_however_often_it_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    service = FakeService(deaths=1, failures=50, interrupts=Interrupts())
    pauses = pauses_of(pair_of(service, FakeServer(), said), monkeypatch)
    assert len(pauses) == 51
    assert max(pauses) == supervise.LONGEST_PAUSE_SECONDS
    assert [line.partition("\n")[0] for line in said] == [
        "the sidecar ended",
        "it does not start",
        "the sidecar runs again",
    ]


def test_one_that_starts_and_dies_at_once_is_not_started_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    service = FakeService(deaths=5, interrupts=Interrupts())
    pauses = pauses_of(pair_of(service, FakeServer(), said), monkeypatch)
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert len(said) == 2


def test_one_that_lived_for_a_while_is_well_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    service = FakeService(deaths=3, interrupts=Interrupts())
    pair = pair_of(service, FakeServer(), said)
    pair.settled_seconds = 0
    assert pauses_of(pair, monkeypatch) == [0.001] * 3
    assert len(said) == 6


def test_without_a_sidecar_only_the_server_is_watched() -> None:
    said: list[str] = []
    interrupts = Interrupts()
    pair = Pair(None, FakeServer(looks=5), interrupts, said.append)  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match="exit code 3"):
        pair.watch()
    pair.stop_sidecar()
    assert said == []


def test_the_server_is_stopped_before_the_sidecar() -> None:
    order: list[str] = []
    said: list[str] = []
    pair = pair_of(FakeService(order=order), FakeServer(order=order), said)
    assert pair.stop_server()
    pair.stop_sidecar()
    assert order == ["server", "sidecar"]
    assert said == ["sidecar stopped: everything is on disk"]


def test_somebody_elses_sidecar_stays() -> None:
    order: list[str] = []
    said: list[str] = []
    pair_of(FakeService(order=order, child=None), FakeServer(), said).stop_sidecar()
    assert order == []
    assert said == ["the sidecar ran before and stays"]


def test_a_killed_server_is_said_to_have_lost_something() -> None:
    said: list[str] = []
    assert not pair_of(FakeService(), FakeServer(deaf=True), said).stop_server()
    assert "computed again" in said[0]


def test_the_first_signal_asks_and_the_second_insists() -> None:
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked()
        assert not interrupts.insisted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.insisted()
    assert signal.getsignal(signal.SIGTERM) == before
