"""Saving and restoring in C++ (llama_server/), with slots made up, against a real sidecar."""

from __future__ import annotations

import contextlib
import os
import random
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.client.block_client import BlockClient
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import FileKind, frame
from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import engine_socket, nothing_is_held
from tests.engine_llama_server.between import SlowSidecar
from tests.integration.bad_sidecar import AnsweringSidecar, BadSidecar
from tests.integration.engine_program import SECONDS, Talk
from tests.places import short_directory, tmpfs_directory
from tests.sidecar import SidecarProcess

PLANES = 4
WINDOW_BYTES = 48  # of a row, where there are windows
ROW_BYTES = 8 << 10
BLOCK_MIB = 2
LONG_S = 4.0  # takes what is not to be counted; what is takes less, on a busy machine, too
SLOW_MS = 30  # for one segment, where it is slow: more than a step of 20 ms


def restored(answer: str) -> int:
    assert "BROKEN" not in answer
    return int(answer.split()[3])


def test_an_answer_is_stored_and_comes_back(talk: Talk, daemon: SidecarProcess, first: int) -> None:
    talk.say("answer", 0, first, 1000)
    assert talk.say("settle", 16).startswith("16 blocks")
    assert talk.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"
    daemon.wait(nothing_is_held, "its files are given back at once", SECONDS)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_blocks_are_read_into_memory_of_a_device_as_long_as_there_is_some(
    talk: Talk, first: int, most: int
) -> None:
    talk.say("pinned", most)
    talk.say("answer", 0, first, 1000)
    talk.say("settle", 16)
    assert talk.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"
    end = time.monotonic() + SECONDS
    while not (said := talk.say("memory")).endswith(" 0 out"):  # by a thread, and what is not its
        assert time.monotonic() < end, said
        time.sleep(0.01)
    assert (int(said.split()[0]) > 0) == (most > 0)


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


def steps(said: str) -> int:
    """How many: how long each takes depends on what else the machine does."""
    found = re.search(r" in (\d+) steps, longest \d+ ms$", said)
    assert found, said
    return int(found[1])


def test_saving_takes_the_main_loop_a_segment_at_a_time(talk: Talk, first: int) -> None:
    """One block may take longer than a step."""
    talk.say("answer", 0, first, 64 * 3)
    talk.say("slow", SLOW_MS)
    assert steps(talk.say("settle", 3)) >= 3 * PLANES
    talk.say("slow", 0)
    assert talk.say("prompt", 1, first, 193) == "have 0 restored 192 reason 0"


def test_restoring_takes_the_main_loop_a_block_at_a_time(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 64 * 6)
    talk.say("settle", 6)
    talk.say("begin", 1, first, 64 * 6 + 1)
    talk.say("slow", SLOW_MS)
    said = talk.say("bring", 1)
    assert said.startswith("have 0 restored 384 reason 0 in ")
    assert steps(said) >= 6


@pytest.mark.parametrize("way", ["copied", "read into cells", "state"])
def test_waiting_for_a_device_is_not_copying(
    program: Path, in_memory: SidecarProcess, way: str
) -> None:
    """Or the gate would take what it learns of a device that is busy for the speed of copying. Nor
    does it take the time in which blocks may be brought.
    """
    first, state_mib = random.randrange(1 << 30), int(way == "state")
    with Talk(program, engine_socket(in_memory.socket), "128", "128", str(state_mib)) as talk:
        talk.say("direct", 0 if way == "read into cells" else -1)
        talk.say("answer", 0, first, 192)
        talk.say("settle", 3 + state_mib)
        talk.say("computes", int(LONG_S * 1000))
        assert restored(talk.say("prompt", 1, first, 193)) == 192
        last = last_restore(in_memory, talk, 1)
        assert last.tokens == 192
        assert 0 < last.copy_seconds < LONG_S * 0.9  # 6 MiB
        if way == "read into cells":
            assert talk.say("reads") == "3 direct"


