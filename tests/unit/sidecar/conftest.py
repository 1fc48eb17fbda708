"""A sidecar for each file of tests that does not start another, and ways to talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ollama_tiering.protocol import calls as rpc
from tests.contract.fake_engine import FakeEngine
from tests.places import short_directory
from tests.sidecar import SidecarProcess


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    with short_directory() as directory, SidecarProcess(directory) as running:
        yield running


@pytest.fixture
def channel(daemon: SidecarProcess) -> Iterator[grpc.Channel]:
    with daemon.channel() as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return rpc.BlockStoreStub(channel)


@pytest.fixture
def engine(daemon: SidecarProcess) -> Iterator[FakeEngine]:
    with FakeEngine(daemon.socket) as connected:
        yield connected
