"""A disk lost or spoiled 32 blocks of a conversation. Also over the engine socket, one prompt
stores all of them anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from tests.contract.fake_engine import engine_socket
from tests.integration.engine_program import SANITIZERS, Talk, compiled
from tests.places import short_directory
from tests.sidecar import SidecarProcess

BLOCKS, LOST = 40, 32
TOKENS = 64 * BLOCKS


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_slots", SANITIZERS[0], tmp_path_factory.mktemp("kvt"))


@pytest.fixture
def daemon() -> Iterator[SidecarProcess]:
    with (
        short_directory() as directory,
        SidecarProcess(directory, ram_gb=0.5, local_gb=0.5) as running,
    ):
        yield running


def flip(path: Path) -> None:
    """A bit near the end: the header is as it was, and so is the size."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def block_number(path: Path) -> int:
    with path.open("rb") as file:
        head = file.read(1 << 16)
    return read_meta(buffer_reader(head), path.stat().st_size).first_position // 64


@pytest.mark.parametrize("spoil", [Path.unlink, flip, cut], ids=["lost", "flipped", "cut"])
@pytest.mark.parametrize(("first_lost", "restarted"), [(4, False), (0, True)])
def test_one_prompt_stores_all_that_a_disk_has_lost(
    program: Path,
    daemon: SidecarProcess,
    spoil: Callable[[Path], None],
    first_lost: int,
    restarted: bool,
) -> None:
    """In all copies. The slot of the prompt holds nothing of it, as after an unload."""
    first = random.randrange(1 << 30)
    with Talk(program, engine_socket(daemon.socket)) as talk:
        talk.say("answer", 0, first, TOKENS)
        assert talk.say("settle", BLOCKS).startswith(f"{BLOCKS} blocks")
    daemon.wait_written()
    if restarted:
        daemon.stop()
    files = [*daemon.ram_dir.rglob("*.kvb"), *daemon.local_dir.rglob("*.kvb")]
    doomed = [path for path in files if 0 <= block_number(path) - first_lost < LOST]
    assert len(doomed) >= LOST
    for path in doomed:
        spoil(path)
    if restarted:
        daemon.start()
    with Talk(program, engine_socket(daemon.socket)) as talk:
        said = talk.say("prompt", 0, first, TOKENS + 1)
        assert "BROKEN" not in said
        assert int(said.split()[3]) <= 64 * first_lost
        talk.say("answer", 0, first, TOKENS)  # the rest is computed
        talk.say("settle", LOST)
    with Talk(program, engine_socket(daemon.socket)) as talk:
        said = talk.say("prompt", 0, first, TOKENS + 1)
        assert said == f"have 0 restored {TOKENS} reason 0"
