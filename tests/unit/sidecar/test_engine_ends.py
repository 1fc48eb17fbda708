"""Whatever becomes of an engine, of its connection or of its files: nothing is left behind, and
nobody else is kept waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ollama_tiering.client.engine_client import EngineRefused
from ollama_tiering.config import SOCKET_PATH_MAX_BYTES, load_sidecar
from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import EngineFailure, Kind
from ollama_tiering.protocol.engine.wire import HEAD, frame, frame_head
from ollama_tiering.sidecar.engine.connection import Connection
from ollama_tiering.sidecar.engine.listener import MAX_CONNECTIONS, place
from ollama_tiering.store.block.blockfile import buffer_reader, encode_block, plan_block, read_meta
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from tests.contract.fake_engine import (
    Damage,
    FakeEngine,
    engine_socket,
    hello,
    nothing_is_held,
    prompt,
)
from tests.sidecar import SidecarProcess

SECONDS = 20.0
NOBODY = 65534


# --- damage ---------------------------------------------------------------------------------------


def test_a_damaged_file_is_found_reported_and_gone(
    daemon: SidecarProcess, engine: FakeEngine
) -> None:
    tokens = prompt(40_000, 200)
    engine.store(tokens)
    # Until it is on the disk, the mover may be the one that reads it and finds the damage.
    daemon.wait_written()
    found = engine.look_up(tokens)
    path = Path(found.files[1].path)
    path.chmod(0o600)
    with path.open("r+b") as opened:
        opened.seek(found.files[1].payload_offset + 5)
        opened.write(b"\xff\x00\xff")
    path.chmod(0o400)
    with pytest.raises(Damage) as caught:
        engine.restore(tokens)
    assert caught.value.file == 1
    again = engine.look_up(tokens)
    engine.client.damaged(m.Damaged(again.lease_id, 1))
    assert engine.restore(tokens) in (64, 199)  # the disk may have a sound copy
    assert sum(tier.quarantined_blocks for tier in daemon.stat().tiers) == 1


def test_a_sound_file_that_is_called_damaged_stays(engine: FakeEngine) -> None:
    tokens = prompt(41_000, 200)
    engine.store(tokens)
    found = engine.look_up(tokens)
    engine.client.damaged(m.Damaged(found.lease_id, 0))
    assert engine.restore(tokens) == 199
    with pytest.raises(EngineRefused, match="no such file"):
        engine.client.damaged(m.Damaged(found.lease_id, 99))


def other_rows(data: bytes) -> bytes:
    """A sound file of the same block, with other rows: as another machine may have stored it."""
    meta = read_meta(buffer_reader(data), len(data))
    shapes = [SegmentShape(s.child, s.layer, s.kind, s.dtype, s.row_bytes) for s in meta.segments]
    plan = plan_block(
        namespace=meta.namespace,
        parent=meta.parent,
        tokens=meta.tokens,
        first_position=meta.first_position,
        shapes=shapes,
        fingerprint=meta.fingerprint,
    )
    return encode_block(plan, [bytes(segment.raw_bytes) for segment in meta.segments])


def test_a_file_that_one_of_another_history_has_replaced_is_not_used(engine: FakeEngine) -> None:
    tokens = prompt(42_000, 64)
    engine.store(tokens)
    found = engine.look_up([*tokens, 1])
    path = Path(found.files[0].path)
    data = path.read_bytes()
    other = path.with_suffix(".other")
    other.write_bytes(other_rows(data))
    other.chmod(0o400)
    # In one step, as every writer does it: the sidecar copies this file to the disk meanwhile, and
    # one that is empty for a moment would be a disk that cannot read, whose tier rests.
    other.replace(path)
    with pytest.raises(Damage):  # the checksums are still those of the first one
        engine.read(0, found.files[0])
    engine.client.damaged(m.Damaged(found.lease_id, 0))
    # Rows of another history under this name: what would follow them was computed with others. The
    # disk may have had a sound copy by then.
    found = engine.look_up([*tokens, 1])
    if found.files:
        engine.read(0, found.files[0])
    else:
        assert found.reason == pb.SHORTFALL_NOTHING_STORED


# --- ends of connections --------------------------------------------------------------------------

HOLDS = """
import sys, time
from pathlib import Path
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import FakeEngine
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.store.block.key import tokens_to_bytes
stored, new = list(range(50_000, 50_200)), list(range(51_000, 51_200))
engine = FakeEngine(Path(sys.argv[1]))
engine.store(stored)
assert engine.look_up(stored).lease_id
assert len(engine.plan(new).files) == 4
if sys.argv[2] == "in a frame":
    engine.client._socket.sendall(b"\\x10\\x00\\x00\\x00\\x02")
