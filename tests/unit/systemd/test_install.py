"""Install writes its own files and nothing else; uninstall removes exactly those."""

from __future__ import annotations

import hashlib
import os
import pwd
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.systemd import manager as managing
from ollama_tiering.systemd import server_files
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.manifest import MANIFEST_NAME, Installed, InstallManifest, NewFile
from ollama_tiering.systemd.plan import InstallPlan, InstallRequest, make_plan
from ollama_tiering.systemd.service import data_left
from tests.unit.systemd.conftest import Machine

PREFIX = "/opt/ollama-tiering"
SIDECAR = "/etc/systemd/system/ollama-tiering.service"
SERVER = "/etc/systemd/system/ollama-tiered.service"
STOCK = ["/usr/local/bin/ollama", "/etc/systemd/system/ollama.service"]


def test_install_then_uninstall_leaves_every_byte_as_it_was(machine: Machine) -> None:
    before = machine.files()
    machine.install()
    assert set(machine.files()) > set(before)
    machine.tiering("uninstall")
    assert machine.files() == before


def test_the_binary_and_its_libraries_are_laid_out_as_upstreams_release(machine: Machine) -> None:
    machine.install()
    binary = machine.at(f"{PREFIX}/bin/ollama")
    assert binary.read_bytes() == machine.binary.read_bytes()
    assert os.access(binary, os.X_OK)
    libraries = machine.at(f"{PREFIX}/lib/ollama")
    assert (libraries / "libggml-base.so").readlink() == Path("libggml-base.so.0")
    assert (libraries / "libggml-base.so").read_text() == "library"
    assert (libraries / "cuda_v12/libggml-cuda.so").read_text() == "cuda"


def test_nothing_outside_prefix_and_unit_directory_is_written(machine: Machine) -> None:
    before = machine.files()
    machine.install("--prefix", "/srv/kv store")
    new = [name for name in machine.files() if name not in before]
    places = ("srv", "opt", "etc/systemd/system/ollama-tier")
    assert all(name.startswith(places) for name in new), new
    assert not any(name.startswith("opt") for name in new)
    machine.tiering("uninstall", "--prefix", "/srv/kv store")
    assert machine.files() == before


def test_hashes_of_the_stock_are_shown_before_and_after(machine: Machine) -> None:
    text = machine.install()
    for path in STOCK:
        digest = hashlib.sha256(machine.at(path).read_bytes()).hexdigest()
        assert text.count(digest) == 2
        assert f"before {digest}" in text
        assert f"after  {digest}" in text
        assert path in text
    document = machine.document("uninstall")
    assert document["stock_before"] == document["stock_after"] == document["stock_installed"]
    assert set(STOCK) < set(document["stock_before"])  # and its drop-in


def test_a_stock_changed_since_the_install_is_told(machine: Machine) -> None:
    machine.install()
    assert "was another" not in machine.tiering("status")
    machine.at(STOCK[0]).write_text("stock, newer")
    assert machine.tiering("status").count("was another when") == 1
    machine.tiering("uninstall")
    assert machine.at(STOCK[0]).read_text() == "stock, newer"


def test_a_dry_run_writes_nothing_and_says_what_it_would(machine: Machine) -> None:
    before = machine.files()
    text = machine.install("--dry-run")
    assert machine.files() == before
    for path in (SIDECAR, SERVER, f"{PREFIX}/bin/ollama"):
        assert f"would write  {path}" in text
    machine.install()
    installed = machine.files()
    text = machine.tiering("uninstall", "--dry-run")
    assert machine.files() == installed
    assert f"would remove {SIDECAR}" in text


def test_a_file_a_person_edited_is_kept_and_named(machine: Machine) -> None:
    before = machine.files()
    machine.install()
    machine.at(SIDECAR).write_text("mine")
    assert f"changed      {SIDECAR}" in machine.tiering("status")
    text = machine.tiering("uninstall")
    assert f"kept         {SIDECAR}: changed since it was written" in text
    after = machine.files()
    assert after.pop(SIDECAR.lstrip("/")) == "mine"
    assert after == before


def test_a_drop_in_of_a_person_stays(machine: Machine) -> None:
    machine.install()
    drop_in = machine.write(f"{SIDECAR}.d/override.conf", "[Service]\nMemoryMax=9G\n")
    machine.tiering("uninstall")
    assert drop_in.exists()
    assert not machine.at(SIDECAR).exists()


