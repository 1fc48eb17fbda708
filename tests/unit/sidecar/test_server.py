"""The sidecar as a process: one per socket and directory, private, gone without a trace."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.system.filesystems import in_memory
from tests.sidecar import PutStream, SidecarProcess

NS = samples.namespace()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path) as running:
        yield running


def put(daemon: SidecarProcess, tokens: list[int]) -> list[samples.SampleBlock]:
    blocks = samples.sequence(NS, tokens)
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        assert all(result.stored for result in stream.put(blocks))
        stream.close()
    return blocks


def refused(daemon: SidecarProcess) -> str:
    """Starts a second sidecar that must not come up; what it says."""
    with daemon.launch(stderr=subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 9, output + errors
    assert "hint: " in errors
    return errors


def test_socket_and_directories_are_private(daemon: SidecarProcess) -> None:
    put(daemon, [1, 2, 3])
    daemon.wait_written()
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    for directory in (daemon.socket.parent, daemon.ram_dir, daemon.local_dir):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for path in directory.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_second_sidecar_on_the_socket_is_refused(daemon: SidecarProcess) -> None:
    assert "in use by process" in refused(daemon)
    assert daemon.stat().has_calls == 0


def test_a_second_sidecar_on_a_directory_is_refused(daemon: SidecarProcess) -> None:
    other = SidecarProcess(daemon.root)
    other.socket = daemon.root / "run2" / "s"
    assert str(daemon.ram_dir) in refused(other)


def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    daemon = SidecarProcess(tmp_path)
    daemon.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(daemon.socket))
    with daemon:
        assert daemon.stat().version


def test_a_socket_somebody_else_listens_on_is_refused(tmp_path: Path) -> None:
    daemon = SidecarProcess(tmp_path)
    daemon.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(daemon.socket))
        listener.listen()
        assert "listens on" in refused(daemon)


def test_a_file_in_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    daemon = SidecarProcess(tmp_path)
    daemon.socket.parent.mkdir(mode=0o700)
    daemon.socket.write_text("precious")
    assert "not a socket" in refused(daemon)
    assert daemon.socket.read_text() == "precious"


@pytest.mark.parametrize("name", ["run", "ram", "local"])
def test_a_directory_others_can_write_to_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name).chmod(0o770)
    assert "writable by others" in refused(SidecarProcess(tmp_path))


@pytest.mark.parametrize("name", ["run", "ram", "local"])
def test_a_link_in_place_of_a_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    refused(SidecarProcess(tmp_path))


@pytest.mark.parametrize("names", [["run"], ["ram", "local"]], ids=["socket", "every tier"])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, names: list[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user needs root")
    for name in names:
        (tmp_path / name).mkdir(mode=0o700)
        os.chown(tmp_path / name, 65534, 65534)
    said = refused(SidecarProcess(tmp_path))
    for name in names:
        assert f"{tmp_path / name} belongs to user 65534" in said


@pytest.mark.parametrize("name", ["ram", "local"])
def test_where_one_tier_is_of_another_user_the_other_serves(tmp_path: Path, name: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user needs root")
    (tmp_path / name).mkdir(mode=0o700)
    os.chown(tmp_path / name, 65534, 65534)
    with SidecarProcess(tmp_path) as daemon:
        assert put(daemon, [1, 2, 3])
        states = {pb.Tier.Name(tier.tier)[5:].lower(): tier.state for tier in daemon.stat().tiers}
        assert f"{tmp_path / name} belongs to user 65534" in states.pop(name)
        assert list(states.values()) == ["ok"]
        assert daemon.said("tier left out") == 1


def test_a_tier_that_was_left_out_comes_back_by_itself(tmp_path: Path) -> None:
    if in_memory(tmp_path):
        pytest.skip("in memory every directory of a path is made")
    daemon = SidecarProcess(tmp_path)
    daemon.local_dir = tmp_path / "mnt" / "usb"
    with daemon:
        before = {tier.tier: tier.state for tier in daemon.stat().tiers}
        assert f"there is no {tmp_path / 'mnt'}" in before[pb.TIER_LOCAL]
        assert "is its disk mounted?" in before[pb.TIER_LOCAL]
        assert daemon.said(f"left out: {daemon.local_dir}")  # on the line that says it is ready
        blocks = put(daemon, list(range(30)))
        daemon.local_dir.parent.mkdir(mode=0o700)
        end = time.monotonic() + 60
        while not daemon.local_dir.is_dir() or daemon.log.count("sidecar ready") < 2:
            assert time.monotonic() < end, daemon.log
            time.sleep(0.1)
        daemon.wait_written()
        after = {tier.tier: tier.state for tier in daemon.stat().tiers}
        assert after == {pb.TIER_RAM: "ok", pb.TIER_LOCAL: "ok"}
        put(daemon, list(range(40)))
        daemon.wait_written()
        assert daemon.running
    stored = {path.stem for path in daemon.local_dir.rglob("*.kvb")}
    assert stored >= {block.key.hex() for block in blocks[:-1]}  # also those from before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_drains_and_leaves_no_socket(tmp_path: Path, number: signal.Signals) -> None:
    daemon = SidecarProcess(tmp_path).start()
    blocks = put(daemon, list(range(30)))
    assert daemon.stop(number) == 0
    assert daemon.said("sidecar stopped: everything is on disk")
    assert not daemon.socket.exists()
    stored = {path.stem for path in daemon.local_dir.rglob("*.kvb")}
    assert stored == {block.key.hex() for block in blocks}


def test_a_stop_does_not_wait_for_an_idle_stream(daemon: SidecarProcess) -> None:
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        stream.reserve(samples.sequence(NS, [1]))
        start = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - start < 10
    assert not list(daemon.root.rglob("*.tmp"))


def test_what_was_stored_is_there_after_a_restart(daemon: SidecarProcess) -> None:
    blocks = put(daemon, list(range(30)))
    daemon.stop()
    daemon.start()
    stat = daemon.stat()
    assert [tier.blocks for tier in stat.tiers] == [len(blocks)] * 2
    size = sum(len(block.data) for block in blocks)
    assert all(tier.used_bytes >= size for tier in stat.tiers)


def test_after_a_kill_tmpfs_and_disk_are_found_again(daemon: SidecarProcess) -> None:
    blocks = put(daemon, list(range(30)))
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.stat().tiers[0].blocks == len(blocks)
    assert daemon.wait_written().tiers[1].blocks == len(blocks)


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(20)
        environment = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "200000"}
        with SidecarProcess(tmp_path / "d", env=environment) as daemon:
            messages = {manager.recv(1000).decode() for _ in range(4)}
            (status,) = messages - {"READY=1", "WATCHDOG=1"}
            assert re.fullmatch(r"STATUS=ram 0 blocks, [\d.]+ K?i?B; local 0 blocks, .*", status)
            assert messages > {"READY=1", "WATCHDOG=1"}
            daemon.stop()
            while "STOPPING=1" not in messages:
                messages.add(manager.recv(1000).decode())


def test_status_shows_tiers_and_runners(daemon: SidecarProcess) -> None:
    put(daemon, [1, 2, 3])
    with daemon.channel() as channel:
        report = pb.RunnerReport(pid=os.getpid(), model="/m/sha256-abc", reason="recurrent")
        rpc.BlockStoreStub(channel).ReportRunner(report, timeout=10)
    command = [*daemon.command()[:3], "status", "--socket", str(daemon.socket)]
    run = {"env": daemon.environment(), "timeout": 30, "check": True, "text": True}
    text = subprocess.run(command, capture_output=True, **run).stdout  # type: ignore[call-overload]
    assert "1 block, " in text
    assert "sha256-abc: not tiered: recurrent" in text
    output = subprocess.run([*command, "--json"], capture_output=True, **run).stdout  # type: ignore[call-overload]
    document = json.loads(output)
    assert document["running"] is True
    assert document["tiers"][0]["blocks"] == 1
    assert document["runners"][0]["reason"] == "recurrent"


def test_status_without_a_sidecar_says_so_and_exits_9(tmp_path: Path) -> None:
    daemon = SidecarProcess(tmp_path)
    command = [*daemon.command()[:3], "status", "--json", "--socket", str(daemon.socket)]
    finished = subprocess.run(
        command,
        env=daemon.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert finished.returncode == 9
    assert json.loads(finished.stdout)["running"] is False
    assert "hint: start Ollama with it: tiering up" in finished.stderr


def test_help_does_not_import_grpc(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ollama_tiering.cli import cli\n"
        "for name in ('sidecar', 'status'):\n"
        "    try: cli([name, '-h'])\n"
        "    except SystemExit: pass\n"
        "assert 'grpc' not in sys.modules\n"
    )
    environment = SidecarProcess(tmp_path).environment()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=30)


def test_status_says_what_was_written_today_and_what_was_kept_off_the_disk(tmp_path: Path) -> None:
    settings = {"admission": "second-touch", "daily_write": "1GB"}
    with SidecarProcess(tmp_path, settings=settings) as daemon:
        blocks = put(daemon, [1, 2, 3, 4, 5])
        assert daemon.stat().tiers[1].blocks == 0
        with daemon.channel() as channel:
            stub = rpc.BlockStoreStub(channel)
            request = pb.HasRequest(
                namespace=NS.digest(),
                keys=[blocks[0].key],
                tokens=tokens_to_bytes([1, 2, 3, 4, 5]),
                block_tokens=4,
            )
            assert stub.Has(request, timeout=10).matched_tokens == 5
        daemon.wait(lambda stat: stat.tiers[1].blocks == 2, "asked for twice, written down")
        command = [*daemon.command()[:3], "status", "--socket", str(daemon.socket)]
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert "written today (UTC)" in text.stdout
        document = json.loads(
            subprocess.run(
                [*command, "--json"], capture_output=True, text=True, timeout=30, check=True
            ).stdout
        )
        local = document["tiers"][1]
        assert local["written_today_bytes"] == sum(len(block.data) for block in blocks)
        assert local["daily_write_bytes"] == 10**9
        assert local["surveyed"]
        assert not local["disk_full"]
    with SidecarProcess(tmp_path, settings=settings) as again:
        assert again.stat().tiers[1].written_today_bytes == local["written_today_bytes"]


def test_a_minimum_free_share_that_the_disk_lacks_keeps_blocks_in_ram(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    if disk.f_bavail >= 0.9 * disk.f_blocks:
        pytest.skip("the disk is nearly empty: no floor below 90 % is above what is free")
    with SidecarProcess(tmp_path, settings={"min_free_percent": 90}) as daemon:
        put(daemon, [1, 2, 3])
        stat = daemon.wait(lambda stat: stat.tiers[1].disk_full, "the floor is seen")
        assert stat.tiers[1].blocks == 0
        assert stat.tiers[0].blocks == 1
