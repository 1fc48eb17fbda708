"""`install --replace`: one drop-in of a unit that stays whose it is; `--restore` takes it away.
What would keep Ollama from starting is refused, and nothing is written.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ollama_tiering.cli import systemd_lines
from ollama_tiering.config import home
from ollama_tiering.doctor import check_service
from ollama_tiering.doctor.check import CheckState
from ollama_tiering.errors import ServiceError, UsageError
from ollama_tiering.launch.ollama import Api
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.systemd import access, in_place, plan, replaced, service
from ollama_tiering.systemd import manager as managing
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.manifest import Installed, NewFile
from ollama_tiering.systemd.plan import InstallRequest
from ollama_tiering.systemd.units import WANTED
from tests.unit.systemd.conftest import Machine
from tests.unit.systemd.test_install import FakeSystemctl
from tests.unit.systemd.test_replace_start import Place
from tests.unit.systemd.test_units import SIDECAR, analyze, unit

UNITS = "/etc/systemd/system"
STOCK = f"{UNITS}/ollama.service"
FOLDER = f"{STOCK}.d"
DROP_IN = f"{FOLDER}/tiering.conf"
OVERRIDE = f"{FOLDER}/override.conf"
SERVICE = "[Service]\n"


def replace(machine: Machine, *args: str, code: int = 0) -> str:
    return machine.tiering("install", "--replace", "--binary", machine.binary, *args, code=code)


def refused(machine: Machine, *args: str, code: int = 2) -> str:
    before = machine.files()
    said = replace(machine, *args, code=code)
    assert machine.files() == before
    assert len(said.splitlines()) == 2, said  # cause and cure
    return said


def test_one_drop_in_is_written_and_restore_takes_it_away(machine: Machine) -> None:
    before = machine.files()
    text = replace(machine)
    new = {name for name in machine.files() if name not in before}
    assert {name for name in new if name.startswith("etc/")} == {
        DROP_IN.lstrip("/"),
        f"{UNITS}/{SIDECAR}".lstrip("/"),
    }
    assert all(name.startswith(("etc/", "opt")) for name in new)
    assert before.items() <= machine.files().items()  # every byte of theirs
    assert f"wrote        {DROP_IN}" in text
    assert "daemon-reload; systemctl restart ollama-tiering.service ollama.service" in text
    with_it = machine.files()
    said = machine.tiering("install", "--restore", "--dry-run")
    assert f"would remove {DROP_IN}" in said
    assert machine.files() == with_it
    said = machine.tiering("install", "--restore")
    assert f"removed      {DROP_IN}" in said
    assert "next         systemctl daemon-reload; systemctl restart ollama.service" in said
    without = machine.files()
    assert {name for name in with_it if name not in without} == {DROP_IN.lstrip("/")}
    assert "nothing is in the place" in machine.tiering("install", "--restore")
    assert machine.document("install", "--restore") == {"installed": False}
    machine.tiering("uninstall")
    assert machine.files() == before


def test_its_folder_goes_only_if_install_made_it_and_it_is_empty(machine: Machine) -> None:
    machine.at(OVERRIDE).unlink()
    machine.at(FOLDER).rmdir()
    replace(machine)
    machine.tiering("install", "--restore")
    assert not machine.at(FOLDER).exists()
    replace(machine)
    theirs = machine.write(OVERRIDE, SERVICE)
    machine.tiering("install", "--restore")
    assert theirs.exists()
    theirs.unlink()
    replace(machine)  # the folder is a person's by now, and was not made again
    machine.tiering("uninstall")
    assert not machine.at(DROP_IN).exists()


def test_a_second_replace_writes_nothing_and_an_upgrade_stays_in_the_place(
    machine: Machine,
) -> None:
    replace(machine)
    before = machine.files()
    document = machine.document("install", "--replace", "--binary", machine.binary)
    assert document["changes"]["written"] == []
    assert document["drop_in"] == DROP_IN
    assert machine.files() == before
    machine.binary.write_text("#!/bin/sh\nexit 1\n")
    document = machine.document("install", "--binary", machine.binary)  # without --replace
    assert document["changes"]["written"] == ["/opt/ollama-tiering/bin/ollama"]
    assert document["drop_in"] == DROP_IN
    assert not machine.at(f"{UNITS}/ollama-tiered.service").exists()


def test_a_server_beside_it_moves_into_the_place_and_back(machine: Machine) -> None:
    before = machine.files()
    machine.install("--host", "127.0.0.1:11500")
    replace(machine)
    assert not machine.at(f"{UNITS}/ollama-tiered.service").exists()
    machine.tiering("install", "--restore")
    machine.install()
    assert machine.at(f"{UNITS}/ollama-tiered.service").exists()
    assert not machine.at(DROP_IN).exists()
    machine.tiering("uninstall")
    assert machine.files() == before


def test_a_dry_run_writes_nothing(machine: Machine) -> None:
    before = machine.files()
    assert f"would write  {DROP_IN}" in replace(machine, "--dry-run")
    assert machine.files() == before


def test_user_models_and_address_are_those_of_their_unit(machine: Machine) -> None:
    machine.write("/etc/default/ollama", "# theirs\nOLLAMA_MODELS='/srv/mo dels'\n")
    machine.write(
        OVERRIDE,
        '[Service]\nUser=somebody\nEnvironment="OLLAMA_HOST=0.0.0.0:12000" OLLAMA_MODELS=/no\n'
        "EnvironmentFile=-/etc/default/ollama\n",
    )
    assert "server       http://0.0.0.0:12000" in replace(machine)
    sidecar = unit(machine, SIDECAR)
    assert sidecar.all("User") == ["somebody"]
    assert '"OLLAMA_MODELS=/srv/mo dels"' in sidecar.all("Environment")
    text = machine.at(DROP_IN).read_text()
    for word in ("OLLAMA_HOST", "OLLAMA_MODELS", "User=", "12000"):
        assert word not in text


def test_a_unit_without_a_user_is_roots(machine: Machine) -> None:
    machine.write(STOCK, "[Service]\nExecStart=/usr/local/bin/ollama serve\n")
    replace(machine)
    assert unit(machine, SIDECAR).all("User") == ["root"]


@pytest.mark.parametrize(
    "option", [("--host", ":11500"), ("--models", "/m"), ("--run-as", "somebody")]
)
def test_what_is_theirs_to_say_is_refused(machine: Machine, option: tuple[str, str]) -> None:
    assert f"{option[0]} is for ollama.service to say" in refused(machine, *option)
    replace(machine)
    said = machine.tiering("install", "--binary", machine.binary, *option, code=2)
    assert "--restore" in said


def test_options_that_contradict_each_other(machine: Machine) -> None:
    assert "sidecar alone" in machine.tiering("install", "--replace", "--sidecar-only", code=2)
    assert "--restore installs nothing" in machine.tiering(
        "install", "--restore", "--replace", code=2
    )


@pytest.mark.parametrize(
    ("drop_in", "said"),
    [
        ("ExecStart=\nExecStart=/bin/sh -c 'ollama serve'", "starts `/bin/sh -c 'ollama serve'`"),
        ("ExecStart=\nExecStart=/usr/local/bin/ollama serve --x", "and not `/…/ollama serve`"),
        ("ExecStart=/usr/bin/ollama serve", "has 2 commands"),
        ("ExecStart=", "has 0 commands"),
        ("ExecStart=\nExecStart=-/usr/local/bin/ollama serve", "and not `/…/ollama serve`"),
        ("RootDirectory=/srv/root", "RootDirectory=/srv/root"),
        ("NoExecPaths=/", "NoExecPaths=/"),
        ("DynamicUser=yes", "DynamicUser="),
        ("RestrictAddressFamilies=AF_INET AF_INET6", "cannot reach the sidecar"),
        ("RestrictAddressFamilies=~AF_UNIX", "cannot reach the sidecar"),
    ],
)
def test_a_unit_that_would_lose_something_is_refused(
    machine: Machine, drop_in: str, said: str
) -> None:
    machine.write(OVERRIDE, SERVICE + drop_in + "\n")
    assert said in refused(machine)


@pytest.mark.parametrize(
    "drop_in",
    [
        "ExecStart=\nExecStart=/usr/local/bin/ollama serve",
        'ExecStart=\nExecStart="/usr/local/bin/ollama" \\\n  # a comment\n  serve',
        "RestrictAddressFamilies=AF_UNIX AF_INET",
        "ProtectHome=yes\nProtectSystem=strict\nPrivateTmp=yes",
        "ExecStart=\nExecStart=/bin/other\nExecStart=\nExecStart=/usr/local/bin/ollama serve",
        "[Unit]\nExecStart=/bin/no",
    ],
)
def test_a_unit_that_loses_nothing_is_not(machine: Machine, drop_in: str) -> None:
    machine.write(OVERRIDE, SERVICE + drop_in + "\n")
    replace(machine)
    assert machine.document("status")["replaces"]["why_stock"] == ""


def test_a_drop_in_that_is_read_after_ours_may_not_set_the_command(machine: Machine) -> None:
    """systemd would refuse two commands, and Ollama would not start."""
    late = machine.write(f"{FOLDER}/zz.conf", "[Service]\nExecStart=/usr/local/bin/ollama serve\n")
    assert f"{FOLDER}/zz.conf sets ExecStart=, and is read after {DROP_IN}" in refused(machine)
    late.write_text("[Service]\nEnvironment=A=1\n")
    replace(machine)


def test_drop_ins_are_read_in_the_order_of_their_names(machine: Machine) -> None:
    """Wherever they lie; of two with one name that in /etc counts."""
    other = "[Service]\nExecStart=\nExecStart=/bin/other serve\n"
    distribution = f"/usr/lib/systemd/system/{Path(FOLDER).name}"
    machine.write(f"{distribution}/10-a.conf", other)
    machine.write(f"{distribution}/30-c.conf", other)
    machine.write(f"{FOLDER}/30-c.conf", "")
    machine.write(f"{FOLDER}/20-b.conf", other.replace("/bin/other", "/usr/local/bin/ollama"))
    replace(machine)
    assert machine.document("status")["replaces"]["why_stock"] == ""


@pytest.mark.parametrize(
    "folder", [f"/usr/lib/systemd/system/{Path(FOLDER).name}", f"{UNITS}/service.d"]
)
def test_a_drop_in_of_theirs_that_has_our_name_elsewhere_is_not_hidden(
    machine: Machine, folder: str
) -> None:
    machine.write(f"{folder}/tiering.conf", "[Service]\nEnvironment=A=1\n")
    assert f"{folder}/tiering.conf is somebody else's" in refused(machine, code=9)


def test_a_drop_in_of_theirs_that_has_our_name_stays(machine: Machine) -> None:
    machine.write(DROP_IN, "[Service]\nEnvironment=A=1\n")
    assert f"not written by install, or changed since: {DROP_IN}" in refused(machine, code=9)
    assert "nothing is in the place" in machine.tiering("install", "--restore")


def test_ours_that_a_person_changed_is_neither_overwritten_nor_deleted(machine: Machine) -> None:
    replace(machine)
    with machine.at(DROP_IN).open("a") as file:
        file.write("Nice=5\n")
    machine.binary.write_text("#!/bin/sh\nexit 1\n")
    refused(machine, code=9)
    before = machine.files()
    said = machine.tiering("install", "--restore", code=9)
    assert "was changed since it was written" in said
    assert f"rm {machine.at(DROP_IN)}; systemctl daemon-reload; systemctl restart" in said
    assert machine.files() == before
    assert f"kept         {DROP_IN}" in machine.tiering("uninstall")


def test_ours_without_our_prefix_is_named(machine: Machine) -> None:
    replace(machine)
    machine.at("/opt/ollama-tiering/manifest.json").unlink()
    assert "is not known in /opt/ollama-tiering" in machine.tiering("install", "--restore", code=9)


def test_ours_that_is_gone_is_restored_all_the_same(machine: Machine) -> None:
    replace(machine)
    machine.at(DROP_IN).unlink()
    assert "tiering.conf is missing" in machine.document("status")["replaces"]["why_stock"]
    machine.tiering("install", "--restore")
    assert machine.document("status")["replaces"] is None


def test_no_unit_and_a_masked_one_are_refused(machine: Machine) -> None:
    machine.at(STOCK).unlink()
    machine.at(STOCK).symlink_to("/dev/null")
    assert f"{STOCK} is masked" in refused(machine)
    machine.at(STOCK).unlink()
    assert "there is no ollama.service here" in refused(machine)


@pytest.mark.parametrize("folder", ["/usr/lib/systemd/system", "/usr/local/lib/systemd/system"])
def test_a_unit_of_a_distribution_gets_its_drop_in_in_etc(machine: Machine, folder: str) -> None:
    text = machine.at(STOCK).read_text()
    machine.at(STOCK).unlink()
    machine.write(f"{folder}/ollama.service", text)
    before = machine.files()
    replace(machine)
    assert before.items() <= machine.files().items()
    assert machine.at(DROP_IN).exists()
    machine.write(STOCK, text.replace("/usr/local/bin", "/elsewhere"))  # it hides the other
    assert "starts /elsewhere/ollama now" in machine.tiering("status")


def test_a_container_of_podmans_is_refused(machine: Machine) -> None:
    machine.at(STOCK).unlink()
    machine.write(
        "/run/systemd/generator/ollama.service", "[Service]\nExecStart=/usr/bin/podman run x\n"
    )
    assert "starts `/usr/bin/podman run x`" in refused(machine)


def test_a_users_own_unit(machine: Machine) -> None:
    folder = "/home/me/.config/systemd/user"
    machine.write(f"{folder}/ollama.service", machine.at(STOCK).read_text())
    before = machine.files()
    given = ("install", "--replace", "--binary", str(machine.binary), "--user")
    text = machine.tiering(*given, HOME="/home/me")
    assert "systemctl --user daemon-reload; systemctl --user restart ollama-tiering" in text
    drop_in = machine.at(f"{folder}/ollama.service.d/tiering.conf").read_text()
    assert "`tiering systemd install --user --restore` deletes it" in drop_in
    assert "%t/ollama-tiering/sidecar.sock" in drop_in
    assert not machine.at(DROP_IN).exists()
    machine.tiering("install", "--restore", "--user", HOME="/home/me")
    machine.tiering("uninstall", "--user", HOME="/home/me")
    assert machine.files() == before


@pytest.mark.parametrize("prefix", ["/opt/ollama-tiering", "/srv/k v/100%/$HOME"])
def test_systemd_accepts_their_unit_with_ours(systemd_machine: Machine, prefix: str) -> None:
    systemd_machine.write("/bin/sh", "", 0o755)
    replace(systemd_machine, "--prefix", prefix)
    done = analyze("verify", f"--root={systemd_machine.root}", "ollama.service")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    drop_in = systemd_machine.at(DROP_IN)
    drop_in.write_text(drop_in.read_text().replace("ExecStart=\n", "", 1))  # it would find this
    done = analyze("verify", f"--root={systemd_machine.root}", "ollama.service")
    assert "more than one ExecStart" in done.stderr


def test_a_newer_ollama_is_not_replaced_by_an_older_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write("/usr/local/lib/ollama/llama-server", "", 0o755)
    assert "is of v0.30 or later, and the patched Ollama of the Go engine, older" in refused(
        machine
    )
    machine.at("/usr/local/lib/ollama/llama-server").unlink()
    binary = machine.build / "builds/v0.24.0-native/x/ollama"
    request = InstallRequest(binary=binary, replaces=True)
    for version, older in (("v0.24.1", False), ("v0.24.0", True), ("v0.9.9", True)):
        monkeypatch.setattr(InstalledOllama, "version", lambda _, said=version: said)
        if older:
            in_place._require_no_newer(machine.at("/usr/local/bin/ollama"), request)
            continue
        with pytest.raises(UsageError, match=r"is v0\.24\.1, and the patched Ollama v0\.24\.0"):
            in_place._require_no_newer(machine.at("/usr/local/bin/ollama"), request)


# --- on this machine --------------------------------------------------------------------------


@pytest.fixture(params=["go", "tree"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(plan, "_SYSTEM_UNITS", tmp_path / "units")
    monkeypatch.setattr(plan, "_SYSTEM_CONFIG", tmp_path / "config.toml")
    monkeypatch.setattr(plan, "_SYSTEM_PREFIX", tmp_path / "pre fix")
    return Place(tmp_path, request.param)


def require_refused(place: Place, match: str) -> None:
    before = sorted(place.root.rglob("*"))
    with pytest.raises(UsageError, match=match):
        place.install()
    assert sorted(place.root.rglob("*")) == before


def test_what_the_services_user_cannot_reach_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for locked in (place.root, place.stock):
        with monkeypatch.context() as patch:
            patch.setattr(access, "_may", lambda _uid, _groups, path, no=locked: path != no)
            require_refused(place, f"user {place.user} may not read {locked}")
    place.install()


def test_a_home_that_their_unit_hides_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("ollama.service.d/override.conf", "[Service]\nProtectHome=yes\n")
    with monkeypatch.context() as patch:
        patch.setattr(access, "HOMES", (place.root,))  # the prefix is there
        require_refused(place, r"has ProtectHome=, so it cannot see .*pre fix")
        patch.setattr(access, "HOMES", (Path(os.path.realpath(plan.sys.executable)).parent,))
        if place.kind == "tree":  # which asks Python at each start
            require_refused(place, r"has ProtectHome=, so it cannot see ")
        patch.setattr(access, "HOMES", ())
        place.install()


def test_an_ollama_that_is_not_the_patched_one_is_refused(place: Place) -> None:
    other = place.root / "other/ollama"
    other.parent.mkdir()
    place.write("ollama.service", place.unit().replace(str(place.stock), str(other)))
    if place.kind == "tree":
        require_refused(place, f"ollama.service starts {other}, and what is patched is")
    else:
        require_refused(place, f"ollama.service starts {other}, which cannot be read")


def test_doctor_says_what_the_next_start_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place.root / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place.root / "home/.config"))
    assert home() == place.root / "home"
    place.install()
    (found,) = check_service.checks()
    assert (found.name, found.state) == ("ollama.service", CheckState.OK)
    place.update()
    (found,) = check_service.checks()
    assert found.state is CheckState.WARN
    assert "its next start is not tiered" in found.finding
    cure = "ollama-tiering-patch.service makes" if place.kind == "tree" else "run `tiering patch`"
    assert cure in found.cure


class Answers:
    """Of an Ollama that is asked for its version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *said: str | None) -> None:
        self.left = [*said]
        monkeypatch.setattr(Api, "version", lambda _: self.left.pop(0) if self.left else None)
        monkeypatch.setattr(replaced, "_ASK_SECONDS", 0.0)
        monkeypatch.setattr(replaced, "_START_SECONDS", 0.2)


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystemctl:
    folder = tmp_path / "systemctl"
    folder.mkdir()
    return FakeSystemctl(folder, monkeypatch)


