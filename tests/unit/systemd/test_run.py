"""The installed unit is started, pinged, reloaded and stopped as systemd would do it.

No systemd runs here: a stand-in reads the unit file, sets its environment, runs its ExecStart and
listens on the notify socket. Paths below /run, /etc and %S are moved into the test's directory.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.sidecar.manager import Manager, is_ping
from tests.unit.systemd.conftest import Machine
from tests.unit.systemd.test_units import SIDECAR, UNITS, Unit


class StandIn:
    """One service of one unit file; `root` stands for the machine's /."""

    def __init__(self, text: str, root: Path, manager: Manager, *, watchdog_seconds: float) -> None:
        for word, place in (("%S", "state"), ("%t", "run"), ("/run/", "run/"), ("=/etc", "etc")):
            target = f"{root / place}{'/' if place.endswith('/') else ''}"
            text = text.replace(word, f"={target}" if word.startswith("=") else target)
        self._unit = Unit(text)
        self.socket = root / "run/ollama-tiering/sidecar.sock"
        self._environment = {"PATH": os.environ["PATH"], **manager.environment(watchdog_seconds)}
        for setting in self._unit.all("Environment"):
            name, _, value = shlex.split(setting)[0].partition("=")
            self._environment[name] = value
        for name in self._unit.all("RuntimeDirectory"):
            (root / "run" / name).mkdir(mode=0o700, parents=True)
        for name in self._unit.all("StateDirectory"):
            (root / "state" / name).mkdir(mode=0o700, parents=True)

    def command(self) -> list[str]:
        return shlex.split(self._unit["Service"]["ExecStart"])

    def start(self, *before: str) -> None:
        self.process = subprocess.Popen(
            [*before, *self.command()],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )

    def reload(self) -> subprocess.CompletedProcess[str]:
        command = shlex.split(self._unit["Service"]["ExecReload"])
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, cwd="/", check=False
        )

    def stop(self) -> tuple[int, str]:
        self.process.terminate()
        output, _ = self.process.communicate(timeout=int(self._unit["Service"]["TimeoutStopSec"]))
        return self.process.returncode, output

    def stat(self) -> adm.StatResponse:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            answer: adm.StatResponse = rpc.BlockStoreStub(channel).Stat(
                pb.StatRequest(), timeout=10
            )
        return answer


def configure(root: Path, ram_budget: str = "16MB") -> None:
    file = root / "etc/ollama-tiering/config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    ram = root / "shm"
    file.write_text(
        f'[sidecar]\nram_dir = "{ram}"\nram_budget = "{ram_budget}"\nlocal_budget = "32MB"\n'
    )


@pytest.fixture
def text(machine: Machine) -> str:
    machine.install("--sidecar-only")
    return machine.at(UNITS / SIDECAR).read_text()


def test_the_service_starts_gives_signs_of_life_reloads_and_stops(
    text: str, tmp_path: Path
) -> None:
    root = tmp_path / "m"
    root.mkdir()
    configure(root)
    with Manager(tmp_path) as manager:
        service = StandIn(text, root, manager, watchdog_seconds=1.0)
        service.start()
        try:
            manager.wait(lambda said: said == "READY=1")
            manager.wait(lambda said: said.startswith("STATUS=ram 0 blocks"))
            manager.wait(is_ping)
            manager.wait(is_ping)
            ram, local = service.stat().tiers
            assert (ram.directory, ram.budget_bytes) == (os.fsencode(root / "shm"), 16_000_000)
            assert local.directory == os.fsencode(root / "state/ollama-tiering/blocks")
            configure(root, ram_budget="8MB")
            done = service.reload()
            assert (done.returncode, done.stdout) == (0, "sidecar.ram_budget changed\n")
            manager.wait(lambda said: said.startswith("RELOADING=1"))
            manager.wait(lambda said: said == "READY=1")
            assert service.stat().tiers[0].budget_bytes == 8_000_000
            configure(root, ram_budget="oops")
            done = service.reload()
            assert done.returncode == 10
            assert "config.toml:3" in done.stderr
            assert service.stat().tiers[0].budget_bytes == 8_000_000
            manager.wait(is_ping)
        finally:
            code, output = service.stop()
        assert code == 0, output
        manager.wait(lambda said: said == "STOPPING=1")
    assert "sidecar stopped: everything is on disk" in output
    assert not service.socket.exists()


def test_a_wrong_setting_ends_with_a_code_that_is_not_tried_again(
    text: str, tmp_path: Path
) -> None:
    root = tmp_path / "m"
    root.mkdir()
    configure(root, ram_budget="much")
    with Manager(tmp_path) as manager:
        service = StandIn(text, root, manager, watchdog_seconds=1.0)
        service.start()
        output, _ = service.process.communicate(timeout=30)
        assert manager.next(0) is None
    codes = Unit(text)["Service"]["RestartPreventExitStatus"].split()
    assert str(service.process.returncode) in codes
    assert "config.toml:3" in output


def syscalls(name: str) -> set[str]:
    """Of a group of systemd's, groups in it resolved."""
    command = ["systemd-analyze", "--no-pager", "syscall-filter", name]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: set[str] = set()
    for line in lines[1:]:
        word = line.strip()
        if word.startswith("@"):
            found |= syscalls(word)
        elif word and not word.startswith("#"):
            found.add(word)
    return found


def test_the_sidecar_makes_no_system_call_that_its_unit_forbids(text: str, tmp_path: Path) -> None:
    if not (shutil.which("strace") and shutil.which("systemd-analyze")):
        pytest.skip("strace or systemd-analyze is not here")
    root = tmp_path / "m"
    root.mkdir()
    configure(root)
    seen = tmp_path / "strace"
    with Manager(tmp_path) as manager:
        service = StandIn(text, root, manager, watchdog_seconds=5.0)
        service.start("strace", "-D", "-f", "-qq", "-e", "signal=none", "-o", str(seen))
        try:
            manager.wait(is_ping, seconds=60)
            assert service.stat().tiers
        finally:
            code, output = service.stop()
    if "Operation not permitted" in output:
        pytest.skip("strace may not trace here")
    assert code == 0, output
    made = {match[1] for match in re.finditer(r"^\d+ +(\w+)\(", seen.read_text(), re.MULTILINE)}
    assert {"openat", "mmap", "futex", "bind"} <= made
    (allowed,) = Unit(text).all("SystemCallFilter")
    assert made - syscalls(allowed) - syscalls("@default") == set()
