"""A server in a unit is stopped by its unit: killed, it would be started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import up
from ollama_tiering.launch.address import Address, Found, Occupant
from ollama_tiering.launch.service_unit import stop_command

USER = "/user.slice/user-7.slice/user@7.service"


@pytest.mark.parametrize(
    ("cgroup", "command"),
    [
        ("0::/system.slice/ollama.service\n", "sudo systemctl stop ollama.service"),
        ("0::/system.slice/ollama-tiered.service\n", "sudo systemctl stop ollama-tiered.service"),
        (
            "2:cpu:/\n1:name=systemd:/system.slice/ollama.service\n",
            "sudo systemctl stop ollama.service",
        ),
        (f"0::{USER}/app.slice/ollama.service\n", "systemctl --user stop ollama.service"),
        (f"0::{USER}/app.slice/app-terminal.scope\n", ""),
        ("0::/user.slice/user-7.slice/session-1.scope\n", ""),
        ("0::/system.slice/docker-12ab.scope\n", ""),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_the_unit_is_read_from_the_control_group(cgroup: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text(cgroup)
    assert stop_command(77, tmp_path) == command


def test_a_process_that_is_gone_is_in_no_unit(tmp_path: Path) -> None:
    assert stop_command(77, tmp_path) == ""


@pytest.mark.parametrize(
    ("pid", "unit_is_installed", "command", "hint"),
    [
        (77, False, "sudo systemctl stop x.service", "stop it (sudo systemctl stop x.service)"),
        (77, True, "", "stop it (kill 77)"),  # by hand, whatever is installed besides
        (None, True, "", "stop it (sudo systemctl stop ollama)"),
        (None, False, "", "stop it (quit the app, or end `ollama serve`)"),
    ],
)
def test_who_holds_the_port_is_said_with_the_way_out(
    pid: int | None,
    unit_is_installed: bool,
    command: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if unit_is_installed:
        (tmp_path / "ollama.service").touch()
    monkeypatch.setattr(up, "SYSTEM_UNITS", tmp_path)
    monkeypatch.setattr(up, "stop_command", lambda _: command)
    found = Found(Occupant.OLLAMA, "0.16.3", pid)
    monkeypatch.setattr(up, "who_listens", lambda _: found)
    with pytest.raises(ServiceError, match=r"another Ollama 0\.16\.3 listens") as e:
        up.require_free(Address())
    assert e.value.hint == f"{hint}, or run beside it: tiering up --host 127.0.0.1:11435"