def test_an_install_that_is_cut_off_leaves_the_service_its_own_server(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop-in is written last: what it starts is there."""
    write = Installed._write

    def cut_off(self: Installed, file: NewFile, digest: str) -> None:
        if place.prefix / "manifest.json" != file.path and place.prefix in file.path.parents:
            raise OSError(28, "No space left on device")
        write(self, file, digest)

    with monkeypatch.context() as patch:
        patch.setattr(Installed, "_write", cut_off)
        with pytest.raises(OSError, match="No space"):
            place.install()
    assert place.service.command() == [str(place.stock), "serve"]
    place.install()
    place.require_tiered()


RESTART = "restart ollama-tiering.service ollama.service"


def test_now_restarts_the_service_and_waits_for_it(
    place: Place, systemctl: FakeSystemctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    Answers(monkeypatch, None, "0.24.0")
    manager = Manager(user_mode=False, root=None)
    service.install(place.request, manager, dry_run=False, now=True)
    assert systemctl.asked == ["daemon-reload", RESTART, "is-active ollama.service"]
    place.require_tiered()


@pytest.mark.parametrize("how", ["silent", "failed", "not restarted"])
def test_a_service_that_does_not_serve_then_gets_its_own_server_back(
    place: Place, systemctl: FakeSystemctl, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    Answers(monkeypatch)
    systemctl.state.write_text("failed" if how == "failed" else "active")
    if how == "not restarted":
        monkeypatch.setattr(replaced, "SIDECAR_UNIT", "bad.service")
    manager = Manager(user_mode=False, root=None)
    with pytest.raises(ServiceError, match="starts its own server again, as before"):
        service.install(place.request, manager, dry_run=False, now=True)
    given_back = ["daemon-reload", "is-active ollama.service", "restart ollama.service"]
    after = (2 * len(WANTED) + 1) if place.kind == "tree" else 0  # its units go then
    assert systemctl.asked[-3 - after :][:3] == given_back
    assert place.service.command() == [str(place.stock), "serve"]


@pytest.mark.parametrize("state", ["active", "failed", "inactive"])
def test_restore_restarts_what_nobody_has_stopped(
    place: Place, systemctl: FakeSystemctl, state: str
) -> None:
    place.install()
    systemctl.state.write_text(state)
    manager = Manager(user_mode=False, root=None)
    assert service.restore(place.request, manager, dry_run=False)
    restarted = ["restart ollama.service"] if state != "inactive" else []
    asked = ["daemon-reload", "is-active ollama.service", *restarted]
    for name in WANTED if place.kind == "tree" else ():
        asked += [f"disable --now {name}", f"is-active {name}"]
        assert not (place.units / name).exists()
    assert systemctl.asked == asked + (["daemon-reload"] if place.kind == "tree" else [])


def test_uninstall_gives_the_service_its_server_back_first(
    place: Place, systemctl: FakeSystemctl
) -> None:
    place.install()
    manager = Manager(user_mode=False, root=None)
    systemctl.log.unlink(missing_ok=True)
    systemctl.state.write_text("failed")  # of both, so that the sidecar counts as stopped
    assert service.uninstall(place.request, manager, dry_run=False)
    assert systemctl.asked[:3] == [
        "daemon-reload",
        "is-active ollama.service",
        "restart ollama.service",
    ]
    ours = ["ollama-tiering.service", *(WANTED if place.kind == "tree" else ())]
    assert all(f"disable --now {name}" in systemctl.asked[3:] for name in ours)
    assert place.service.command() == [str(place.stock), "serve"]
    assert not place.prefix.exists()


def test_without_a_manager_now_is_refused_before_anything_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managing, "_RUNNING", place.root / "nothing")
    manager = Manager(user_mode=False, root=None)
    before = sorted(place.root.rglob("*"))
    with pytest.raises(ServiceError, match="no service manager runs here"):
        service.install(place.request, manager, dry_run=False, now=True)
    assert sorted(place.root.rglob("*")) == before


def test_where_no_systemd_runs_it_is_said_what_to_run_where_one_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managing, "_RUNNING", place.root / "nothing")
    manager = Manager(user_mode=False, root=None)
    plan_, outcome = service.install(place.request, manager, dry_run=False, now=False)
    what = "next         no systemd runs here; where it does: systemctl daemon-reload; systemctl "
    *_, last = systemd_lines.what_is_next(plan_, outcome, manager, now=False)
    assert last == f"{what}restart ollama-tiering.service ollama.service"
    service.restore(place.request, manager, dry_run=False)
    *_, last = systemd_lines.after_restore(manager)
    assert last == f"{what}restart ollama.service"


def test_whoever_may_not_write_is_told_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before what else is missing, such as a patched Ollama."""
    before = machine.files()
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    for option in ("--replace", "--restore"):
        said = machine.tiering("install", option, code=2)
        assert f"this user may not write to {machine.at(UNITS)}" in said
        assert "hint: run it with sudo" in said
        assert len(said.splitlines()) == 2
    assert machine.files() == before


def test_a_service_that_is_not_enabled_is_said(machine: Machine) -> None:
    cure = "sudo systemctl enable ollama"
    said = replace(machine)
    assert "beware       ollama.service is not enabled, so after the next restart nothing" in said
    assert cure in said
    wants = machine.at(f"{UNITS}/default.target.wants")
    wants.mkdir()
    (wants / "ollama.service").symlink_to(STOCK)
    assert cure not in replace(machine)
