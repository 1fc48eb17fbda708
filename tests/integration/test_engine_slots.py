"""Saving and restoring in C++ (llama_server/), with slots made up, against a real sidecar."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import frame
from ollama_tiering.store.block.checksum import crc32c
from tests.contract.fake_engine import engine_socket, nothing_is_held
from tests.integration.bad_sidecar import BadSidecar
from tests.integration.engine_program import SANITIZERS, SECONDS, Talk, compiled
from tests.places import short_directory
from tests.sidecar import SidecarProcess

STEP_MS = 20
PLANES = 4
ROW_BYTES = 8 << 10
READ_MS = 8  # of one block, where it is slow


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_slots", request.param, tmp_path_factory.mktemp("kvt"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    with short_directory() as directory, SidecarProcess(directory, ram_gb=0.5) as running:
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


def restored(answer: str) -> int:
    assert "BROKEN" not in answer
    return int(answer.split()[3])


def test_an_answer_is_stored_and_comes_back(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 1000)
    assert talk.say("settle", 16).startswith("16 blocks")
    assert talk.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"


def test_what_a_slot_holds_is_not_read_again(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 300)
    talk.say("settle", 5)
    talk.say("answer", 1, first, 100)
    assert talk.say("prompt", 1, first, 301) == "have 100 restored 200 reason 0"


def test_the_last_token_is_always_computed(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 128)
    talk.say("settle", 2)
    assert talk.say("prompt", 1, first, 128) == "have 0 restored 127 reason 0"


def test_a_resident_hit_asks_nothing(program: Path, tmp_path: Path) -> None:
    with BadSidecar(tmp_path / "s", []), Talk(program, tmp_path / "s") as talk:
        talk.say("hold", 0, 0, 300)
        # One that asks would get no answer: the connection ends.
        assert talk.say("prompt", 0, 0, 301) == "have 300 restored 0 reason 4"
        assert talk.say("prompt", 0, 0, 302) == "have 300 restored 0 reason 7"


def test_only_new_blocks_are_written(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 640)
    talk.say("settle", 10)
    talk.say("answer", 0, first, 700)
    assert talk.say("settle", 11).startswith("11 blocks")


def test_saving_takes_the_main_loop_a_little_at_a_time(talk: Talk, first: int) -> None:
    talk.say("slow", READ_MS)
    talk.say("answer", 0, first, 64 * 16)
    said = talk.say("settle", 16)
    found = re.fullmatch(r"16 blocks in (\d+) steps, longest (\d+) ms", said)
    assert found, said
    assert int(found[1]) >= 16 * READ_MS // (STEP_MS + READ_MS)
    assert int(found[2]) < STEP_MS + READ_MS + 40  # beside other tests


def test_what_a_slot_is_about_to_lose_is_kept(talk: Talk, first: int) -> None:
    """The thread has asked for nothing yet, or has, and the slot gets another prompt."""
    talk.say("answer", 0, first, 1000)
    assert restored(talk.say("prompt", 0, first + (1 << 29), 500)) == 0
    assert talk.say("settle", 16).startswith("16 blocks")
    assert talk.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"


def test_what_the_new_prompt_keeps_is_read_from_the_slot(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 1000)
    talk.say("prompt", 0, first, 500)
    assert talk.say("settle", 16).startswith("16 blocks")
    assert talk.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"


def test_rows_are_stored_as_they_were_before_a_shift(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 1000)
    talk.say("shift", 0, 100)
    assert talk.say("settle", 16).startswith("16 blocks")
    assert talk.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"


def test_a_sidecar_that_offers_the_last_token_is_not_believed(
    program: Path, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096 + PLANES * 2 * ROW_BYTES))
    path.chmod(0o600)
    crcs = struct.pack("<I", crc32c(bytes(2 * ROW_BYTES))) * PLANES
    file = m.File(str(path), path.stat().st_size, 4096, 0, 2, 2, 1, crcs)
    answer = frame(Kind.MATCHED, m.Matched(2, 1, False, 0, 0, 0, (file,)).pack())
    with BadSidecar(tmp_path / "s", [answer]), Talk(program, tmp_path / "s") as talk:
        assert "restored 1 " in talk.say("prompt", 0, 0, 2)


def test_rows_that_went_unannounced_are_never_stored(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 1000)
    talk.say("lose", 0)
    talk.say("answer", 1, first + (1 << 29), 64)  # ends after it
    assert talk.say("settle", 1).startswith("1 blocks")
    assert restored(talk.say("prompt", 1, first, 1001)) == 0
    # Nothing is left reserved: the same can be stored at once.
    talk.say("answer", 0, first, 1000)
    assert talk.say("settle", 17).startswith("17 blocks")


def test_without_cells_the_rest_is_computed(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 640)
    talk.say("settle", 10)
    talk.say("full", 200)
    assert talk.say("prompt", 1, first, 641) == "have 0 restored 192 reason 16"


def test_a_damaged_block_ends_what_comes_back(program: Path, first: int) -> None:
    with short_directory() as directory, SidecarProcess(directory, ram_gb=0.5) as daemon:
        with Talk(program, engine_socket(daemon.socket)) as talk:
            talk.say("answer", 0, first, 640)
            talk.say("settle", 10)
            daemon.wait_written()
            paths = sorted(daemon.ram_dir.rglob("*.kvb"), key=lambda path: path.stat().st_mtime_ns)
            for path in [
                *daemon.ram_dir.rglob(paths[4].name),
                *daemon.local_dir.rglob(paths[4].name),
            ]:
                path.chmod(0o600)
                with path.open("r+b") as opened:
                    opened.seek(-1, 2)
                    opened.write(b"\x5a" if path.read_bytes()[-1] != 0x5A else b"\x5b")
                path.chmod(0o400)
            said = talk.say("prompt", 1, first, 641)
        assert said.endswith("reason 11")
        assert restored(said) % 64 == 0
        assert restored(said) < 640


def test_without_a_sidecar_nothing_is_kept(program: Path, tmp_path: Path) -> None:
    with Talk(program, tmp_path / "nobody") as talk:
        assert talk.greeting == "not up"
        talk.say("answer", 0, 0, 1000)
        assert talk.say("prompt", 0, 5000, 100) == "have 0 restored 0 reason 7"
