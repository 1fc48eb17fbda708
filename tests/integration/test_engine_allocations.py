"""Each allocation of llama-server's library fails once (llama_server/tests/kvt_fails.cpp): what had
to be stored or restored then is computed, and nothing else comes of it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fake_engine import engine_socket, nothing_is_held
from tests.integration.engine_program import SECONDS, compiled
from tests.places import short_directory, tmpfs_directory
from tests.sidecar import SidecarProcess

LIMIT_SECONDS = 1500  # on a machine that others use; alone it takes one


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_fails", "address,undefined", tmp_path_factory.mktemp("kvt"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    with (
        short_directory() as root,
        tmpfs_directory() as fast,
        SidecarProcess(root, ram_gb=0.5, fast=fast) as running,
    ):
        yield running


@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("kind", ["copied", "direct", "states"])
def test_an_allocation_that_fails_costs_rows_and_no_more(
    program: Path, daemon: SidecarProcess, kind: str
) -> None:
    done = subprocess.run(
        [program, engine_socket(daemon.socket), kind],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    said = re.fullmatch(r"(\d+) allocations failed, (\d+) restored\n", done.stdout)
    assert said, f"{done.stdout} {done.stderr[-5000:]}"
    assert done.returncode == 0
    assert int(said[1]) > 100  # so many at least it takes to store and to restore
    assert int(said[2]) > 0
    daemon.wait(nothing_is_held, "nothing is held afterwards", SECONDS)
