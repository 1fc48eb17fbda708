"""A mount that really hangs in the kernel: a user-space file system whose server is stopped.

Not NFS, but the same for whoever calls it: system calls that do not return until the server goes
on. `bindfs` (Debian: apt-get install bindfs) and the right to mount are needed; a directory on a
real NFS mount may be named by TIERING_TEST_NFS, for the tier's contract there.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.config import SidecarConfig
from ollama_tiering.doctor import check_storage
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from tests.sidecar import PutStream, SidecarProcess

pytestmark = pytest.mark.fault

NS = samples.namespace("mount")
FAR = samples.sequence(NS, range(40))
NEAR = samples.sequence(NS, range(100, 140))
DEADLINE = 1.0
SLOW_MACHINE_SECONDS = 5.0


class Mount:
    """`directory` shows what is below `behind` while its server runs."""

    def __init__(self, root: Path) -> None:
        self.behind = root / "behind"
        self.directory = root / "mount"
        for path in (self.behind, self.directory):
            path.mkdir(mode=0o700)
        command = ["bindfs", "-f", str(self.behind), str(self.directory)]
        self.server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while not os.path.ismount(self.directory):
            if self.server.poll() is not None or time.monotonic() > end:
                self.unmount()
                pytest.skip("bindfs cannot mount here: it needs /dev/fuse and the right to mount")
            time.sleep(0.02)

    def hang(self) -> None:
        self.server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.server.send_signal(signal.SIGCONT)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.directory)], check=False, capture_output=True)
        self.server.kill()
        self.server.wait()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed (Debian: apt-get install bindfs)")
    mounted = Mount(tmp_path)
    yield mounted
    mounted.unmount()


def sidecar(root: Path, name: str, remote: Path) -> SidecarProcess:
    config = root / f"{name}.toml"
    config.write_text(
        f'[sidecar]\nremote_dir = "{remote}"\nremote_budget = "64 MiB"\n'
        f"remote_deadline_seconds = {DEADLINE}\nremote_rescan_seconds = 1\n"
        f'min_tokens = 1\ntail_seconds = 0\nremote_key_file = "{root / "key" / "remote"}"\n'
    )
    (root / name).mkdir()
    env = {"OLLAMA_TIERING_CONFIG": str(config)}
    return SidecarProcess(root / name, ram_gb=0.02, local_gb=0, env=env)


def put(daemon: SidecarProcess, blocks: list[samples.SampleBlock]) -> None:
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        assert all(result.stored for result in stream.put(blocks))
        stream.close()


def found(stub: Any, blocks: list[samples.SampleBlock]) -> int:
    """How many of the blocks Get gives, each with the right bytes."""
    request = pb.GetRequest(namespace=NS.digest(), keys=[block.key for block in blocks])
    answers = [answer for answer in stub.Get(request, timeout=30) if answer.found]
    for answer, block in zip(answers, blocks, strict=False):
        assert Path(os.fsdecode(answer.path)).read_bytes() == block.data
    if answers:
        stub.Release(pb.ReleaseRequest(lease_id=answers[0].lease_id), timeout=10)
    return len(answers)


def is_resting(stat: adm.StatResponse) -> bool:
    return bool(stat.tiers[-1].state == "resting")


def test_a_sidecar_on_a_mount_that_hangs(mount: Mount, tmp_path: Path) -> None:
    with sidecar(tmp_path, "writer", mount.behind) as writer:
        put(writer, FAR)
        writer.wait(lambda stat: stat.tiers[-1].blocks == len(FAR), "demoted")
    reader = sidecar(tmp_path, "reader", mount.directory).start()
    try:
        reader.wait(lambda stat: stat.tiers[-1].blocks == len(FAR), "seen through the mount")
        put(reader, NEAR)
        with reader.channel() as channel:
            stub = rpc.BlockStoreStub(channel)
            assert found(stub, FAR[:4]) == 4
            quiet = hit_seconds(stub)

            mount.hang()
            start = time.monotonic()
            assert found(stub, FAR) in (0, 4)  # what was staged before, nothing that is not
            assert time.monotonic() - start < 2 * DEADLINE + SLOW_MACHINE_SECONDS
            reader.wait(is_resting, "the circuit is open")
            hanging = hit_seconds(stub)
            assert hanging <= 2 * quiet + 5e-3, (hanging, quiet)
            start = time.monotonic()
            assert found(stub, FAR[4:]) == 0
            assert time.monotonic() - start < SLOW_MACHINE_SECONDS

            mount.go_on()
            reader.wait(lambda stat: not is_resting(stat), "it comes back by itself")
            start = time.monotonic()
            while found(stub, FAR) < len(FAR):  # what is not staged within the deadline is a miss
                assert time.monotonic() - start < 4 * SLOW_MACHINE_SECONDS
                time.sleep(0.1)
    finally:
        mount.go_on()
        reader.stop()


def hit_seconds(stub: Any) -> float:
    """p99 of a hit in RAM, through gRPC; of three rounds the one this machine disturbed least."""
    rounds = []
    for _ in range(3):
        took = []
        for _ in range(150):
            start = time.perf_counter()
            assert found(stub, NEAR) == len(NEAR)
            took.append(time.perf_counter() - start)
        rounds.append(statistics.quantiles(took, n=100)[98])
    return min(rounds)


def test_start_and_stop_while_the_mount_hangs(mount: Mount, tmp_path: Path) -> None:
    mount.hang()
    daemon = sidecar(tmp_path, "one", mount.directory)
    try:
        start = time.monotonic()
        daemon.start()
        put(daemon, NEAR)
        with daemon.channel() as channel:
            assert found(rpc.BlockStoreStub(channel), NEAR) == len(NEAR)
        assert time.monotonic() - start < DEADLINE + SLOW_MACHINE_SECONDS
        daemon.wait(is_resting, "the circuit is open")
        start = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - start < 2 * DEADLINE + SLOW_MACHINE_SECONDS
    finally:
        mount.go_on()
        if daemon.running:
            daemon.stop()


def test_a_mount_whose_server_died_is_weather(mount: Mount, tmp_path: Path) -> None:
    with sidecar(tmp_path, "one", mount.directory) as daemon:
        daemon.wait(lambda stat: stat.tiers[-1].state == "ok", "looked at")
        mount.server.kill()
        mount.server.wait()
        stat = daemon.wait(is_resting, "the circuit is open")
        assert {"ENOTCONN", "ECONNABORTED"} & set(stat.tiers[-1].failures)
        put(daemon, NEAR)
        with daemon.channel() as channel:
            assert found(rpc.BlockStoreStub(channel), NEAR) == len(NEAR)


def test_an_unmounted_directory_is_not_filled_on_the_disk_below(
    mount: Mount, tmp_path: Path
) -> None:
    with sidecar(tmp_path, "one", mount.directory) as daemon:
        daemon.wait(lambda stat: stat.tiers[-1].state == "ok", "looked at")
        mount.unmount()
        stat = daemon.wait(is_resting, "the circuit is open")
        assert stat.tiers[-1].failures
        put(daemon, NEAR)
        daemon.wait(lambda stat: sum(stat.tiers[-1].failures.values()) >= 2, "tried again")
    assert list(mount.directory.iterdir()) == []
    missing = sidecar(tmp_path, "two", mount.directory / "not-there")
    with missing as daemon:
        stat = daemon.wait(is_resting, "there is no such directory")
        assert stat.tiers[-1].failures["ENOENT"] >= 1
    assert list(mount.directory.iterdir()) == []


def test_the_doctor_does_not_hang(mount: Mount, tmp_path: Path) -> None:
    settings = SidecarConfig(
        *(tmp_path / "run" / "s", tmp_path / "ram", 0, tmp_path / "local", 0),
        remote_dir=mount.directory,
        remote_deadline_seconds=DEADLINE,
    )
    mount.hang()
    start = time.monotonic()
    checks = {check.name: check for check in check_storage.checks(settings)}
    assert "does not answer within 1 s" in checks["remote tier"].finding
    assert time.monotonic() - start < DEADLINE + SLOW_MACHINE_SECONDS
    mount.go_on()
    checks = {check.name: check for check in check_storage.checks(settings)}
    assert "on fuse" in checks["remote tier"].finding


def test_two_sidecars_on_a_real_nfs_mount() -> None:
    """The same tier code twice on one NFS directory: what one publishes, the other reads."""
    place = os.environ.get("TIERING_TEST_NFS")
    if place is None:
        pytest.skip("no NFS: mount one and name a directory on it in TIERING_TEST_NFS")
    directory = Path(place) / "ollama-tiering-test"
    directory.mkdir(mode=0o700)
    one, two = SharedFsTier(directory), SharedFsTier(directory)
    assert one.caches_names, "TIERING_TEST_NFS is not on NFS"
    try:
        for block in FAR:
            temp = one.create(NS.digest(), block.key, len(block.data))
            temp.write_at(0, block.data)
            assert one.publish(temp) >= len(block.data)
        assert {stored.key for stored in two.scan()} == {block.key for block in FAR}
        with two.open(NS.digest(), FAR[0].key) as opened:
            one.remove(NS.digest(), FAR[0].key)
            assert opened.read_at(0, opened.file_bytes) == FAR[0].data
        assert not two.exists(NS.digest(), FAR[0].key)
        assert abs(one.announce(1, 10) - two.announce(1, 20)) < 60
        assert [(n.generation, n.claim_bytes) for n in one.neighbours()] == [(1, 20)]
    finally:
        one.close()
        two.close()
        shutil.rmtree(directory)