def test_a_second_install_replaces_what_the_first_wrote(machine: Machine) -> None:
    before = machine.files()
    machine.install()
    machine.binary.write_text("#!/bin/sh\nexit 1\n")
    (machine.build / "build/lib/ollama/cuda_v12/libggml-cuda.so").unlink()
    document = machine.document("install", "--binary", machine.binary)
    assert document["changes"]["written"] == [f"{PREFIX}/bin/ollama"]
    assert document["changes"]["removed"] == [f"{PREFIX}/lib/ollama/cuda_v12/libggml-cuda.so"]
    assert machine.at(f"{PREFIX}/bin/ollama").read_text().endswith("exit 1\n")
    machine.tiering("uninstall")
    assert machine.files() == before


CHOICES = ("--host", "0.0.0.0:12000", "--models", '/srv/50% of "them"', "--run-as", "somebody")


def test_an_upgrade_keeps_host_models_and_user(machine: Machine) -> None:
    machine.install(*CHOICES)
    units = [machine.at(path).read_text() for path in (SIDECAR, SERVER)]
    assert "OLLAMA_HOST=0.0.0.0:12000" in units[1]
    assert "User=somebody" in units[0]
    machine.binary.write_text("#!/bin/sh\nexit 1\n")
    assert "http://0.0.0.0:12000" in machine.install()
    assert [machine.at(path).read_text() for path in (SIDECAR, SERVER)] == units
    text = machine.install("--host", "127.0.0.1:12001")
    assert "http://127.0.0.1:12001" in text
    now = machine.at(SERVER).read_text()
    assert now == units[1].replace("0.0.0.0:12000", "127.0.0.1:12001")


def test_an_upgrade_does_not_move_away_from_an_ollama_that_came_later(machine: Machine) -> None:
    stock = machine.at(STOCK[1])
    text = stock.read_text()
    stock.unlink()
    assert "http://127.0.0.1:11434" in machine.install()
    stock.write_text(text)
    assert "http://127.0.0.1:11434" in machine.install()


def test_what_was_uninstalled_is_forgotten(machine: Machine) -> None:
    machine.install(*CHOICES)
    machine.tiering("uninstall")
    assert "http://127.0.0.1:11435" in machine.install()
    assert "User=ollama" in machine.at(SIDECAR).read_text()


def test_an_install_without_the_server_takes_it_away(machine: Machine) -> None:
    machine.install()
    machine.tiering("install", "--sidecar-only")
    assert machine.at(SIDECAR).exists()
    assert not machine.at(SERVER).exists()
    assert not machine.at(f"{PREFIX}/bin/ollama").exists()


@pytest.mark.parametrize("path", [SIDECAR, SERVER, f"{PREFIX}/bin/ollama"])
def test_a_file_that_is_not_ours_is_never_overwritten(machine: Machine, path: str) -> None:
    machine.write(path, "somebody else's")
    before = machine.files()
    error = machine.tiering("install", "--binary", machine.binary, code=9)
    assert path in error
    assert "hint: move them away" in error
    assert machine.files() == before


def test_an_edited_unit_is_not_overwritten_by_an_upgrade(machine: Machine) -> None:
    machine.install()
    machine.at(SERVER).write_text("mine")
    before = machine.files()
    assert SERVER in machine.tiering("install", "--binary", machine.binary, code=9)
    assert machine.files() == before


def test_nothing_is_taken_over_from_a_unit_that_a_person_changed(machine: Machine) -> None:
    machine.install()
    machine.at(SERVER).write_text('[Service]\nEnvironment="OLLAMA_HOST=127.0.0.1:99999"\n')
    assert SERVER in machine.tiering("install", "--binary", machine.binary, code=9)


def test_links_that_enabling_made_go_with_their_unit(machine: Machine) -> None:
    before = machine.files()
    machine.install()
    wants = machine.at("/etc/systemd/system/multi-user.target.wants")
    wants.mkdir()
    (wants / "ollama-tiering.service").symlink_to(SIDECAR)
    (wants / "ollama.service").symlink_to(STOCK[1])
    machine.tiering("uninstall")
    assert [path.name for path in wants.iterdir()] == ["ollama.service"]
    (wants / "ollama.service").unlink()
    wants.rmdir()
    assert machine.files() == before


def test_uninstall_of_nothing_says_so(machine: Machine) -> None:
    assert "nothing is installed in /opt/ollama-tiering" in machine.tiering("uninstall")
    assert machine.document("uninstall") == {"installed": False}
    assert "nothing is installed" in machine.tiering("status")
    assert machine.document("status")["installed"] is False


