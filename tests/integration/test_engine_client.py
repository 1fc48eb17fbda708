"""The engine's client in C++ (llama_server/), compiled with sanitizers, against a real sidecar and
against one that says whatever it likes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import HEAD, frame
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import engine_socket, nothing_is_held
from tests.integration.bad_sidecar import BadSidecar
from tests.integration.engine_program import SANITIZERS, SECONDS, Talk, compiled
from tests.places import tmpfs_directory
from tests.sidecar import SidecarProcess

NOBODY = 65534
STRANGER = """
import os, socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
os.setuid(int(sys.argv[2]))
listening.listen()
print("listens", flush=True)
while True:
    print(listening.accept()[0].recv(1000).decode("latin-1"), end="", flush=True)
"""
BLOCK_BYTES = 7 * 4096  # head and six segments of a page or less
PRECIOUS = {  # a file's name, its size, where rows are to begin
    "new": ("block.tmp", BLOCK_BYTES, 4096),
    "another name": ("authorized_keys", BLOCK_BYTES, 4096),
    "a name that ends alike": ("block.tmp.gz", BLOCK_BYTES, 4096),
    "another size": ("block.tmp", BLOCK_BYTES + 1, 4096),
    "too short for its rows": ("block.tmp", BLOCK_BYTES - 4096, 4096),
    "room for more": ("block.tmp", BLOCK_BYTES + 4096, 4096),
    "rows over its head": ("block.tmp", BLOCK_BYTES - 4096, 0),
    "rows beside pages": ("block.tmp", BLOCK_BYTES, 4095),
    "not empty": ("block.tmp", BLOCK_BYTES, 4096),
    "two names": ("block.tmp", BLOCK_BYTES, 4096),
}
LATE_MS = 80
PAGE_BYTES = 4096
GARBAGE = 20  # answers that are none: each costs a pause of 200 ms


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_talk", request.param, tmp_path_factory.mktemp("kvt"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    with tempfile.TemporaryDirectory() as directory, SidecarProcess(Path(directory)) as running:
        yield running


def wait_stopped(pid: int) -> None:
    """A signal takes its time on a busy machine."""
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def milliseconds(answer: str) -> int:
    return int(answer.split()[-2])


def test_what_it_stored_comes_back_byte_for_byte(program: Path, daemon: SidecarProcess) -> None:
    first = random.randrange(1 << 20)
    with Talk(program, engine_socket(daemon.socket)) as talk:
        assert talk.greeting == "up"
        until = time.monotonic() + 30  # a busy machine takes a while to check the model's file
        while (said := talk.say("restore", first, 200)) == "rows 0 reason 24 state 0 ok":
            assert time.monotonic() < until
        assert said == "rows 0 reason 1 state 0 ok"
        assert talk.say("store", first, 200) == "stored 4 outcome 0"
        assert talk.say("store", first, 200) == "stored 0 outcome 0"
        assert talk.say("restore", first, 200) == "rows 199 reason 0 state 0 ok"
        assert talk.say("restore", first, 250, 70) == "rows 200 reason 2 state 0 ok"
        # A sound file that is called damaged stays.
        assert talk.say("report", first, 200) == "rows 199 reason 0 state 0 ok"
        assert talk.say("restore", first, 200) == "rows 199 reason 0 state 0 ok"
        assert talk.say("finish") == "ok"
        (runner,) = [one for one in daemon.stat().runners if one.pid == talk.process.pid]
    assert (runner.engine, runner.restored_tokens, runner.snapshot_blocks) == ("talk/1+0", 70, 4)


def test_a_state_comes_back_with_the_rows_before_it(program: Path, daemon: SidecarProcess) -> None:
    first = random.randrange(1 << 20)
    with Talk(program, engine_socket(daemon.socket), "states") as talk:
        state_bytes = (16 << 20) + 3
        assert talk.say("store", first, 100, 90, state_bytes) == "stored 3 outcome 0"
        assert talk.say("restore", first, 100) == f"rows 90 reason 23 state {state_bytes} ok"


def test_what_is_pending_is_waited_for(program: Path, tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as daemon:
        with Talk(program, engine_socket(daemon.socket)) as talk:
            assert talk.say("store", 0, 64 * 20) == "stored 20 outcome 0"
        daemon.stop()
        daemon.start()
        with Talk(program, engine_socket(daemon.socket)) as talk:
            assert talk.say("restore", 0, 64 * 20) == "rows 1279 reason 0 state 0 ok"


def test_damage_is_seen(program: Path, tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as daemon, Talk(program, engine_socket(daemon.socket)) as talk:
        talk.say("store", 0, 64)
        daemon.wait_written()
        for path in [*daemon.ram_dir.rglob("*.kvb"), *daemon.local_dir.rglob("*.kvb")]:
            path.chmod(0o600)
            with path.open("r+b") as opened:
                opened.seek(-4096, 2)
                opened.write(b"\x5a")
            path.chmod(0o400)
        assert talk.say("restore", 0, 65) == "the checksum does not match"
        assert talk.say("restore", 0, 65) == "the checksum does not match"


def test_a_sidecar_that_hangs_costs_one_timeout_in_all(program: Path, tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as daemon, Talk(program, engine_socket(daemon.socket)) as talk:
        assert daemon.process is not None
        talk.say("store", 0, 200)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            wait_stopped(daemon.process.pid)
            first = talk.say("match", 0, 200)
            assert first.startswith("late")
            assert LATE_MS <= milliseconds(first) < LATE_MS + 400
            second = talk.say("match", 0, 200)
            assert second.startswith("down")
            assert milliseconds(second) < 50
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert talk.say("up", 20_000) == "up"
        assert talk.say("restore", 0, 200) == "rows 199 reason 0 state 0 ok"


def test_it_goes_on_after_a_restart_of_the_sidecar(program: Path, tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as daemon, Talk(program, engine_socket(daemon.socket)) as talk:
        talk.say("store", 0, 200)
        daemon.kill()
        assert talk.say("match", 0, 200).split()[0] in ("broken", "down")
        assert talk.say("match", 0, 200).startswith("down")
        daemon.start()
        assert talk.say("up", 20_000) == "up"
        assert talk.say("restore", 0, 200) == "rows 199 reason 0 state 0 ok"


def test_killed_it_leaves_no_reservation(program: Path, daemon: SidecarProcess) -> None:
    daemon.wait(nothing_is_held, "nothing is held before", SECONDS)
    with Talk(program, engine_socket(daemon.socket)) as talk:
        assert talk.say("hold", random.randrange(1 << 20), 300) == "ok 5"
        assert daemon.stat().tiers[0].reserved_bytes > 0
        talk.kill()
        talk.process.wait(SECONDS)
    daemon.wait(nothing_is_held, "what was reserved is given back", SECONDS)


def test_an_engine_that_is_not_tiered_says_so_once_and_asks_nothing(
    program: Path, daemon: SidecarProcess
) -> None:
    with Talk(program, engine_socket(daemon.socket), "unsupported", "windows of another kind") as t:
        assert t.greeting.startswith("not up")
        assert t.say("match", 0, 100).startswith("down")
        (runner,) = [one for one in daemon.stat().runners if one.pid == t.process.pid]
    assert (runner.tiered, runner.reason) == (False, "windows of another kind")


def test_without_a_sidecar_nothing_happens(program: Path, tmp_path: Path) -> None:
    with Talk(program, tmp_path / "nobody") as talk:
        assert talk.greeting.startswith("not up: no sidecar listens")
        assert talk.say("match", 0, 100) == "down in 0 ms"


# --- a sidecar that says whatever it likes --------------------------------------------------------

FILES = (m.File("/dev/null", 4096, 4096, 0, 64, 64, 1, bytes(24)),)
GOOD = frame(Kind.MATCHED, m.Matched(64, 1, False, 0, 2, 64, FILES).pack())


def garbage(rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(100))
    if kind == 1:
        at = rng.randrange(HEAD.size, len(GOOD))
        return GOOD[:at] + struct.pack("<I", rng.choice((0, 0xFFFFFFFF, 1 << 31))) + GOOD[at + 4 :]
    if kind == 2:
        return GOOD[: rng.randrange(len(GOOD))]
    if kind == 3:
        return frame(rng.choice((2, 101, 103, 104, 106, 9999)), GOOD[HEAD.size :])
    at = rng.randrange(len(GOOD))
    return GOOD[:at] + rng.randbytes(1) + GOOD[at + 1 :]


def test_no_answer_does_harm(program: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    answers = [garbage(rng) for _ in range(GARBAGE)]
    seen = set()
    with BadSidecar(tmp_path / "s", answers), Talk(program, tmp_path / "s") as talk:
        assert talk.greeting == "up"
        for _ in answers:
            seen.add(talk.say("match", 0, 100).split()[0])
            assert talk.say("up", 20_000) == "up"
    assert "broken" in seen
    assert seen <= {"ok", "broken", "late", "refused", "down"}


@pytest.mark.parametrize("odd_bytes", [0, 100])  # past the page cache nothing odd can be read
@pytest.mark.parametrize("in_memory", [False, True])
def test_what_a_disk_gives_does_not_stay_in_the_page_cache(
    program: Path, tmp_path: Path, in_memory: bool, odd_bytes: int
) -> None:
    bytes_behind = 300 * PAGE_BYTES + odd_bytes
    letters = bytes(ord("a") + i % 26 for i in range(bytes_behind))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tmpfs_directory()) if in_memory else tmp_path
        path = folder / "file"
        path.write_bytes(bytes(PAGE_BYTES) + letters)
        path.chmod(0o600)
        with path.open("r+b") as opened:
            os.fsync(opened)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with (
            BadSidecar(tmp_path / "s", []),
            Talk(program, tmp_path / "s") as talk,
            path.open("rb") as opened,
        ):
            said = talk.say("payload", bytes_behind, path)
            assert said == f"{bytes_behind} bytes"
            if not in_memory:
                assert not in_page_cache(opened.fileno(), PAGE_BYTES)
            larger = bytes_behind + PAGE_BYTES
            wanted = f"{path}: not a file of {larger + PAGE_BYTES} bytes"
            assert talk.say("payload", larger, path) == wanted
            path.chmod(0o620)
            assert talk.say("payload", bytes_behind, path) == f"{path}: others may write it"


def in_page_cache(fd: int, at: int) -> bool:
    """The page at this offset, by mincore(2). To read it with RWF_NOWAIT would begin to read it
    from the disk, and find it if the disk is quick.
    """
    # a page that is not touched is the file's
    mapped = mmap.mmap(fd, PAGE_BYTES, access=mmap.ACCESS_COPY, offset=at)
    address = ctypes.addressof(view := ctypes.c_char.from_buffer(mapped))
    state = (ctypes.c_ubyte * 1)()
    failed = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(PAGE_BYTES), state
    )
    del view
    mapped.close()
    assert not failed, os.strerror(ctypes.get_errno())
    return bool(state[0] & 1)


def of_another(path: Path) -> Path:
    """A file that this user may read, and that is not its own; no other user may write it."""
    if os.geteuid() == 0:
        path.write_bytes(bytes(8192))
        path.chmod(0o600)
        os.chown(path, NOBODY, NOBODY)
        return path
    others = (Path("/bin") / name for name in ("sh", "ls", "cat", "true"))
    return next(one.resolve() for one in others if one.resolve().stat().st_uid == 0)


def test_a_file_of_another_user_is_not_read(program: Path, tmp_path: Path) -> None:
    path = of_another(tmp_path / "file")
    file = m.File(str(path), path.stat().st_size, 4096, 0, 64, 64, 1, bytes(24))
    answer = frame(Kind.MATCHED, m.Matched(64, 1, False, 0, 2, 64, (file,)).pack())
    with BadSidecar(tmp_path / "s", [answer]), Talk(program, tmp_path / "s") as talk:
        assert talk.say("restore", 0, 100) == f"{path}: others may write it"


def test_another_users_sidecar_is_sent_nothing(program: Path, tmp_path: Path) -> None:
    """The kernel says who began to listen."""
    if os.geteuid() != 0:
        pytest.skip("only root may listen as another user")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        command = [sys.executable, "-c", STRANGER, path, str(NOBODY)]
        listening = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert listening.stdout is not None
        assert listening.stdout.readline() == b"listens\n"
        with Talk(program, path) as talk:
            assert talk.greeting == f"not up: {path} is another user's: it is sent nothing; " + (
                "a sidecar runs as the same user, or as root"
            )
            assert talk.say("match", 0, 100) == "down in 0 ms"
        listening.terminate()
        heard, _ = listening.communicate(timeout=SECONDS)
    assert heard == b""


@pytest.mark.parametrize("what", sorted(PRECIOUS))
def test_no_file_that_holds_something_is_written(program: Path, tmp_path: Path, what: str) -> None:
    """Whatever the sidecar names for the rows of a block, it is a new file for just one block."""
    path, size, offset = PRECIOUS[what]
    path = tmp_path / path
    path.write_bytes(bytes(size) if what != "not empty" else b"ssh-ed25519".ljust(size, b"A"))
    path.chmod(0o600)
    if what == "two names":
        os.link(path, tmp_path / "kept")
    before = path.read_bytes()
    named = m.EngineReserved(1, str(path), size, offset, 0, 64)
    answer = frame(Kind.PLANNED, m.Planned(m.EngineOutcome.ALL, "", (named,)).pack())
    with BadSidecar(tmp_path / "s", [answer]), Talk(program, tmp_path / "s") as talk:
        said = talk.say("store", 0, 64)
    if what == "new":
        assert said.startswith("broken")  # the commit has no answer
        assert path.read_bytes() != before
    else:
        assert said.startswith(f"{path}: ")
        assert path.read_bytes() == before


@pytest.mark.parametrize("what", ["link", "writable", "short", "directory", "pipe"])
def test_a_file_that_is_not_what_was_named_is_not_read(
    program: Path, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "file"
    wanted = "not a file of 8192 bytes"
    if what in ("directory", "pipe"):
        path.mkdir() if what == "directory" else os.mkfifo(path)
    else:
        path.write_bytes(bytes(8192 if what != "short" else 8191))
        path.chmod(0o600)
    if what == "writable":
        path.chmod(0o620)
        wanted = "others may write it"
    elif what == "link":
        path = path.rename(tmp_path / "target")
        path = tmp_path / "file"
        path.symlink_to(tmp_path / "target")
        wanted = os.strerror(errno.ELOOP)
    file = m.File(str(path), 8192, 4096, 0, 64, 64, 1, bytes(24))
    answer = frame(Kind.MATCHED, m.Matched(64, 1, False, 0, 2, 64, (file,)).pack())
    with BadSidecar(tmp_path / "s", [answer]), Talk(program, tmp_path / "s") as talk:
        assert talk.greeting == "up"
        assert talk.say("restore", 0, 100) == f"{path}: {wanted}"


def test_reasons_are_numbers_of_the_protocol() -> None:
    """What the tests above expect as numbers."""
    assert (pb.SHORTFALL_NOTHING_STORED, pb.SHORTFALL_ENDS) == (1, 2)
    assert pb.SHORTFALL_STATE_MISSING == 23