print("holds", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("where", ["between requests", "in a frame"])
def test_an_engine_that_is_killed_leaves_no_lease_and_no_reservation(
    daemon: SidecarProcess, where: str
) -> None:
    daemon.wait(nothing_is_held, "nothing is held before", SECONDS)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(daemon.socket), where],
        env=daemon.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "holds\n"
        stat = daemon.stat()
        assert stat.open_leases == 1
        assert stat.tiers[0].reserved_bytes > 0
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    daemon.wait(nothing_is_held, "lease and reservations are given back", SECONDS)
    assert list(daemon.ram_dir.rglob("*.tmp")) == []


def test_a_restart_of_the_sidecar_ends_connections_and_new_ones_find_what_was_stored(
    tmp_path: Path,
) -> None:
    tokens = prompt(52_000, 64 * 20)
    with SidecarProcess(tmp_path) as daemon:
        with FakeEngine(daemon.socket) as engine:
            engine.store(tokens)
            new = prompt(53_000, 64)
            (file,) = engine.plan(new).files
            daemon.stop()
            with pytest.raises(ServiceError):
                engine.look_up(tokens)
        daemon.start()
        with FakeEngine(daemon.socket) as engine:
            filled = m.EngineFilled(file.reservation_id, bytes(16))
            reasons = engine.client.commit(m.Commit((filled,))).reasons
            assert reasons == ("no such reservation",)
            # Nothing is remembered of so many files: they are not opened within the look-up.
            found = engine.client.match(m.EngineMatch(tokens_to_bytes(tokens)))
            assert (found.pending, found.files, found.rows) == (True, (), 64 * 20 - 1)
            assert len(engine.client.wait(found.lease_id).files) == 20
            again = engine.client.match(m.EngineMatch(tokens_to_bytes(tokens)))
            assert (again.pending, len(again.files)) == (False, 20)
        assert "Traceback" not in daemon.log


# --- strangers ------------------------------------------------------------------------------------

AS_OTHER_USER = f"""
import os, socket, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
with socket.socket(socket.AF_UNIX) as plain:
    plain.settimeout(10)
    try:
        plain.connect(sys.argv[1])
    except PermissionError:
        sys.exit("EACCES")
    try:
        plain.sendall(bytes(8))
        print("answered" if plain.recv(100) else "hung up")
    except (BrokenPipeError, ConnectionResetError):
        print("hung up")
"""


