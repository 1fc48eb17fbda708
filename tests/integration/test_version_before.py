"""An engine of this version beside a sidecar of an earlier one: served if both speak the same
protocol; else it computes as stock does, and the sidecar's log says why in one line.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fake_engine import engine_socket
from tests.integration.engine_program import Talk, compiled
from tests.places import short_directory
from tests.sidecar import SidecarProcess

ROOT = Path(__file__).parents[2]
SAME_PROTOCOL = "bc67037a0a0c"
OTHER_PROTOCOL = "e531bf76"


class EarlierSidecar(SidecarProcess):
    """The sidecar of a commit, with the packages of today."""

    def command(self) -> list[str]:
        return [sys.executable, "-P", *super().command()[1:]]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": str(self.root / "tree")}


@pytest.fixture
def root() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def earlier(commit: str, root: Path) -> SidecarProcess:
    git = ["git", "-C", str(ROOT), "archive", commit, "ollama_tiering"]
    done = subprocess.run(git, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no commit {commit} here: a shallow clone, or no clone")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(root / "tree", filter="data")
    return EarlierSidecar(root)


def test_one_that_speaks_the_same_protocol_serves(root: Path) -> None:
    program = compiled("kvt_slots", "address,undefined", root)
    sidecar = earlier(SAME_PROTOCOL, root)
    with sidecar, Talk(program, engine_socket(sidecar.socket)) as talk:
        assert talk.greeting == "up"
        talk.say("answer", 0, 1, 640)
        assert talk.say("settle", 10).startswith("10 blocks")
        assert talk.say("prompt", 1, 1, 641) == "have 0 restored 640 reason 0"


def test_beside_one_that_does_not_all_is_computed_and_a_line_says_why(root: Path) -> None:
    program = compiled("kvt_slots", "address,undefined", root)
    with earlier(OTHER_PROTOCOL, root) as sidecar:
        with Talk(program, engine_socket(sidecar.socket)) as talk:
            assert talk.greeting == "not up"
            assert talk.say("prompt", 1, 1, 641) == "have 0 restored 0 reason 7"
        sidecar.stop()
        said = [line for line in sidecar.lines if "is not spoken here" in line]
        assert len(said) == 1
