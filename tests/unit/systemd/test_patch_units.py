"""After an update of Ollama: the path unit sees it, the service that it starts makes a tree with
the least of this machine, and the next start of the server takes that tree.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ollama_tiering.patchset.llama_server import link_tree
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.systemd import service, tree_start
from ollama_tiering.systemd.plan import InstallRequest
from ollama_tiering.systemd.units import MAKER_UNIT, PATH_UNIT, WANTED
from tests.unit.patchset import fake_installed as fake
from tests.unit.systemd import fake_tree
from tests.unit.systemd.conftest import Machine
from tests.unit.systemd.test_tree_install import installed, only_this_machine, tree
from tests.unit.systemd.test_tree_start import World, mode, world
from tests.unit.systemd.test_units import SERVER, SIDECAR, UNITS, Unit, analyze, exposure, unit

FIXTURES = (installed, only_this_machine, tree, mode, world)


def update(world: World) -> InstalledOllama:
    (world.installed.lib / "libllama.so").write_text("updated")
    return world.installed


def made(world: World, name: str = "v0.33.0-1") -> LinkTree:
    """As the service leaves it in its cache."""
    return fake_tree.patched(world.made_after, world.installed, name, listed=True)


def condition(world: World) -> list[str]:
    text = (world.unit_directory / MAKER_UNIT).read_text()
    (line,) = Unit(text).all("ExecCondition")
    words = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(line)]
    return [word.replace("%C", str(world.root / "var"), 1) for word in words]


def is_due(world: World) -> bool:
    done = subprocess.run(condition(world), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode in (0, tree_start.SAID_WHY)
    return done.returncode == 0


def test_the_next_start_takes_the_tree_that_was_made_since(world: World) -> None:
    world.require_tiered()
    update(world)
    world.require_stock("was updated or changed since")
    tree = made(world)
    started = world.start()
    assert (started.program, started.said) == (tree.binary, "")
    assert started.same_process
    assert started.environment["OLLAMA_KV_TIER_ENGINE_SOCKET"].endswith("sidecar.sock.engine")


def test_a_tree_is_made_only_where_the_start_would_be_stock_for_want_of_one(world: World) -> None:
    assert not is_due(world)
    update(world)
    assert is_due(world)
    made(world)
    assert not is_due(world)
    update(world)
    world.installed.server.unlink()  # an installer is at work
    assert is_due(world)
    (world.place / "tree/tree.json").unlink()  # no tree in a cache would be started
    assert not is_due(world)


def test_of_two_the_latest_that_fits_is_taken(world: World) -> None:
    update(world)
    first, second = made(world), made(world, "v0.33.0-2")
    os.utime(first.folder / link_tree.RECORD, (1, 1))
    assert world.start().program == second.binary
    (world.installed.lib / "libllama.so").write_text("updated once more")
    world.require_stock("was updated or changed since")


def test_a_tree_of_another_ollama_is_not_taken(world: World) -> None:
    """Its record says which one it is of, and the services' user writes that record."""
    update(world)
    other = fake_tree.installed(world.root / "other")
    fake_tree.patched(world.made_after, other, listed=True)
    world.require_stock("was updated or changed since")


def test_half_a_tree_is_not_taken(world: World) -> None:
    update(world)
    (made(world).lib / "libllama-server-impl.so").write_text("cut short")
    world.require_stock("was updated or changed since")
    made(world, ".building-1")
    world.require_stock("was updated or changed since")


@pytest.mark.parametrize("what", ["", "lib/ollama/llama-server", "tree.json"])
def test_what_another_user_may_change_is_not_started(world: World, what: str) -> None:
    update(world)
    tree = made(world)
    (tree.folder / what).chmod(0o777)
    if world.shared:
        world.require_stock(f"may change {tree.folder / what}".rstrip("/"))
    else:
        assert world.start().program == tree.binary


