"""`tiering systemd install --web`: a unit that serves the page beside the sidecar."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from ollama_tiering.cli import main
from ollama_tiering.launch.address import free_address
from ollama_tiering.systemd import service
from ollama_tiering.systemd.manager import Manager as ServiceManager
from ollama_tiering.systemd.plan import InstallRequest
from ollama_tiering.systemd.units import WEB_UNIT
from tests.unit.sidecar.manager import Manager
from tests.unit.systemd.conftest import Machine
from tests.unit.systemd.test_install import FakeSystemctl
from tests.unit.systemd.test_run import StandIn
from tests.unit.systemd.test_units import SERVER, SIDECAR, UNITS, analyze, exposure, unit

TOKEN = "/var/lib/ollama-tiering/web.token"


def listens(machine: Machine) -> str:
    command = shlex.split(unit(machine, WEB_UNIT)["Service"]["ExecStart"])
    return command[command.index("--listen") + 1]


def test_without_the_option_there_is_no_page(machine: Machine) -> None:
    machine.install()
    assert not machine.at(UNITS / WEB_UNIT).exists()
    assert WEB_UNIT not in machine.at(UNITS / SIDECAR).read_text()


def test_it_listens_on_loopback_as_the_user_of_the_sidecar(machine: Machine) -> None:
    said = machine.install("--web", "--run-as", "somebody")
    page, sidecar = unit(machine, WEB_UNIT), unit(machine, SIDECAR)
    assert listens(machine) == "127.0.0.1:8434"
    assert page["Service"]["User"] == sidecar["Service"]["User"] == "somebody"
    words = shlex.split(page["Service"]["ExecStart"])
    assert words[words.index("--socket") + 1] in sidecar["Service"]["ExecStart"]
    assert (page["Service"]["IPAddressDeny"], page["Service"]["IPAddressAllow"]) == (
        "any",
        "localhost",
    )
    assert page["Service"]["StandardOutput"] == "null"
    assert "StateDirectory" in page["Service"]  # its token
    assert "RuntimeDirectory" not in page["Service"]  # it would go, with the sidecar's socket
    assert "page         http://127.0.0.1:8434/?token=TOKEN, and TOKEN is what this" in said
    assert f"sudo cat {TOKEN}" in said


def test_it_comes_and_goes_with_the_sidecar(machine: Machine) -> None:
    machine.install("--web")
    assert WEB_UNIT in unit(machine, SIDECAR).all("Wants")
    page = unit(machine, WEB_UNIT)["Unit"]
    assert (page["After"], page["PartOf"]) == (SIDECAR, SIDECAR)


def test_a_later_install_keeps_it_and_its_address(machine: Machine) -> None:
    machine.install("--web", "127.0.0.1:9000")
    machine.install()
    assert listens(machine) == "127.0.0.1:9000"
    machine.install("--web")
    assert listens(machine) == "127.0.0.1:8434"
    assert machine.document("status")["units"].keys() == {SIDECAR, SERVER, WEB_UNIT}
    machine.install("--no-web")
    assert not machine.at(UNITS / WEB_UNIT).exists()
    assert WEB_UNIT not in machine.at(UNITS / SIDECAR).read_text()


def test_beside_ours_in_the_place_of_ollamas_it_stays_too(machine: Machine) -> None:
    before = machine.files()
    machine.install("--replace", "--web", "[::1]:9000")
    machine.install()
    assert listens(machine) == "[::1]:9000"
    machine.tiering("uninstall")
    assert machine.files() == before


def test_whoever_lets_others_in_is_let_out(machine: Machine) -> None:
    machine.install("--web", "0.0.0.0:8434")
    assert "IPAddressDeny" not in unit(machine, WEB_UNIT)["Service"]


def test_options_that_contradict_each_other(machine: Machine) -> None:
    assert "contradict" in machine.tiering("install", "--web", "x:1", "--no-web", code=2)
    assert "installs nothing" in machine.tiering("install", "--restore", "--no-web", code=2)
    assert "is not an address" in machine.tiering("install", "--web", "x:y", code=2)


def test_it_installs_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without another root: what the page needs is always there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["systemd", "install", "--user", "--sidecar-only", "--web", "--dry-run"])
    assert ended.value.code == 0
    assert WEB_UNIT in capsys.readouterr().out
    assert list(tmp_path.rglob("*")) == []


def test_now_starts_it_where_the_sidecar_runs_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/.config"))
    (tmp_path / "home").mkdir()
    systemctl = FakeSystemctl(tmp_path, monkeypatch)
    manager = ServiceManager(user_mode=True, root=None)
    request = InstallRequest(user_mode=True, page=free_address())
    service.install(request, manager, dry_run=False, now=True)
    assert systemctl.asked[-1] == f"--user restart {WEB_UNIT}"


def test_systemd_accepts_it(systemd_machine: Machine) -> None:
    systemd_machine.install("--web")
    done = analyze("verify", f"--root={systemd_machine.root}", SIDECAR, WEB_UNIT)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "ollama-tier" in line]
    assert (done.returncode, said) == (0, [])
    assert exposure(systemd_machine, WEB_UNIT) <= 3.0


def test_the_unit_serves_the_page(machine: Machine, tmp_path: Path) -> None:
    address = free_address()
    machine.install("--sidecar-only", "--web", str(address))
    text = machine.at(UNITS / WEB_UNIT).read_text()
    with Manager(tmp_path) as manager:
        page = StandIn(text, tmp_path / "m", manager, watchdog_seconds=60)
        page.start()
        try:
            answer = wait_for_answer(f"{address.url}/", page.process)
            assert "<title>tiering</title>" in answer.text
            token = tmp_path / "m/state/ollama-tiering/web.token"  # where install says it is
            assert token.stat().st_mode & 0o777 == 0o600
        finally:
            page.process.terminate()
            page.process.communicate(timeout=30)


def wait_for_answer(url: str, process: subprocess.Popen[str]) -> httpx.Response:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, trust_env=False)
        time.sleep(0.1)
    raise AssertionError("the page does not answer")