def as_other_user(path: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("acting as another user needs root")
    command = [sys.executable, "-c", AS_OTHER_USER, str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return finished.stdout.strip() + finished.stderr.strip()


def test_another_user_is_refused_by_the_modes_and_again_by_its_uid() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        with SidecarProcess(Path(directory)) as daemon:
            path = engine_socket(daemon.socket)
            assert path.stat().st_mode & 0o777 == 0o600
            assert as_other_user(path) == "EACCES"
            path.parent.chmod(0o755)
            path.chmod(0o666)
            assert as_other_user(path) == "hung up"
            assert daemon.said(f"peer refused: uid={NOBODY}") == 1
            with FakeEngine(daemon.socket) as engine:  # its own user still is served
                assert engine.look_up([1]).rows == 0


def answer_to(daemon: SidecarProcess, sent: bytes) -> m.Failed:
    """What is said before the connection is closed."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(SECONDS)
        stranger.connect(str(engine_socket(daemon.socket)))
        stranger.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := stranger.recv(4096):
                received += part
    body_bytes, kind = frame_head(received[: HEAD.size], 4096)
    assert kind == Kind.FAILED
    return m.Failed.unpack(received[HEAD.size : HEAD.size + body_bytes])


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", EngineFailure.MALFORMED),
        (frame(Kind.HELLO, b"GET / HTTP/1.1\r\n\r\n"), EngineFailure.MALFORMED),
        (frame(Kind.HELLO, hello(version=1).pack()), EngineFailure.VERSION),
        (frame(Kind.HELLO, hello(layers=0).pack()), EngineFailure.REFUSED),
        (frame(Kind.MATCH, m.EngineMatch(b"").pack()), EngineFailure.REFUSED),
        (frame(Kind.HELLO, hello().pack()[:-1]), EngineFailure.MALFORMED),
        (HEAD.pack(1 << 20, Kind.HELLO, 0), EngineFailure.MALFORMED),
    ],
    ids=["http", "magic", "version", "no layers", "no hello", "cut", "a hello of a megabyte"],
)
def test_the_bytes_of_a_stranger_are_answered_and_never_fatal(
    daemon: SidecarProcess, sent: bytes, code: EngineFailure
) -> None:
    assert answer_to(daemon, sent).code is code
    assert "Traceback" not in daemon.log


def test_an_engine_of_another_version_is_in_the_log(daemon: SidecarProcess) -> None:
    assert (
        "version 1 is not spoken here, but 4"
        in answer_to(daemon, frame(Kind.HELLO, hello(version=1).pack())).message
    )
    assert daemon.said("engine refused: reason=version message=version 1 is not spoken")


def test_a_question_for_the_version_is_answered_and_no_hello(daemon: SidecarProcess) -> None:
    with socket.socket(socket.AF_UNIX) as engine:
        engine.settimeout(SECONDS)
        engine.connect(str(engine_socket(daemon.socket)))
        engine.sendall(frame(Kind.HELLO, m.QUESTION))
        assert engine.recv(4096) == frame(Kind.DONE, b"")
        engine.sendall(frame(Kind.MATCH, m.EngineMatch(b"").pack()))  # nobody was welcomed
        assert frame_head(engine.recv(4096)[: HEAD.size], 4096)[1] == Kind.FAILED


def test_an_unknown_request_is_malformed(daemon: SidecarProcess) -> None:
    with FakeEngine(daemon.socket) as engine, pytest.raises(EngineRefused) as caught:
        engine.client._ask(cast(Kind, 99), b"", Kind.DONE)
    assert caught.value.code is EngineFailure.MALFORMED


# --- slow engines ---------------------------------------------------------------------------------


def test_slow_and_silent_engines_keep_up_nobody_and_one_too_many_is_hung_up_on(
    tmp_path: Path,
) -> None:
    with SidecarProcess(tmp_path) as daemon, contextlib.ExitStack() as engines:
        path = engine_socket(daemon.socket)
        working = engines.enter_context(FakeEngine(daemon.socket))
        tokens = prompt(1000, 100)
        working.store(tokens)
        for number in range(MAX_CONNECTIONS - 1):
            silent = engines.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(path))
            silent.sendall(frame(Kind.HELLO, hello().pack())[: 4 + number % 20])
        with socket.socket(socket.AF_UNIX) as surplus:
            surplus.settimeout(SECONDS)
            surplus.connect(str(path))
            assert surplus.recv(1) == b""
        started = time.monotonic()
        assert daemon.stat().version  # gRPC goes on
        assert working.restore(tokens) == 99
        assert time.monotonic() - started < 5
        assert daemon.said("connections are open already")


class Accounts:
    def report(self, _: object) -> None:
        pass


class Engines:
    accounts = Accounts()


@contextlib.contextmanager
def connection(frame_seconds: float) -> Iterator[tuple[socket.socket, threading.Thread]]:
    """A client's end, and the thread that serves the other one."""
    ours, theirs = socket.socketpair()
    served = Connection(theirs, 1, cast(Any, Engines()), frame_seconds)
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    with ours, theirs:
        yield ours, thread
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_message_that_drips_is_given_up_although_each_byte_is_in_time() -> None:
    with connection(frame_seconds=0.3) as (ours, thread):
        deadline = time.monotonic() + SECONDS
        with contextlib.suppress(BrokenPipeError):
            for byte in frame(Kind.HELLO, hello().pack()):
                ours.sendall(bytes([byte]))
                thread.join(0.05)
                if not thread.is_alive():
                    break
        assert not thread.is_alive()
        assert time.monotonic() < deadline


def test_an_engine_may_be_silent_between_two_messages() -> None:
    with connection(frame_seconds=0.1) as (ours, thread):
        thread.join(0.5)
        assert thread.is_alive()
        ours.sendall(frame(Kind.HELLO, hello(unsupported="no").pack()))
        assert ours.recv(100) == frame(Kind.DONE, b"")
        thread.join(0.5)
        assert thread.is_alive()


def test_an_engine_that_does_not_take_its_answers_is_given_up() -> None:
    said = frame(Kind.HELLO, hello(unsupported="no").pack()) * 1000
    with connection(frame_seconds=0.3) as (ours, thread):
        ours.settimeout(0.1)
        deadline = time.monotonic() + SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
                ours.sendall(said)
        assert not thread.is_alive()


# --- where it is ----------------------------------------------------------------------------------


def test_the_socket_lies_beside_the_first_one_or_where_the_settings_say(tmp_path: Path) -> None:
    beside = load_sidecar({"sidecar.socket": "/run/x/s"}, path=None)
    assert place(beside) == Path("/run/x/s.engine")
    named = load_sidecar({"sidecar.socket": "/run/x/s", "sidecar.engine_socket": "/run/y/e"})
    assert place(named) == Path("/run/y/e")
    long = "/" + "x" * (SOCKET_PATH_MAX_BYTES - 4)
    assert place(load_sidecar({"sidecar.socket": long})) is None


def test_a_named_socket_is_listened_on_and_gone_at_the_end(tmp_path: Path) -> None:
    named = tmp_path / "elsewhere" / "e"
    environment = {"OLLAMA_KV_TIER_ENGINE_SOCKET": str(named)}
    with SidecarProcess(tmp_path, env=environment) as daemon:
        assert named.is_socket()
        assert not engine_socket(daemon.socket).exists()
    assert not named.exists()
