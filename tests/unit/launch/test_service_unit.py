"""A server in a unit is stopped by its unit: killed, it would be started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.doctor import check_running
from ollama_tiering.doctor.check import CheckState
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import up
from ollama_tiering.launch.address import Address, Found, Occupant
from ollama_tiering.launch.service_unit import has_drop_in, stop_command, way_in

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


SERVICE = "0::/system.slice/ollama.service\n"
OFFER = "have ollama.service start the patched one: "


@pytest.mark.parametrize(
    ("cgroup", "way"),
    [
        (SERVICE, OFFER + "sudo tiering systemd install --replace --now"),
        (
            f"0::{USER}/app.slice/ollama.service\n",
            OFFER + "tiering systemd install --user --replace --now",
        ),
        ("0::/system.slice/ollama-tiered.service\n", ""),
        ("0::/user.slice/user-7.slice/session-1.scope\n", ""),
    ],
)
def test_the_service_of_ollama_may_start_the_patched_one(
    cgroup: str, way: str, tmp_path: Path
) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text(cgroup)
    assert way_in(77, tmp_path, (tmp_path / "units",)) == way


def test_a_process_of_another_user_is_taken_for_the_service_where_there_is_one(
    tmp_path: Path,
) -> None:
    places = (tmp_path / "etc", tmp_path / "usr")
    assert way_in(None, places=places) == ""
    places[1].mkdir()
    (places[1] / "ollama.service").touch()  # of a distribution
    assert way_in(None, places=places).startswith(OFFER)


def test_a_service_that_starts_the_patched_one_already_is_said(tmp_path: Path) -> None:
    places = (tmp_path / "etc",)
    drop_in = places[0] / "ollama.service.d/tiering.conf"
    drop_in.parent.mkdir(parents=True)
    (places[0] / "ollama.service").touch()
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text(SERVICE)
    assert not has_drop_in(77, tmp_path, places)
    drop_in.touch()
    for pid in (77, None):
        assert (
            way_in(pid, tmp_path, places)
            == f"use it: it starts the patched one already ({drop_in})"
        )
        assert has_drop_in(pid, tmp_path, places)
    (tmp_path / "77" / "cgroup").write_text(f"0::{USER}/app.slice/ollama.service\n")
    assert not has_drop_in(77, tmp_path, places)


def test_up_says_who_has_the_port_and_offers_to_take_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(up, "stop_command", lambda _: "sudo systemctl stop ollama.service")
    monkeypatch.setattr(up, "unit_name", lambda _: "ollama.service")
    monkeypatch.setattr(up, "way_in", lambda _: OFFER + "sudo …")
    monkeypatch.setattr(up, "who_listens", lambda _: Found(Occupant.OLLAMA, "0.24.0", 77))
    with pytest.raises(ServiceError, match=r"already \(process 77, ollama\.service\)") as e:
        up.require_free(Address())
    assert e.value.hint == (
        "stop it (sudo systemctl stop ollama.service), or run beside it: tiering up --host "
        f"127.0.0.1:11435; or {OFFER}sudo …"
    )


def test_doctor_says_the_same_of_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found(Occupant.OLLAMA, "0.24.0", 77)
    monkeypatch.setattr(check_running, "running", lambda _: None)
    for module in (up, check_running):
        monkeypatch.setattr(module, "who_listens", lambda _: found)
    monkeypatch.setattr(up, "unit_name", lambda _: "ollama.service")
    monkeypatch.setattr(up, "way_in", lambda _: OFFER + "sudo …")
    said = check_running._port(Address())
    assert said.state is CheckState.WARN
    assert "(process 77, ollama.service)" in said.finding
    assert OFFER in said.cure
    monkeypatch.setattr(check_running, "has_drop_in", lambda _: True)
    said = check_running._port(Address())
    assert said.state is CheckState.OK
    assert "Ollama 0.24.0 of ollama.service listens there" in said.finding
