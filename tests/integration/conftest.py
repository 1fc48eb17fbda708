"""An engine in C++ with slots made up (kvt_slots), under each sanitizer, against a real sidecar."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fake_engine import engine_socket, nothing_is_held
from tests.integration.engine_program import SANITIZERS, SECONDS, Talk, compiled
from tests.places import short_directory
from tests.sidecar import SidecarProcess


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_slots", request.param, tmp_path_factory.mktemp("kvt"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    # The disk has room for what leaves RAM, or a block just stored may have to go under load.
    with short_directory() as root, SidecarProcess(root, ram_gb=0.5, local_gb=1) as running:
        yield running


@pytest.fixture
def talk(program: Path, daemon: SidecarProcess) -> Iterator[Talk]:
    with Talk(program, engine_socket(daemon.socket)) as talk:
        assert talk.greeting == "up"
        yield talk
    daemon.wait(nothing_is_held, "nothing is held afterwards", SECONDS)


@pytest.fixture
def first() -> int:
    """Of tokens that nobody has stored yet."""
    return random.randrange(1 << 30)