def last_restore(daemon: SidecarProcess, talk: Talk, requests: int) -> pb.RestoreReport:
    """What it said of the last of so many requests."""

    def told(stat: adm.StatResponse) -> list[pb.RunnerReport]:
        mine = [one for one in stat.runners if one.pid == talk.process.pid]
        return [one for one in mine if one.requests >= requests]

    (runner,) = told(daemon.wait(lambda stat: bool(told(stat)), f"{requests} are reported"))
    return runner.last_restore


def test_waiting_for_room_is_not_reading(program: Path, daemon: SidecarProcess) -> None:
    """A state of another prompt takes all that may be read ahead, until its slot has it."""
    first = random.randrange(1 << 30)
    with Talk(program, engine_socket(daemon.socket), "8", "128", "8") as talk:
        talk.say("answer", 0, first, 64)
        talk.say("settle", 9)
        talk.say("begin", 1, first, 65)
        reads_ahead(talk, 8 + 2 * BLOCK_MIB)
        talk.say("begin", 2, first, 65)
        time.sleep(LONG_S)
        assert restored(talk.say("bring", 1)) == 64
        assert restored(talk.say("bring", 2)) == 64
        last = last_restore(daemon, talk, 2)
        assert last.tokens == 64
        assert 0 < last.fetch_seconds < LONG_S * 0.9