def test_status_says_what_is_there(machine: Machine) -> None:
    machine.install()
    machine.at(f"{PREFIX}/bin/ollama").unlink()
    document = machine.document("status")
    assert document["files"][f"{PREFIX}/bin/ollama"] == "missing"
    assert document["files"][SIDECAR] == "same"
    assert list(document["units"]) == ["ollama-tiering.service", "ollama-tiered.service"]
    assert document["stock"][STOCK[0]]["as_installed"] is True


def test_user_mode_writes_into_the_home(machine: Machine) -> None:
    before = machine.files()
    home = "/home/me"
    machine.tiering("install", "--binary", machine.binary, "--user", HOME=home)
    unit = machine.at(f"{home}/.config/systemd/user/ollama-tiering.service")
    assert "ProtectSystem" not in unit.read_text()
    assert machine.at(f"{home}/.local/lib/ollama-tiering/bin/ollama").exists()
    machine.tiering("uninstall", "--user", HOME=home)
    assert machine.files() == before


def test_a_program_that_is_none_is_refused(machine: Machine) -> None:
    error = machine.tiering("install", "--binary", machine.build / "nothing", code=2)
    assert "is not a program" in error


def test_a_write_that_fails_half_way_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "before").write_text("x")
    installed = Installed(Path("/p"), tmp_path)
    files = [
        NewFile(Path("/a/one"), content=b"1"),
        NewFile(Path("/a/two"), source=tmp_path / "before"),
        NewFile(Path("/a/three"), content=b"3"),
    ]
    written = []

    def write(file: NewFile, digest: str) -> None:
        if file.path.name == "two":
            raise OSError(28, "No space left on device")
        written.append(file.path.name)
        Installed._write(installed, file, digest)

    installed._write = write  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space"):
        installed.install(files, InstallManifest())
    assert written == [MANIFEST_NAME, "one"]
    changes = Installed(Path("/p"), tmp_path).uninstall()
    assert changes.removed == ["/a/one"]
    assert changes.missing == ["/a/two", "/a/three"]
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def test_a_manifest_that_cannot_be_read_is_an_error_and_nothing_is_removed(
    machine: Machine,
) -> None:
    machine.install()
    machine.at(f"{PREFIX}/manifest.json").write_text("{")
    before = machine.files()
    assert "is not what install wrote" in machine.tiering("uninstall", code=9)
    assert machine.files() == before


class FakeSystemctl:
    """A systemctl on PATH that keeps what it was asked, and says what a test wants."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = root / "asked"
        self.state = root / "state"
        self.state.write_text("inactive")
        script = root / "systemctl"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {self.log}\n'
            f'case "$*" in *is-active*) cat {self.state};; *bad*) echo boom; exit 1;; esac\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
        monkeypatch.setattr(managing, "_RUNNING", root)

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def test_a_running_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl = FakeSystemctl(tmp_path, monkeypatch)
    manager = Manager(user_mode=False, root=None)
    manager.reload()
    manager.start(["a.service", "b.service"])
    manager.stop(["a.service"])
    assert systemctl.asked == [
        "daemon-reload",
        "enable --now a.service b.service",
        "disable --now a.service",
        "is-active a.service",
    ]
    assert Manager(user_mode=True, root=None).command("stop") == "systemctl --user stop"


def test_a_service_that_does_not_stop_ends_the_uninstall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = FakeSystemctl(tmp_path, monkeypatch)
    systemctl.state.write_text("deactivating")
    manager = Manager(user_mode=True, root=None)
    with pytest.raises(ServiceError, match=r"a\.service is still deactivating"):
        manager.stop(["a.service"])
    with pytest.raises(ServiceError, match="boom"):
        manager.start(["bad.service"])
    assert all(line.startswith("--user ") for line in systemctl.asked)


def test_another_root_never_asks_the_running_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = FakeSystemctl(tmp_path, monkeypatch)
    manager = Manager(user_mode=False, root=tmp_path)
    manager.reload()
    manager.stop(["a.service"])
    assert manager.state("a.service") == ""
    with pytest.raises(ServiceError, match="no service manager"):
        manager.start(["a.service"])
    assert systemctl.asked == []


SECRETS = {"its own": 0o600, "its group's": 0o640}


@pytest.fixture
def sudo() -> int:
    """As root, called by user 1000 with sudo."""
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    return 1000


def test_root_copies_no_build_of_another_user_than_the_caller(machine: Machine, sudo: int) -> None:
    before = machine.files()
    library = machine.build / "build/lib/ollama/cuda_v12/libggml-cuda.so"
    for path in (machine.binary, library):
        os.chown(path, 1001, 1001)
        for env in ({"SUDO_UID": str(sudo)}, {}):
            args = ("install", "--binary", machine.binary)
            said = machine.tiering(*args, code=2, **env)
            assert f"{path} belongs to user 1001, who did not call this" in said
        os.chown(path, 0, 0)
    assert machine.files() == before
    os.chown(library, sudo, sudo)
    machine.tiering("install", "--binary", machine.binary, SUDO_UID=str(sudo))
    assert machine.at(f"{PREFIX}/lib/ollama/cuda_v12/libggml-cuda.so").read_text() == "cuda"


@pytest.mark.parametrize("whose", SECRETS)
@pytest.mark.parametrize("name", ["cuda_v12/libggml-cuda.so", "libggml-base.so.0", "ollama"])
def test_a_link_of_the_caller_to_what_root_alone_may_read_is_not_followed(
    machine: Machine, sudo: int, tmp_path: Path, whose: str, name: str
) -> None:
    before = machine.files()
    secret = tmp_path / "shadow"
    secret.write_text("secret")
    secret.chmod(SECRETS[whose])
    place = machine.binary if name == "ollama" else machine.build / "build/lib/ollama" / name
    place.unlink()
    place.symlink_to(secret)
    secret.chmod(SECRETS[whose] | 0o111 * (name == "ollama"))
    said = machine.tiering("install", "--binary", machine.binary, code=2, SUDO_UID=str(sudo))
    assert f"{secret} is for root alone" in said
    assert machine.files() == before


def test_the_mode_is_that_of_the_file_whose_bytes_were_copied(machine: Machine) -> None:
    """Whoever may swap the file between two looks could have another's mode beside its bytes."""
    library = machine.build / "build/lib/ollama/libggml-base.so.0"
    library.chmod(0o777)
    at = machine.at(f"{PREFIX}/lib/ollama/libggml-base.so.0")
    machine.install()
    assert at.stat().st_mode & 0o7777 == 0o755
    files = list(server_files.go_files(machine.binary, Path(PREFIX)))
    library.chmod(0o644)
    at.unlink()
    Installed(Path(PREFIX), machine.root).install(files, InstallManifest())
    assert at.stat().st_mode & 0o7777 == 0o644


