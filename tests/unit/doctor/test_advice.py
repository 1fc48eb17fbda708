"""What doctor advises can be done, and is said once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import ollama_tiering
from ollama_tiering.cli.doctor import doctor
from ollama_tiering.config import config_file
from ollama_tiering.config.environment import KNOWN, unknown
from ollama_tiering.doctor import check_running
from ollama_tiering.launch.address import free_address
from ollama_tiering.launch.running_up import RunningUp, hold
from ollama_tiering.protocol.pb import administration_pb2 as adm


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [n for n in os.environ if n.startswith("OLLAMA_")]:
        monkeypatch.delenv(name)
    for kind in ("STATE", "DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OLLAMA_HOST", str(free_address()))
    return tmp_path


def examined() -> str:
    return CliRunner().invoke(doctor, standalone_mode=False).output


@pytest.mark.parametrize("text", ["[sidecar]\nmetrics_prt = 1\n", "[patch]\ntag = 3\n", "[x\n"])
def test_a_mistake_in_the_settings_is_said_once_and_the_rest_is_checked(text: str) -> None:
    config_file().parent.mkdir(parents=True)
    config_file().write_text(text)
    said = examined()
    assert said.count(str(config_file())) == 1, said
    assert f"fail  settings: {config_file()}:" in said
    for name in ("compiler: ", "source cache: ", "local tier: ", "sidecar: "):
        assert name in said
    assert said.count("fail  ") == 1 + said.count("fail  compiler")


def test_a_variable_that_nothing_reads_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_KV_TIER_LOCALGB", "1")
    monkeypatch.setenv("OLLAMA_TIERING_CASHE", "/x")
    monkeypatch.setenv("OLLAMA_KV_TIER_GATE", "restore")
    monkeypatch.setenv("OLLAMA_TIERING_TEST_BINARY", "/y")
    said = examined()
    assert "warn  variables: OLLAMA_KV_TIER_LOCALGB is set, and nothing reads it; did you" in said
    assert "OLLAMA_KV_TIER_LOCAL_GB" in said
    assert "-> correct its name, or: unset OLLAMA_TIERING_CASHE" in said
    assert said.count("nothing reads it") == 2


def test_every_variable_that_something_reads_is_known() -> None:
    repo = Path(ollama_tiering.__file__).parents[1]
    name = re.compile(r"OLLAMA_(?:KV_TIER|TIERING)[A-Z_]*[A-Z]\b")
    read = {
        found
        for folder in ("ollama_tiering", "patches", "llama_server", "packaging", "scripts")
        for file in (repo / folder).rglob("*")
        if file.is_file()
        and file.suffix in (".py", ".go", ".cpp", ".h", ".patch", ".sh", ".service", ".toml")
        for found in name.findall(file.read_text(encoding="utf-8"))
    }
    assert len(read) > 20
    assert unknown(read) == []
    assert "OLLAMA_KV_TIER_SOCKET" in KNOWN


def of_another_version() -> str:
    return check_running._sidecar(Path("/x"), adm.StatResponse(version="0.0.9")).cure


def test_a_sidecar_of_up_is_ended_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` would start a sidecar that somebody kills again, of the same version."""
    monkeypatch.setattr(check_running.block_service, "owner", lambda _socket: 16500)
    monkeypatch.setattr(check_running, "stop_command", lambda _pid: "")
    assert of_another_version() == "start it anew: kill 16500, then tiering up"
    with hold(free_address()) as held:
        held.write(RunningUp(pid=os.getpid(), url="x", ready=True, sidecar_pid=16500))
        cure = of_another_version()
        assert "kill 16500" not in cure
        assert cure == (
            f"stop `tiering up` (Ctrl-C where it runs, or: kill {os.getpid()}), then start it "
            "anew: tiering up"
        )
        held.write(RunningUp(pid=os.getpid(), url="x", ready=True, sidecar_pid=16501))
        assert of_another_version() == "start it anew: kill 16500, then tiering up"
    unit = "sudo systemctl stop ollama-tiering.service"
    monkeypatch.setattr(check_running, "stop_command", lambda _pid: unit)
    assert of_another_version() == "start it anew: sudo systemctl restart ollama-tiering.service"


def test_an_up_that_was_killed_is_not_to_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_running.block_service, "owner", lambda _socket: 16500)
    monkeypatch.setattr(check_running, "stop_command", lambda _pid: "")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with hold(free_address()) as held:
        held.write(RunningUp(pid=ended.pid, url="x", ready=True, sidecar_pid=16500))
        assert of_another_version() == "start it anew: kill 16500, then tiering up"