@pytest.mark.parametrize("mode", ["shared"], indirect=True)
def test_status_of_another_user_does_not_say_what_it_cannot_see(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(world)
    made(world)
    cache = world.made_after
    assert tree_start.why_stock(world.place, None, cache) is None
    monkeypatch.setattr(link_tree, "below", lambda _: [])  # as for a user who may not look
    monkeypatch.setattr(os, "access", lambda path, *_: path != cache)
    why = tree_start.why_stock(world.place, None, cache)
    assert why is not None
    assert f"only its user and root may look into {cache}" in why.cure


@pytest.mark.parametrize("mode", ["own"], indirect=True)
def test_a_unit_of_an_older_version_is_answered_as_before(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its shell lets stdout through, and knows no cache."""
    words = [str(world.place), tree_start.OWN]
    assert tree_start.main(words) == 0
    assert capfd.readouterr() == ("", "")
    update(world)
    made(world)
    assert tree_start.main(words) == tree_start.SAID_WHY
    assert "run `tiering patch`, then `tiering systemd install` again" in capfd.readouterr().err


def test_it_watches_what_the_tree_was_made_from(machine: Machine, tmp_path: Path) -> None:
    real = fake_tree.installed(tmp_path / "100% of v0.32")
    name = tmp_path / "bin/ollama"
    name.parent.mkdir()
    name.symlink_to(real.program)
    found = fake_tree.patched(tmp_path / "cache", real)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ollama_tiering.patchset.llama_server.installation._PREFIXES", (tmp_path,))
        machine.tiering("install", "--binary", found.binary)
    watched = unit(machine, PATH_UNIT).all("PathChanged")
    assert watched == [str(path).replace("%", "%%") for path in (name, real.program, real.lib)]
    command = unit(machine, MAKER_UNIT)["Service"]["ExecStart"]
    assert command.endswith(f" patch --wait -q -j 1 --ollama {tmp_path}")


def test_it_runs_as_the_services_user_and_after_everything_else(
    machine: Machine, tree: LinkTree
) -> None:
    machine.tiering("install", "--binary", tree.binary, "--run-as", "somebody")
    made = unit(machine, MAKER_UNIT)
    own = made["Service"]
    assert own["User"] == "somebody"
    least = {"Nice": "19", "CPUSchedulingPolicy": "idle", "IOSchedulingClass": "idle"}
    assert {name: own[name] for name in least} == least
    assert '"OLLAMA_TIERING_CACHE=/var/cache/ollama-tiering-1000"' in made.all("Environment")
    assert own["CacheDirectory"] == "ollama-tiering-1000"
    assert own["CacheDirectoryMode"] == "0700"
    assert not made.has_section("Install")  # the server's unit wants it
    for name in (SERVER, SIDECAR):  # what they run, they may not write
        text = machine.at(UNITS / name).read_text()
        assert "ProtectSystem=strict" in text
        assert "CacheDirectory" not in text
        assert not re.search("ReadWritePaths=.*/var/cache", text)


def test_nobody_waits_for_it(machine: Machine, tree: LinkTree) -> None:
    """The start of `ollama.service` starts it: neither for a network that stock's does not wait
    for, nor for a job that ends with the build.
    """
    machine.tiering("install", "--binary", tree.binary)
    made = unit(machine, MAKER_UNIT)
    assert made.all("Wants") == made.all("Requires") == []
    assert made["Service"]["Type"] == "exec"
    assert int(made["Service"]["TimeoutStartSec"]) <= 600
    assert "network-online" not in machine.at(UNITS / PATH_UNIT).read_text()


def test_what_fails_each_time_is_not_tried_for_ever(machine: Machine, tree: LinkTree) -> None:
    machine.tiering("install", "--binary", tree.binary)
    limit = unit(machine, MAKER_UNIT)["Unit"]
    assert limit["StartLimitIntervalSec"] == "1h"
    assert 1 < int(limit["StartLimitBurst"]) <= 5


def test_it_has_the_proxy_of_ollamas_service(machine: Machine, tree: LinkTree) -> None:
    """But not of a file that only root may read."""
    machine.write("/etc/proxy", "ALL_PROXY=http://secret@there", 0o600)
    machine.write(
        "/etc/systemd/system/ollama.service.d/override.conf",
        '[Service]\nEnvironment="HTTPS_PROXY=http://there:3128/%%41" no_proxy=local\n'
        "Environment=OLLAMA_DEBUG=1\nEnvironmentFile=/etc/proxy\n",
    )
    machine.tiering("install", "--binary", tree.binary)
    made = unit(machine, MAKER_UNIT).all("Environment")
    assert '"HTTPS_PROXY=http://there:3128/%%41"' in made
    assert '"no_proxy=local"' in made
    assert not [line for line in made if "secret" in line or "DEBUG" in line]


def test_another_user_takes_no_tree_of_the_one_before(machine: Machine, tree: LinkTree) -> None:
    """Systemd gives an existing CacheDirectory= to whom the unit names, with all that is in it."""
    folders = set()
    for user in ("ollama", "somebody"):
        machine.tiering("install", "--binary", tree.binary, "--run-as", user)
        made, server = unit(machine, MAKER_UNIT), unit(machine, SERVER)
        folder = made["Service"]["CacheDirectory"]
        assert f'"OLLAMA_TIERING_CACHE=/var/cache/{folder}"' in made.all("Environment")
        (start,) = server.all("ExecStart")
        assert f"/var/cache/{folder}" in shlex.split(start)
        folders.add(folder)
    assert folders == {"ollama-tiering-998", "ollama-tiering-1000"}


@pytest.mark.parametrize("mode", ["shared"], indirect=True)
def test_status_looks_where_the_service_does(world: World) -> None:
    update(world)
    made(world)
    request = InstallRequest(prefix=world.place)
    assert request.cache == world.made_after
    assert service.tree_of(request) == {"why_stock": "", "cure": ""}


def test_the_next_start_is_what_it_ends_with(machine: Machine, tree: LinkTree) -> None:
    """Nothing is restarted: a model may be loaded."""
    machine.tiering("install", "--binary", tree.binary)
    text = "\n".join(machine.at(UNITS / name).read_text() for name in WANTED)
    assert "systemctl" not in text
    assert "Exec" not in machine.at(UNITS / PATH_UNIT).read_text()
    assert unit(machine, MAKER_UNIT).all("ExecStart") == [
        unit(machine, MAKER_UNIT)["Service"]["ExecStart"]
    ]


@pytest.mark.parametrize("prefix", ["/opt/ollama-tiering", "/srv/k v/100%/$HOME"])
def test_systemd_accepts_them(systemd_machine: Machine, tree: LinkTree, prefix: str) -> None:
    systemd_machine.write("/bin/sh", "", 0o755)
    systemd_machine.tiering("install", "--binary", tree.binary, "--prefix", prefix)
    done = analyze("verify", f"--root={systemd_machine.root}", *WANTED)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "ollama-tier" in line]
    assert (done.returncode, said) == (0, [])
    assert exposure(systemd_machine, MAKER_UNIT) < exposure(systemd_machine, "ollama.service")


def test_systemd_accepts_those_of_a_user(
    systemd_machine: Machine, tree: LinkTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    here = Machine(Path("/"), systemd_machine.build)
    here.tiering("install", "--binary", tree.binary, "--user", HOME=str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    units = [home / ".config/systemd/user" / name for name in WANTED]
    done = analyze("--user", "verify", *units)
    said = [line for line in done.stderr.splitlines() if "ollama-tier" in line]
    assert (done.returncode, said) == (0, [])
    text = units[1].read_text()
    assert '"OLLAMA_TIERING_CACHE=%C/ollama-tiering"' in text
    assert "User=" not in text
    here.tiering("uninstall", "--user", HOME=str(home))
    assert list(home.rglob("*")) == []


def test_a_go_engine_has_none(machine: Machine, tree: LinkTree) -> None:
    """Its build stands by itself, and after an update the newer Ollama is served."""
    machine.tiering("install", "--binary", tree.binary)
    assert all(machine.at(UNITS / name).exists() for name in WANTED)
    assert machine.document("status")["units"].keys() == {SIDECAR, SERVER, PATH_UNIT}
    machine.install()
    assert not any(machine.at(UNITS / name).exists() for name in WANTED)
    assert "Wants=ollama-tiering-patch" not in machine.at(UNITS / SERVER).read_text()


def test_ours_in_the_place_of_ollamas_has_them_until_restore(
    machine: Machine, tmp_path: Path
) -> None:
    real = fake.at(machine.root / "usr/local")
    fake_tree.installed(machine.root / "usr/local")
    own = machine.write("/etc/systemd/system/ollama.service", "")
    own.write_text(f"[Service]\nExecStart={real.program} serve\nUser=ollama\n")
    before = machine.files()
    found = fake_tree.patched(tmp_path / "cache", real)
    machine.tiering("install", "--replace", "--binary", found.binary)
    drop_in = machine.at(UNITS / "ollama.service.d/tiering.conf").read_text()
    assert [f"Wants={name}" in drop_in for name in WANTED] == [True, True]
    said = machine.tiering("install", "--restore")
    for name in WANTED:
        assert f"removed      {UNITS / name}" in said
        assert not machine.at(UNITS / name).exists()
    machine.tiering("uninstall")
    assert machine.files() == before


def test_uninstall_names_what_the_service_has_made(machine: Machine, tree: LinkTree) -> None:
    machine.tiering("install", "--binary", tree.binary)
    places = ("/var/cache/ollama-tiering", "/var/cache/ollama-tiering-998")
    made_there = [machine.write(f"{place}/llama-server/x", "") for place in places]
    said = machine.tiering("uninstall")
    for place in places:
        assert f"left         {place}: made after updates" in said
    assert all(file.exists() for file in made_there)