def plan_of(tmp_path: Path) -> InstallPlan:
    name = pwd.getpwuid(os.getuid()).pw_name
    return make_plan(InstallRequest(run_as=name, prefix=tmp_path / "prefix"))


def test_a_package_that_another_user_may_change_is_said_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, environment = tmp_path / "checkout/ollama_tiering", tmp_path / "venv/bin"
    for folder in (package, environment):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch(0o644)
    (environment / "python").symlink_to(sys.executable)
    monkeypatch.setattr("ollama_tiering.__file__", str(package / "__init__.py"))
    monkeypatch.setattr(sys, "prefix", str(environment.parent))
    assert plan_of(tmp_path).changeable == ""
    for shared in (package, package / "__init__.py", environment.parent, package.parent):
        mode = shared.stat().st_mode
        shared.chmod(0o777)
        said = plan_of(tmp_path).changeable
        assert f"may change {shared}, and so choose what the services run" in said, shared
        shared.chmod(mode)
    user = InstallRequest(user_mode=True, prefix=tmp_path / "prefix")
    package.chmod(0o777)
    assert make_plan(user).changeable == "", "it is the user's own service"


def test_the_install_says_it_in_one_line(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_plan

    def plan(request: InstallRequest) -> InstallPlan:
        return replace(made(request), changeable="another user may change /x: move it")

    monkeypatch.setattr("ollama_tiering.systemd.service.make_plan", plan)
    text = machine.install("--dry-run")
    assert "beware       another user may change /x: move it" in text.splitlines()


def test_uninstall_names_only_places_where_blocks_are(machine: Machine) -> None:
    machine.install()
    assert "stored blocks" not in machine.tiering("uninstall")
    machine.install()
    for place in ("/var/lib/ollama-tiering/blocks", "/dev/shm/ollama-tiering-a1b2"):
        machine.at(place).mkdir(parents=True)
    text = machine.tiering("uninstall")
    left = [line.split()[1] for line in text.splitlines() if line.endswith(": stored blocks")]
    assert left == ["/var/lib/ollama-tiering:", "/dev/shm/ollama-tiering-a1b2:"]


def test_uninstall_of_a_users_own_names_the_directory_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("STATE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    own = InstallRequest(user_mode=True)
    assert data_left(own) == []
    blocks, chosen = tmp_path / "DATA/ollama-tiering/blocks", tmp_path / "disk"
    blocks.mkdir(parents=True)
    assert data_left(own) == [blocks]
    chosen.mkdir()
    monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL", str(chosen))
    assert data_left(own) == [chosen, blocks]