def test_what_a_slot_loses_is_kept_a_block_at_a_time(talk: Talk, first: int) -> None:
    """Meanwhile the thread may ask for the same rows."""
    talk.say("answer", 0, first, 64 * 6)
    talk.say("slow", SLOW_MS // PLANES)
    assert steps(talk.say("keep", 0, 64)) >= 5
    talk.say("slow", 0)
    talk.say("hold", 0, first, 64)
    assert talk.say("settle", 6).startswith("6 blocks")
    assert talk.say("prompt", 1, first, 385) == "have 0 restored 384 reason 0"


def test_two_slots_get_their_rows_side_by_side(talk: Talk, first: int) -> None:
    other = first + (1 << 29)
    talk.say("answer", 0, first, 640)
    talk.say("answer", 1, other, 500)
    assert talk.say("settle", 18).startswith("18 blocks")
    talk.say("begin", 2, first, 641)
    talk.say("begin", 3, other, 501)
    said = talk.say("bring", 2, 3).split("; ")
    assert sorted(said) == ["have 0 restored 500 reason 0", "have 0 restored 640 reason 0"]


def test_little_is_read_ahead_of_the_slots(program: Path, daemon: SidecarProcess) -> None:
    """At most so much for all of them, and two blocks for each; in the end all of it arrives."""
    first = random.randrange(1 << 30)
    with Talk(program, engine_socket(daemon.socket), "12") as talk:
        talk.say("answer", 0, first, 640)
        talk.say("settle", 10)
        talk.say("begin", 2, first, 641)
        reads_ahead(talk, 6 * BLOCK_MIB)
        talk.say("begin", 3, first, 641)
        reads_ahead(talk, 8 * BLOCK_MIB)
        said = talk.say("bring", 2, 3)
        assert said == "; ".join(["have 0 restored 640 reason 0"] * 2)


def reads_ahead(talk: Talk, mib: int) -> None:
    """So much is read in the end, and never more. A busy machine may pause on the way."""
    deadline = time.monotonic() + SECONDS
    while (said := int(talk.say("ahead").split()[0])) < mib and time.monotonic() < deadline:
        pass
    assert said == mib


def test_states_count_among_what_is_read_ahead(program: Path, daemon: SidecarProcess) -> None:
    """One at a time if two are too much, and one that is too large by itself all the same."""
    first = random.randrange(1 << 30)
    for state_mib, limit_mib in ((8, 12), (20, 8)):
        first += 1 << 20
        most = str(limit_mib), "128", str(state_mib)
        with Talk(program, engine_socket(daemon.socket), *most) as talk:
            talk.say("answer", 0, first, 640)
            assert talk.say("settle", 11).startswith("11 blocks")
            talk.say("begin", 2, first, 641)
            reads_ahead(talk, state_mib + 2 * BLOCK_MIB)
            talk.say("begin", 3, first, 641)
            reads_ahead(talk, state_mib + 2 * BLOCK_MIB)
            said = talk.say("bring", 2, 3)
            assert said == "; ".join(["have 0 restored 640 reason 0"] * 2)


def test_states_for_which_there_is_no_room_are_not_kept(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    with Talk(program, engine_socket(daemon.socket), "128", "4", "8") as talk:
        talk.say("answer", 0, first, 640)
        assert talk.say("settle", 10).startswith("10 blocks")
        assert talk.say("prompt", 1, first, 641) == "have 0 restored 0 reason 23"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("into_cells", [False, True])
def test_a_prompt_that_waits_longer_than_a_lease_gets_all_its_rows(
    program: Path, first: int, into_cells: bool
) -> None:
    """The main loop has no time; meanwhile others store so much that what nobody holds goes."""
    settings = {"lease_seconds": 1}
    with (
        short_directory() as folder,
        tmpfs_directory() as memory,
        SidecarProcess(
            folder,
            ram_gb=0.05,
            local_gb=0.05,
            settings=settings,
            fast=memory if into_cells else None,
        ) as daemon,
        Talk(program, engine_socket(daemon.socket), str(2 * BLOCK_MIB)) as talk,
    ):
        talk.say("answer", 0, first, 640)
        talk.say("settle", 10)
        if into_cells:
            talk.say("direct", 0)
        talk.say("begin", 1, first, 641)
        time.sleep(2.5)
        stored = fill(talk, [first + other * 10_000 for other in range(1, 6)], 10)
        talk.say("reads")
        assert talk.say("bring", 1) == "have 0 restored 640 reason 0"
        assert talk.say("reads") == f"{10 if into_cells else 0} direct"
        talk.say("hold", 1, 0, 0)
        fill(talk, [first + other * 10_000 for other in range(6, 11)], stored)
        assert restored(talk.say("prompt", 1, first, 641)) < 640  # nobody held them


def fill(talk: Talk, firsts: list[int], before: int) -> int:
    """Stores and reads prompts of ten blocks each. On a busy machine the sidecar may have no room
    for a block, because those before it are not on the disk yet: it is stored with the next answer,
    and others may be once more. How many were written, with those `before`.
    """
    stored = before
    for one in firsts:
        wanted = stored + 10
        for _ in range(3):
            if stored < wanted:
                talk.say("answer", 0, one, 640)
                stored = int(talk.say("settle", wanted).split()[0])
        assert stored >= wanted
        talk.say("hold", 0, 0, 0)
        talk.say("prompt", 0, one, 641)
    return stored


def test_a_look_up_waits_for_another_one_of_the_same_connection(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    """As long as it takes: that is not the sidecar's fault."""
    with (
        short_directory() as folder,
        SlowSidecar(folder / "s", engine_socket(daemon.socket)) as between,
        Talk(program, between.path) as talk,
    ):
        talk.say("answer", 0, first, 640)
        talk.say("settle", 10)
        between.pending = True
        talk.say("begin", 2, first, 641)
        assert between.waiting.wait(SECONDS)
        talk.say("begin", 3, first, 641)
        time.sleep(0.3)
        between.pending = False
        said = talk.say("bring", 2, 3)
    assert said == "; ".join(["have 0 restored 640 reason 0"] * 2)


def test_a_block_that_was_half_read_is_not_stored_when_the_rest_is_lost(
    talk: Talk, first: int
) -> None:
    talk.say("answer", 0, first, 64)
    talk.say("turn")
    talk.say("lose", 0)
    talk.say("answer", 1, first + (1 << 29), 64)  # ends after it
    assert talk.say("settle", 1).startswith("1 blocks")
    assert restored(talk.say("prompt", 1, first, 65)) == 0


def test_a_block_that_is_half_read_when_the_engine_ends_is_not_stored(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    with Talk(program, engine_socket(daemon.socket)) as talk:
        talk.say("slow", 50)
        talk.say("answer", 0, first, 64)
        talk.say("turn")
    with Talk(program, engine_socket(daemon.socket)) as talk:
        assert restored(talk.say("prompt", 0, first, 65)) == 0


@pytest.mark.timeout(SECONDS)
def test_a_server_that_wakes_from_sleep_does_not_wait_for_a_saver_that_wakes_it(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    """It holds what the saver's thread waits for, and ends it."""
    with Talk(program, engine_socket(daemon.socket)) as talk:
        assert talk.say("asleep", 0, first, 640) == "done"
        talk.say("answer", 1, first + (1 << 29), 64)
        assert talk.say("settle", 1).startswith("1 blocks")


def test_what_is_answered_before_the_first_hello_is_stored(
    program: Path, daemon: SidecarProcess, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVT_EAGER", "1")
    with (
        short_directory() as folder,
        SlowSidecar(folder / "s", engine_socket(daemon.socket)) as slow,
    ):
        slow.seconds = 0.5
        with Talk(program, slow.path) as talk:
            assert talk.greeting == "not up"
            talk.say("answer", 0, first, 640)
            slow.seconds = 0.0
            assert talk.say("settle", 10).startswith("10 blocks")


def test_a_block_that_was_half_read_is_stored_as_it_was_before_a_shift(
    talk: Talk, first: int
) -> None:
    talk.say("answer", 0, first, 64)
    talk.say("turn")
    talk.say("shift", 0, 0)
    assert talk.say("settle", 1).startswith("1 blocks")
    assert restored(talk.say("prompt", 1, first, 65)) == 64


def test_rows_that_change_before_there_was_time_to_keep_them_are_not_stored(
    talk: Talk, first: int
) -> None:
    talk.say("answer", 0, first, 640)
    talk.say("forget", 0, 330)
    assert talk.say("settle", 5).startswith("5 blocks")
    assert restored(talk.say("prompt", 1, first, 641)) == 320


def test_without_memory_for_a_block_what_comes_before_it_is_stored(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 640)
    talk.say("throws", 2 * PLANES + 1)
    talk.say("answer", 1, first + (1 << 29), 64)  # ends after it
    assert talk.say("settle", 2).startswith("2 blocks")
    talk.say("throws", 1 << 20)
    assert restored(talk.say("prompt", 2, first, 641)) == 128
    # What comes after it is stored as soon as there is memory, and so is the next one.
    assert talk.say("settle", 11).startswith("11 blocks")


def test_without_memory_to_keep_a_block_it_is_not_stored(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 640)
    talk.say("throws", 0)
    talk.say("keep", 0, 0)
    talk.say("throws", 1 << 20)
    talk.say("answer", 1, first + (1 << 29), 64)
    assert talk.say("settle", 1).startswith("1 blocks")
    assert restored(talk.say("prompt", 2, first, 641)) == 0


@pytest.mark.parametrize("state_mib", [0, 1])
def test_a_prompt_does_not_wait_for_a_disk_that_hangs(
    program: Path, daemon: SidecarProcess, state_mib: int
) -> None:
    """Where nothing may be waited for, nothing new has come for too long at once."""
    first = random.randrange(1 << 30)
    with (
        short_directory() as folder,
        SlowSidecar(folder / "s", engine_socket(daemon.socket)) as slow,
        Talk(program, slow.path, "128", "128", str(state_mib), "0") as talk,
    ):
        talk.say("answer", 0, first, 640)
        talk.say("settle", 10 + state_mib)
        slow.seconds = 0.05
        assert talk.say("prompt", 1, first, 641) == "have 0 restored 0 reason 12"
    daemon.wait(nothing_is_held, "nothing is held afterwards", SECONDS)


def test_a_prompt_that_nobody_wants_any_more(talk: Talk, first: int) -> None:
    """Dropped while it is looked up or read; its slot may get another at once. `talk` sees that
    nothing is leased afterwards, and its program ends although some of it was never fetched.
    """
    talk.say("answer", 0, first, 1000)
    talk.say("settle", 16)
    for _ in range(5):
        talk.say("begin", 1, first, 1001)
        talk.say("drop", 1)
        talk.say("begin", 1, first, 1001)
        talk.say("begin", 1, first, 701)
        assert talk.say("bring", 1) == "have 0 restored 700 reason 0"
        talk.say("lose", 1)
    talk.say("begin", 1, first, 1001)


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


def test_rows_for_which_there_is_no_room_are_not_stored_after_a_shift(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    with Talk(program, engine_socket(daemon.socket), "128", "4") as talk:
        talk.say("answer", 0, first, 640)
        talk.say("shift", 0, 0)
        talk.say("answer", 1, first + (1 << 29), 64)
        assert talk.say("settle", 3).startswith("3 blocks")
        assert restored(talk.say("prompt", 1, first, 641)) == 128


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


@pytest.mark.parametrize("checksums", [0, PLANES - 1, PLANES, PLANES + 1])
def test_a_sidecar_that_names_too_few_checksums_is_not_believed(
    program: Path, tmp_path: Path, checksums: int
) -> None:
    segment = bytes(64 * ROW_BYTES)
    crcs = struct.pack("<I", crc32c(segment)) * checksums
    with tmpfs_directory() as memory:
        path = memory / "file"
        path.write_bytes(bytes(4096) + segment * PLANES)
        path.chmod(0o600)
        file = m.File(str(path), path.stat().st_size, 4096, 0, 64, 64, 1, crcs)
        answer = frame(Kind.MATCHED, m.Matched(64, 1, False, 0, 0, 0, (file,)).pack())
        with BadSidecar(tmp_path / "s", [answer]), Talk(program, tmp_path / "s") as talk:
            talk.say("direct", 0)
            said = talk.say("prompt", 0, 0, 65)
            taken = talk.say("reads")
    assert said.startswith("have 0 restored 0 ") == (checksums != PLANES)
    assert taken == f"{int(checksums == PLANES)} direct"


def block_file(path: Path, first: int, rows: int) -> m.File:
    """A block as an engine of these tests would have written it, for tokens from 0 on."""
    segments = [
        b"".join(bytes([mark(first + row, plane)]) * ROW_BYTES for row in range(rows))
        for plane in range(PLANES)
    ]
    crcs = b"".join(struct.pack("<I", crc32c(segment)) for segment in segments)
    path.write_bytes(bytes(4096) + b"".join(segments))
    path.chmod(0o600)
    return m.File(str(path), path.stat().st_size, 4096, first, rows, rows, 1, crcs)


def mark(position: int, plane: int) -> int:
    """Of the row of token `position` at that position."""
    return (position * 31 + position * 7 + plane * 3) & 0xFF


def state_file(path: Path, n_tokens: int, engine_bytes: int = 100) -> m.File:
    head = b"KVTCKPT\n" + struct.pack("<4I", 1, n_tokens, 0, n_tokens - 1)
    last = ((n_tokens - 1) * 31 + n_tokens * 7) & 0xFF
    data = head + bytes([last]) * engine_bytes
    path.write_bytes(bytes(4096) + data.ljust(4096, b"\0"))
    path.chmod(0o600)
    crcs = struct.pack("<I", crc32c(data))
    return m.File(str(path), 8192, 4096, n_tokens, 0, len(data), 1, crcs, FileKind.STATE)


def window_file(path: Path, first: int, rows: int, used: int) -> m.File:
    data = b"".join(bytes([mark(first + row, PLANES)]) * WINDOW_BYTES for row in range(rows))[:used]
    path.write_bytes(bytes(4096) + data.ljust(4096 * (1 + used // 4096), b"\0"))
    path.chmod(0o600)
    crcs = struct.pack("<I", crc32c(data))
    size = path.stat().st_size
    return m.File(str(path), size, 4096, first, rows, used, 1, crcs, FileKind.WINDOW)


def told(program: Path, tmp_path: Path, rows: int, files: list[m.File], *options: str) -> str:
    """What becomes of a prompt of which a sidecar says that."""
    answer = frame(Kind.MATCHED, m.Matched(rows, 1, False, 0, 0, 0, tuple(files)).pack())
    with BadSidecar(tmp_path / "s", [answer]), Talk(program, tmp_path / "s", *options) as talk:
        return talk.say("prompt", 0, 0, rows + 1)


@pytest.mark.parametrize(("rows", "restored"), [(64, 64), (65, 0), (1000, 0)])
def test_a_file_of_more_rows_than_a_block_has_is_not_read(
    program: Path, tmp_path: Path, rows: int, restored: int
) -> None:
    said = told(program, tmp_path, rows, [block_file(tmp_path / "file", 0, rows)])
    assert said == f"have 0 restored {restored} reason {0 if restored else 9}"


@pytest.mark.parametrize("lacks", [None, 0, 1])
def test_a_state_without_all_its_rows_is_not_resumed(
    program: Path, tmp_path: Path, lacks: int | None
) -> None:
    files = [block_file(tmp_path / f"file{i}", 64 * i, 64) for i in range(2)]
    if lacks is not None:
        Path(files[lacks].path).unlink()
    files.append(state_file(tmp_path / "state", 128))
    said = told(program, tmp_path, 128, files, "128", "128", "1")
    assert (
        said
        == f"have 0 restored {0 if lacks is not None else 128} reason {12 * (lacks is not None)}"
    )


@pytest.mark.parametrize("more", [0, -1, 1, -WINDOW_BYTES, 64 * WINDOW_BYTES])
def test_a_window_of_another_size_is_not_put_back(
    program: Path, tmp_path: Path, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVT_WINDOW_BYTES", str(WINDOW_BYTES))
    files = [block_file(tmp_path / f"file{i}", 64 * i, 64) for i in range(3)]
    used = 64 * WINDOW_BYTES
    files.append(window_file(tmp_path / "window1", 64, 64, used))
    files.append(window_file(tmp_path / "window2", 128, 64, used + more))
    said = told(program, tmp_path, 192, files)
    assert said == f"have 0 restored {0 if more else 192} reason {9 if more else 0}"


def test_states_of_another_continuation_are_not_there(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    with Talk(program, engine_socket(daemon.socket), "128", "128", "1") as talk:
        talk.say("answer", 0, first, 640)
        assert talk.say("settle", 11).startswith("11 blocks")
        talk.say("answer", 1, first + (1 << 29), 64)
        assert talk.say("settle", 13).startswith("13 blocks")  # the first job has ended
        assert talk.say("has", 0, first, 640) == "yes"
        assert talk.say("has", 0, first, 640, 639) == "no"
        assert talk.say("has", 0, first, 640, 64) == "no"
        assert talk.say("has", 0, first, 639) == "no"
        assert talk.say("has", 1, first, 640) == "no"


def test_rows_that_went_unannounced_are_never_stored(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 1000)
    talk.say("lose", 0)
    talk.say("answer", 1, first + (1 << 29), 64)  # ends after it
    assert talk.say("settle", 1).startswith("1 blocks")
    assert restored(talk.say("prompt", 1, first, 1001)) == 0
    # Nothing is left reserved: the same can be stored at once.
    talk.say("answer", 0, first, 1000)
    assert talk.say("settle", 17).startswith("17 blocks")


def test_what_is_refused_gives_back_its_reservations(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "block.tmp"
    path.write_bytes(bytes(4096 + (BLOCK_MIB << 20)))
    path.chmod(0o600)
    named = m.EngineReserved(1, str(path), path.stat().st_size, 4096, 0, 64)
    plan = frame(Kind.PLANNED, m.Planned(m.EngineOutcome.ALL, "", (named,)).pack())
    refused = frame(Kind.COMMITTED, m.Committed(("the header cannot be written",)).pack())
    ask = frame(Kind.PLANNED, m.Planned(m.EngineOutcome.FINGERPRINTS, "").pack())
    sidecar = AnsweringSidecar(tmp_path / "s", [ask, plan, refused])
    with sidecar, Talk(program, tmp_path / "s") as talk:
        talk.say("answer", 0, 0, 64)
        for _ in range(PLANES):
            talk.say("turn")
        assert sidecar.hung_up.wait(SECONDS)
    assert sidecar.answers_given == 3


def test_a_large_state_that_comes_slowly_is_waited_for(
    program: Path, daemon: SidecarProcess, first: int
) -> None:
    """It takes longer than anything else may."""
    most = "512", "512", "64", "1000"
    with Talk(program, engine_socket(daemon.socket), *most) as talk:
        talk.say("answer", 0, first, 640)
        assert talk.say("settle", 11).startswith("11 blocks")
        talk.say("hang", "pread")
        talk.say("begin", 1, first, 641)
        time.sleep(1.5)
        talk.say("go", "on")
        assert talk.say("bring", 1) == "have 0 restored 640 reason 0"


def test_what_is_answered_while_the_saver_connects_again_is_stored(talk: Talk, first: int) -> None:
    """It hangs up to give back what it reserved for rows that are gone."""
    talk.say("answer", 0, first, 64)
    talk.say("lose", 0)
    talk.say("turn")  # the rows are missed
    time.sleep(0.05)
    talk.say("answer", 1, first + (1 << 29), 128)
    assert talk.say("settle", 2).startswith("2 blocks")


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
            damage(daemon, oldest_first(daemon)[4])
            said = talk.say("prompt", 1, first, 641)
        assert said.endswith("reason 11")
        assert restored(said) % 64 == 0
        assert restored(said) < 640


def oldest_first(daemon: SidecarProcess) -> list[Path]:
    times: dict[Path, int] = {}
    for folder, _, names in os.walk(daemon.ram_dir):  # which goes on if one is removed meanwhile
        for path in (Path(folder, name) for name in names if name.endswith(".kvb")):
            with contextlib.suppress(FileNotFoundError):  # the sidecar has just found it damaged
                times[path] = path.stat().st_mtime_ns
    return sorted(times, key=times.__getitem__)


def damage(daemon: SidecarProcess, one: Path) -> None:
    """In every tier."""
    for path in (*daemon.ram_dir.rglob(one.name), *daemon.local_dir.rglob(one.name)):
        flip_the_end(path)


def flip_the_end(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(bytes([path.read_bytes()[-1] ^ 0x10]))
    path.chmod(0o400)


def test_of_many_damaged_blocks_the_first_ends_what_comes_back(program: Path, first: int) -> None:
    """They are read side by side, and may be found out in any order."""
    with (
        short_directory() as directory,
        SidecarProcess(directory, ram_gb=0.5) as daemon,
        Talk(program, engine_socket(daemon.socket)) as talk,
    ):
        for turn in range(4):
            begin, before = first + 10_000 * turn, set(oldest_first(daemon))
            talk.say("answer", 0, begin, 1280)
            stored = 20 * (turn + 1)
            assert talk.say("settle", stored).startswith(f"{stored} blocks")
            daemon.wait_written()
            whole = [struct.pack("<2i", begin + row, begin + row + 1) for row in range(0, 256, 64)]
            for path in set(oldest_first(daemon)) - before:
                head = path.read_bytes()[:8192]
                if not any(tokens in head for tokens in whole):
                    damage(daemon, path)
            assert talk.say("prompt", 1, begin, 1281) == "have 0 restored 256 reason 11"


def test_without_a_sidecar_nothing_is_kept(program: Path, tmp_path: Path) -> None:
    with Talk(program, tmp_path / "nobody") as talk:
        assert talk.greeting == "not up"
        talk.say("answer", 0, 0, 1000)
        assert talk.say("prompt", 0, 5000, 100) == "have 0 restored 0 reason 7"


@pytest.fixture(scope="module")
def in_memory() -> Iterator[SidecarProcess]:
    """A sidecar whose first tier is what it should be."""
    with (
        short_directory() as root,
        tmpfs_directory() as fast,
        SidecarProcess(root, ram_gb=0.5, fast=fast) as running,
    ):
        yield running


@pytest.fixture
def direct(program: Path, in_memory: SidecarProcess, first: int) -> Iterator[Talk]:
    """16 blocks are stored, and the next prompts may read them into their cells."""
    with Talk(program, engine_socket(in_memory.socket)) as talk:
        talk.say("answer", 0, first, 1000)
        assert talk.say("settle", 16).startswith("16 blocks")
        talk.say("direct", 0)
        yield talk
    in_memory.wait(nothing_is_held, "nothing is held afterwards", SECONDS)


def test_what_lies_in_memory_is_read_into_its_cells(
    direct: Talk, in_memory: SidecarProcess, first: int
) -> None:
    assert direct.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"
    assert direct.say("reads") == "16 direct"
    in_memory.wait(nothing_is_held, "its files are given back at once", SECONDS)


def test_reading_into_cells_takes_the_main_loop_a_little_at_a_time(
    direct: Talk, first: int
) -> None:
    """How much it may be is known after the first few of them."""
    direct.say("slow", SLOW_MS)
    said = direct.say("prompt", 1, first, 1001)
    direct.say("slow", 0)
    steps = re.search(r"in (\d+) steps, longest (\d+) ms", said)
    assert steps
    assert said.startswith("have 0 restored 1000 reason 0")
    assert int(steps[1]) >= 12
    assert direct.say("reads") == "16 direct"


def test_of_a_block_that_is_not_wanted_whole_a_part_is_copied(direct: Talk, first: int) -> None:
    direct.say("answer", 1, first, 100)
    assert direct.say("prompt", 1, first, 901) == "have 100 restored 800 reason 0"
    # All but the last: nobody knows yet which rows the slot had, so the first two come again.
    assert direct.say("reads") == "14 direct"


def test_where_cells_lie_apart_a_block_is_copied(direct: Talk, first: int) -> None:
    for each, placed in ((1, 0), (3, 11)):
        direct.say("direct", each)
        assert direct.say("prompt", each, first, 1001) == "have 0 restored 1000 reason 0"
        blocks = int(direct.say("reads").split()[0])
        assert blocks == 0 if each == 1 else 0 < blocks <= placed


def test_without_cells_for_all_of_it_the_rest_is_computed(direct: Talk, first: int) -> None:
    direct.say("full", 300)
    assert direct.say("prompt", 1, first, 1001) == "have 0 restored 256 reason 16"
    assert direct.say("reads") == "4 direct"


def test_a_damaged_block_in_memory_ends_what_is_read_into_cells(
    direct: Talk, in_memory: SidecarProcess, first: int
) -> None:
    """Also those behind it, which are read beside it, and are as they were."""
    in_memory.wait_written()
    block = struct.pack("<64i", *range(first + 320, first + 384))
    paths = [path for path in in_memory.ram_dir.rglob("*.kvb") if block in path.read_bytes()[:8192]]
    assert len(paths) == 1
    flip_the_end(paths[0])
    assert direct.say("prompt", 1, first, 1001) == "have 0 restored 320 reason 11"
    assert direct.say("reads") == "5 direct"

    def whole(_: object) -> bool:  # once it is gone, the other tier has it
        direct.say("lose", 2)
        return restored(direct.say("prompt", 2, first, 1001)) == 1000

    in_memory.wait(whole, "what is damaged goes", SECONDS)


def test_a_prompt_dropped_before_its_blocks_are_read(direct: Talk, first: int) -> None:
    for _ in range(5):
        direct.say("begin", 1, first, 1001)
        direct.say("drop", 1)
        direct.say("begin", 1, first, 701)
        assert direct.say("bring", 1) == "have 0 restored 700 reason 0"
        direct.say("lose", 1)


def test_a_tier_on_a_disk_is_not_taken_for_memory(talk: Talk, first: int) -> None:
    talk.say("answer", 0, first, 1000)
    talk.say("settle", 16)
    talk.say("direct", 0)
    assert talk.say("prompt", 1, first, 1001) == "have 0 restored 1000 reason 0"
    assert talk.say("reads") == "0 direct"


def test_the_first_answer_waits_until_the_model_is_checked(
    program: Path, tmp_path: Path, first: int
) -> None:
    """Two endless files keep the sidecar from reading the engine's own."""
    endless = [tmp_path / "one", tmp_path / "two"]
    for path in endless:
        path.touch()
        os.truncate(path, 1 << 40)
    with short_directory() as directory, SidecarProcess(directory, ram_gb=0.5) as daemon:
        with BlockClient(daemon.socket) as client:
            assert client.check_files([LoadedFile.of(path) for path in endless]) == ()
        with Talk(program, engine_socket(daemon.socket)) as talk:
            talk.say("answer", 0, first, 1000)
            time.sleep(1.0)
            assert not any(tier.blocks or tier.reserved_bytes for tier in daemon.stat().tiers)
            assert restored(talk.say("prompt", 1, first, 1001)) == 0
            for path in endless:
                os.truncate(path, 0)
            assert talk.say("settle", 16).startswith("16 blocks")
            assert restored(talk.say("prompt", 2, first, 1001)) == 1000
