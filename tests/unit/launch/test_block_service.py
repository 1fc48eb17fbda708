"""A sidecar counts while it can be reached, not while its process lives."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import block_service
from ollama_tiering.launch.block_service import BlockService, owner
from tests.places import short_directory
from tests.sidecar import SidecarProcess


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockService]:
    with short_directory() as fast:
        settings = SidecarProcess(tmp_path, fast=fast)
        env = {**settings.environment(), "OLLAMA_KV_TIER_RAM": str(fast / "ram")}
        for name in ("OLLAMA_KV_TIER_RAM_GB", "OLLAMA_KV_TIER_LOCAL_GB"):
            env[name] = "0.05"
        env["OLLAMA_KV_TIER_LOCAL"] = str(tmp_path / "local")
        running = BlockService(fast / "run" / "s", tmp_path / "logs" / "log", env=env)
        running.ensure()
        yield running
        running.stop()


def wait_for_an_answer(service: BlockService) -> None:
    end = time.monotonic() + 30
    while not service.answers:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_whose_socket_is_gone_does_not_count_and_is_not_started_twice(
    service: BlockService,
) -> None:
    assert service.child
    pid = service.child.pid
    assert service.answers
    shutil.rmtree(service.socket.parent)
    assert not service.answers
    said = service.obituary()
    assert said == f"nobody can reach the sidecar (process {pid}): {service.socket} is gone"
    assert service.ensure().version  # it makes its socket again meanwhile
    assert service.child.pid == pid
    assert service.answers


def test_one_that_hangs_is_noticed_and_replaced(
    service: BlockService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.child
    hung = service.child
    monkeypatch.setattr(block_service, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(block_service, "_ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(block_service, "_GIVE_UP_SECONDS", 0.2)
    monkeypatch.setattr(hung.__class__, "tail", lambda *_: "")
    hung._process.send_signal(signal.SIGSTOP)
    looks = 0
    while service.answers:
        looks += 1
    assert looks == block_service._MOST_UNANSWERED - 1  # one late answer is weather
    assert service.obituary().endswith("does not answer")
    monkeypatch.setattr(block_service, "START_SECONDS", 0.5)
    with pytest.raises(ServiceError, match="did not answer within"):
        service.ensure()
    assert not hung.running
    monkeypatch.setattr(block_service, "START_SECONDS", 60.0)
    monkeypatch.setattr(block_service, "_ASK_SECONDS", 2.0)
    assert service.ensure().version
    wait_for_an_answer(service)
    assert service.child
    assert service.child.pid != hung.pid


def test_where_another_one_serves_by_now_that_one_is_used(
    service: BlockService, tmp_path: Path
) -> None:
    other = BlockService(service.socket, tmp_path / "logs" / "other", env=service.env)
    other.ensure()
    assert other.child is None
    assert service.child
    dead_pid = service.child.pid
    assert owner(service.socket) == dead_pid
    dead = BlockService(service.socket, tmp_path / "logs" / "dead", env=service.env)
    dead.child = service.child
    service.child.kill()
    again = BlockService(service.socket, service.log, env=service.env)
    again.ensure()
    try:
        assert dead.ensure()
        assert again.child
        assert owner(service.socket) == again.child.pid != dead_pid
        assert dead.child is None
    finally:
        again.stop()
