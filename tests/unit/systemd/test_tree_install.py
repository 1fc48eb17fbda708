"""Install of an Ollama with a tree of links: what is written, what is refused, what status says."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.doctor import check_service
from ollama_tiering.doctor.check import CheckState
from ollama_tiering.errors import ServiceError, UsageError
from ollama_tiering.patchset import binary as go_builds
from ollama_tiering.patchset.llama_server import choose, guard, installation, link_tree
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.llama_server.links import EXACT
from ollama_tiering.systemd import access, choice, plan, server_files, service
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.manifest import Installed, InstallManifest, NewFile
from ollama_tiering.systemd.plan import InstallRequest, make_plan
from ollama_tiering.systemd.units import WANTED
from tests.unit.systemd import fake_tree
from tests.unit.systemd.conftest import Machine
from tests.unit.systemd.test_units import SERVER, SIDECAR, Unit, analyze, exposure, unit

TREE = "/opt/ollama-tiering/tree"
# The only lines in which the units of the two engines differ.
ENGINE = ("ExecStart=", "SyslogIdentifier=", "Environment=", "StartLimit", "Restart=")


@pytest.fixture(autouse=True)
def only_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_UNITS", ())
    monkeypatch.setattr(installation, "_PREFIXES", ())
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(tmp_path / "config.toml"))


@pytest.fixture
def installed(tmp_path: Path) -> InstalledOllama:
    return fake_tree.installed(tmp_path / "installed")


@pytest.fixture
def tree(tmp_path: Path, installed: InstalledOllama) -> LinkTree:
    return fake_tree.patched(tmp_path / "cache", installed)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choose, "built_binaries", lambda: [])
    monkeypatch.setattr(go_builds, "built_binaries", lambda: [])
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.delenv("OLLAMA_TIERING_BINARY", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_tree_in_the_prefix_is_one_library_and_else_what_is_installed(
    machine: Machine, installed: InstalledOllama, tree: LinkTree, tmp_path: Path
) -> None:
    before, was = machine.files(), contents(tmp_path / "installed")
    machine.tiering("install", "--binary", tree.binary)
    lib = machine.at(f"{TREE}/lib/ollama")
    assert (lib / IMPLEMENTATION).read_text() == "our library of v0.32.15-1"
    for copy, source in (("bin/ollama", installed.program), (f"lib/ollama/{guard.COPY}", None)):
        path = machine.at(f"{TREE}/{copy}")
        assert not path.is_symlink()
        assert path.read_bytes() == (source or installed.server).read_bytes()
        assert os.access(path, os.X_OK)
    links = {path.name: path.readlink() for path in lib.iterdir() if path.is_symlink()}
    names = {path.name for path in installed.lib.iterdir()} - {IMPLEMENTATION, "llama-server"}
    assert links == {name: installed.lib / name for name in names}
    written = set(machine.files()) - set(before)
    assert all(name.startswith(("opt", "etc/systemd/system/ollama-tier")) for name in written)
    machine.tiering("uninstall")
    assert machine.files() == before
    assert contents(tmp_path / "installed") == was
    assert tree.binary.is_file()


def test_exact_attention_is_taken_with_it(
    machine: Machine, installed: InstalledOllama, tmp_path: Path
) -> None:
    tree = fake_tree.patched(tmp_path / "cache", installed, "v0.32.15-exact", exact="avx2")
    machine.tiering("install", "--binary", tree.binary)
    copy = machine.at(f"{TREE}/lib/ollama/{EXACT}")
    assert copy.read_text() == "our exact attention"
    assert not copy.is_symlink()
    made = link_tree.read(machine.at(TREE))
    assert made is not None
    assert (made.exact, made.processor) == ("avx2", "avx2 fma")


def test_nothing_of_the_cache_but_our_library_is_taken(
    machine: Machine, tree: LinkTree, tmp_path: Path
) -> None:
    """A link of it could lead to where another user writes, and a program could be any."""
    (tree.lib / "libllama.so").unlink()
    (tree.lib / "libllama.so").symlink_to(tmp_path / "somewhere")
    for name in ("llama-server", guard.COPY):
        (tree.lib / name).write_text("another")
    machine.tiering("install", "--binary", tree.binary)
    text = "\n".join(machine.files().values())
    assert "somewhere" not in text
    assert "another" not in text


def test_the_guard_is_for_the_files_for_which_the_library_was_compiled(
    installed: InstalledOllama, tree: LinkTree
) -> None:
    """Even if an update comes between the look and the copying."""
    (installed.lib / "libllama.so").write_text("updated")
    files = server_files.tree_files(tree, installed, installed.program, Path("/tree"))
    (found,) = [one for one in files if one.path == Path("/tree/lib/ollama/llama-server")]
    assert found.content == guard.text(installed, tree.state, tree.version).encode()
    assert found.mode == 0o755


def test_a_kind_that_failed_the_self_test_is_stock_in_the_service_too(
    installed: InstalledOllama, tree: LinkTree
) -> None:
    failed = replace(tree, refused={"windows": "other bits"})
    files = server_files.tree_files(failed, installed, installed.program, Path("/tree"))
    (found,) = [one for one in files if one.path == Path("/tree/lib/ollama/llama-server")]
    assert b"export OLLAMA_KV_TIER_REFUSED_KINDS=windows\n" in (found.content or b"")


def test_a_dry_run_writes_nothing(machine: Machine, tree: LinkTree) -> None:
    before = machine.files()
    text = machine.tiering("install", "--binary", tree.binary, "--dry-run")
    assert f"would write  {TREE}/lib/ollama/{IMPLEMENTATION}" in text
    assert f"tiered       {tree.program}, v0.32.15" in text
    assert machine.files() == before


def test_what_another_version_does_not_have_is_removed(
    machine: Machine, installed: InstalledOllama, tree: LinkTree, tmp_path: Path
) -> None:
    before = machine.files()
    machine.tiering("install", "--binary", tree.binary)
    (installed.lib / "cuda_v12/libggml-cuda.so").unlink()
    (installed.lib / "cuda_v12").rmdir()
    (installed.lib / "cuda_v13").mkdir()
    newer = fake_tree.patched(tmp_path / "cache", installed, "v0.32.16-1")
    document = machine.document("install", "--binary", newer.binary)
    assert document["changes"]["removed"] == [f"{TREE}/lib/ollama/cuda_v12"]
    assert set(document["changes"]["written"]) == {
        f"{TREE}/lib/ollama/cuda_v13",
        f"{TREE}/lib/ollama/{IMPLEMENTATION}",
        f"{TREE}/lib/ollama/llama-server",
        f"{TREE}/tree.json",
    }
    machine.tiering("uninstall")
    assert machine.files() == before


def test_from_one_engine_to_the_other_and_back(machine: Machine, tree: LinkTree) -> None:
    before = machine.files()
    machine.install()
    machine.tiering("install", "--binary", tree.binary)
    assert not machine.at("/opt/ollama-tiering/bin/ollama").exists()
    assert machine.at(f"{TREE}/bin/ollama").exists()
    machine.install()
    assert not machine.at(f"{TREE}/tree.json").exists()
    assert machine.document("status")["tree"] is None
    machine.tiering("uninstall")
    assert machine.files() == before


def test_what_cannot_be_tiered_now_is_refused(
    machine: Machine, installed: InstalledOllama, tree: LinkTree
) -> None:
    before = machine.files()
    unpatched = machine.tiering("install", "--binary", installed.program, code=2)
    assert "runs llama-server and is not patched" in unpatched
    (installed.lib / "libllama.so").write_text("updated")
    stale = machine.tiering("install", "--binary", tree.binary, code=2)
    assert "was updated or changed since it was patched as v0.32.15" in stale
    assert "hint: run `tiering patch` first" in stale
    installed.program.unlink()
    assert "is not there any more" in machine.tiering("install", "--binary", tree.binary, code=2)
    assert machine.files() == before


def test_status_says_what_the_next_start_does(
    machine: Machine, installed: InstalledOllama, tree: LinkTree
) -> None:
    machine.tiering("install", "--binary", tree.binary)
    assert "next start   tiered\n" in machine.tiering("status")
    assert machine.document("status")["tree"] == {"why_stock": "", "cure": ""}
    (installed.lib / "libllama.so").write_text("updated")
    text = machine.tiering("status")
    assert f"next start   as stock: {installed.program} was updated or changed since" in text
    assert "makes a tree for it" in machine.document("status")["tree"]["cure"]


def test_doctor_says_it_too(
    installed: InstalledOllama, tree: LinkTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_SYSTEM_PREFIX", tmp_path / "none")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/.config"))
    assert list(check_service.checks()) == []
    request = InstallRequest(user_mode=True, binary=tree.binary)
    service.install(request, Manager(user_mode=True, root=tmp_path), dry_run=False, now=False)
    (found,) = check_service.checks()
    assert (found.name, found.state) == (f"service in {request.place}", CheckState.OK)
    (installed.lib / "libllama.so").write_text("updated")
    (found,) = check_service.checks()
    assert found.state is CheckState.WARN
    assert "its next start is as stock" in found.finding
    assert "makes a tree for it" in found.cure
    wants = request.unit_directory / "default.target.wants"
    wants.mkdir()
    (wants / "ollama.service").symlink_to("/nowhere")
    _, rival = check_service.checks()
    assert (rival.name, rival.state) == ("port of ollama-tiered.service", CheckState.WARN)
    assert rival.cure == "systemctl --user disable --now ollama"
    service.uninstall(request, Manager(user_mode=True, root=tmp_path), dry_run=False)
    assert list(check_service.checks()) == []


def lines_of(machine: Machine, name: str) -> list[str]:
    return [line for line in unit(machine, name).lines if not line.startswith(ENGINE)]


def test_the_units_differ_in_what_is_started_alone(machine: Machine, tree: LinkTree) -> None:
    machine.install("--models", "/srv/models")
    go = [lines_of(machine, name) for name in (SIDECAR, SERVER)]
    machine.tiering("install", "--binary", tree.binary, "--models", "/srv/models")
    lines = [lines_of(machine, name) for name in (SIDECAR, SERVER)]
    wanted = [f"Wants={name}" for name in WANTED]
    assert [line for line in lines[1] if line in wanted] == wanted
    assert [lines[0], [line for line in lines[1] if line not in wanted]] == go
    assert set(unit(machine, SERVER).all("Environment")) == {
        '"OLLAMA_HOST=127.0.0.1:11435"',
        '"OLLAMA_MODELS=/srv/models"',
    }


def test_the_server_is_started_again_as_often_as_a_stock_one(
    machine: Machine, tree: LinkTree
) -> None:
    """Else a machine has no Ollama after an update of some minutes."""
    machine.tiering("install", "--binary", tree.binary)
    server = unit(machine, SERVER)
    assert server["Service"]["Restart"] == "always"
    assert server["Service"]["RestartSec"] == "3"
    assert server["Unit"]["StartLimitIntervalSec"] == "0"
    assert "StartLimitBurst" not in server["Unit"]


@pytest.mark.parametrize("prefix", ["/opt/ollama-tiering", "/srv/k v/100%/$HOME"])
def test_systemd_accepts_the_units(systemd_machine: Machine, tree: LinkTree, prefix: str) -> None:
    systemd_machine.write("/bin/sh", "", 0o755)
    systemd_machine.tiering("install", "--binary", tree.binary, "--prefix", prefix)
    done = analyze("verify", f"--root={systemd_machine.root}", SIDECAR, SERVER)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "ollama-tier" in line]
    assert (done.returncode, said) == (0, [])
    assert exposure(systemd_machine, SERVER) < exposure(systemd_machine, "ollama.service")


def test_the_engine_socket_that_the_settings_name(machine: Machine, tree: LinkTree) -> None:
    machine.write("/etc/ollama-tiering/config.toml", '[sidecar]\nengine_socket = "/run/e"\n')
    machine.tiering("install", "--binary", tree.binary)
    assert unit(machine, SERVER)["Service"]["ExecStart"].endswith(" /run/e")
    machine.write("/etc/ollama-tiering/config.toml", f'[sidecar]\nsocket = "/run/{"s" * 98}"\n')
    error = machine.tiering("install", "--binary", tree.binary, code=2)
    assert "sidecar.engine_socket" in error


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def test_the_services_user_may_enter_whatever_the_umask_says(
    machine: Machine, tree: LinkTree
) -> None:
    with umask(0o077):
        machine.tiering("install", "--binary", tree.binary)
    for path in ("/opt", "/opt/ollama-tiering", TREE, f"{TREE}/lib/ollama"):
        assert machine.at(path).stat().st_mode & 0o777 == 0o755
    assert machine.at(f"{TREE}/tree.json").stat().st_mode & 0o777 == 0o644


# --- who may write and read -------------------------------------------------------------------


def own_request(tmp_path: Path, tree: LinkTree) -> InstallRequest:
    """For the system, as this user, on this machine."""
    name = pwd.getpwuid(os.getuid()).pw_name
    return InstallRequest(run_as=name, prefix=tmp_path / "prefix", binary=tree.binary)


def test_an_ollama_that_another_user_may_change_is_refused_for_a_service_of_the_system(
    installed: InstalledOllama, tree: LinkTree, tmp_path: Path
) -> None:
    request = own_request(tmp_path, tree)
    assert make_plan(request).service.tree is not None
    (installed.lib / "cuda_v12").chmod(0o777)
    with pytest.raises(UsageError, match=r"another user than .* may change .*cuda_v12"):
        make_plan(request)
    own = InstallRequest(user_mode=True, prefix=tmp_path / "prefix", binary=tree.binary)
    assert make_plan(own).service.tree is not None


@pytest.mark.parametrize("engine", ["tree", "go"])
def test_a_prefix_that_another_user_may_change_is_refused(
    machine: Machine, tree: LinkTree, tmp_path: Path, engine: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    binary = tree.binary if engine == "tree" else machine.binary
    name = pwd.getpwuid(os.getuid()).pw_name
    request = InstallRequest(run_as=name, prefix=shared / "prefix", binary=binary)
    assert make_plan(request).files
    shared.chmod(0o777)
    with pytest.raises(UsageError, match=f"may change {re.escape(str(shared))}, "):
        make_plan(request)


@pytest.mark.parametrize("what", ["/opt", "/etc/systemd/system"])
def test_whoever_may_not_write_is_told_before_anything_is_written(
    machine: Machine, tree: LinkTree, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    machine.at("/opt").mkdir()
    before, may = machine.files(), os.access
    given = ("install", "--binary", tree.binary)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != machine.at(what) and may(path, mode))
        error = machine.tiering(*given, code=2)
        assert f"this user may not write to {machine.at(what)}" in error
        assert "hint: run it with sudo, or with --user for yourself" in error
        assert machine.files() == before
        machine.tiering(*given, "--dry-run")
    machine.tiering(*given)
    written = machine.files()
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    machine.tiering("uninstall", code=2)
    assert machine.files() == written


def test_an_installed_ollama_that_the_services_user_cannot_reach_is_refused(
    installed: InstalledOllama, tree: LinkTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = own_request(tmp_path, tree)
    for locked in (installed.program, installed.server):
        monkeypatch.setattr(access, "_may", lambda _uid, _groups, path, no=locked: path != no)
        with pytest.raises(UsageError, match=f"may not read {re.escape(str(locked))}") as caught:
            make_plan(request)
        assert "install Ollama where every user may read it" in str(caught.value.hint)


def test_a_program_that_another_user_may_change_is_refused(
    installed: InstalledOllama, tree: LinkTree, tmp_path: Path
) -> None:
    installed.program.chmod(0o775)
    with pytest.raises(UsageError, match=r"may change .*/bin/ollama, "):
        make_plan(own_request(tmp_path, tree))


def test_a_link_to_the_prefix_that_another_user_may_change_is_refused(
    tree: LinkTree, tmp_path: Path
) -> None:
    """The unit names the prefix by the link."""
    (tmp_path / "real").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(tmp_path / "real")
    name = pwd.getpwuid(os.getuid()).pw_name
    request = InstallRequest(run_as=name, prefix=shared / "link/prefix", binary=tree.binary)
    assert make_plan(request).files
    shared.chmod(0o777)
    with pytest.raises(UsageError, match=f"may change {re.escape(str(shared))}, "):
        make_plan(request)


SWAPPED: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda library, secret: library.symlink_to(secret),
    "no regular file": lambda library, _secret: os.mkfifo(library),
}


@pytest.mark.parametrize("what", list(SWAPPED))
def test_root_copies_nothing_that_a_link_in_the_cache_leads_to(
    machine: Machine, tree: LinkTree, tmp_path: Path, what: str
) -> None:
    before = machine.files()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    library = tree.lib / IMPLEMENTATION
    library.unlink()
    SWAPPED[what](library, secret)
    error = machine.tiering("install", "--binary", tree.binary, code=2)
    assert f"{library} is {what}" in error
    assert machine.files() == before


@pytest.mark.parametrize("what", list(SWAPPED))
def test_root_copies_no_link_in_the_place_of_exact_attention(
    machine: Machine, installed: InstalledOllama, tmp_path: Path, what: str
) -> None:
    tree = fake_tree.patched(tmp_path / "cache", installed, "v0.32.15-exact", exact="avx2")
    before = machine.files()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tree.lib / EXACT).unlink()
    SWAPPED[what](tree.lib / EXACT, secret)
    assert f"{tree.lib / EXACT} is {what}" in machine.tiering(
        "install", "--binary", tree.binary, code=2
    )
    assert machine.files() == before


def test_root_copies_nothing_of_another_user_than_the_caller(
    tree: LinkTree, installed: InstalledOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def owners() -> tuple[int, ...]:
        files = server_files.tree_files(tree, installed, installed.program, Path("/tree"))
        (library,) = [file for file in files if file.path.name == IMPLEMENTATION]
        return library.owners

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", "1000")
    assert owners() == (0, 1000)
    monkeypatch.delenv("SUDO_UID")
    assert owners() == (0,)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert owners() == ()
    library = tree.lib / IMPLEMENTATION
    assert NewFile(Path("/x"), source=library, owners=(os.getuid(),)).digest
    with pytest.raises(UsageError, match="who did not call this"):
        _ = NewFile(Path("/x"), source=library, owners=(0xFFFF0000,)).digest


def test_what_is_written_is_what_was_hashed(
    tree: LinkTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    target = Installed(Path("/prefix"), tmp_path / "root")
    file = NewFile(Path("/prefix/library"), source=tree.lib / IMPLEMENTATION)
    real = Installed._write

    def write(self: Installed, new: NewFile, digest: str) -> None:
        (tree.lib / IMPLEMENTATION).write_text("another")
        real(self, new, digest)

    monkeypatch.setattr(Installed, "_write", write)
    with pytest.raises(ServiceError, match="was changed meanwhile"):
        target.install([file], InstallManifest())
    assert not target.at("/prefix/library").exists()


# --- which one, if none is named ----------------------------------------------------------------


def test_what_was_patched_is_found(machine: Machine, own_cache: Path, tree: LinkTree) -> None:
    assert choice.usual_binary() == tree.binary
    machine.tiering("install", OLLAMA_TIERING_CACHE=str(own_cache))
    assert machine.at(f"{TREE}/tree.json").exists()


def test_a_build_of_the_go_engine_where_nothing_else_is_patched(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no patched Ollama is built yet"):
        choice.usual_binary()
    monkeypatch.setattr(go_builds, "built_binaries", lambda: [Path("/built/ollama")])
    assert choice.usual_binary() == Path("/built/ollama")


def test_with_sudo_what_its_caller_patched_is_found(
    own_cache: Path, installed: InstalledOllama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    tree = fake_tree.patched(home / ".cache/ollama-tiering", installed)
    caller = pwd.struct_passwd(("me", "x", 4711, 4711, "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwnam", lambda name: caller if name == "me" else None)
    monkeypatch.setenv("SUDO_USER", "me")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError):
        choice.usual_binary()  # a variable that anybody may set
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UsageError, match="not in the usual places") as caught:
        choice.usual_binary()  # a record that anybody may write
    assert str(caught.value.hint).endswith(f"--binary {tree.binary}")
    monkeypatch.setattr(installation, "_PREFIXES", (tmp_path / "installed",))
    assert choice.usual_binary() == tree.binary
    assert os.environ["OLLAMA_TIERING_CACHE"] == str(own_cache)
    assert choice.usual_binary() == tree.binary
    stale = fake_tree.patched(own_cache, installed)  # root's own
    assert choice.usual_binary() == stale.binary
    (installed.lib / "libllama.so").write_text("updated")
    shutil.rmtree(tree.folder)
    fresh = fake_tree.patched(home / ".cache/ollama-tiering", installed)
    assert choice.usual_binary() == fresh.binary
    (installed.lib / "libllama.so").write_text("updated again")
    assert choice.usual_binary() == stale.binary  # the install says why it cannot be
    record = json.loads((stale.folder / "tree.json").read_text()) | {"program": "/gone/bin/ollama"}
    (stale.folder / "tree.json").write_text(json.dumps(record))
    fresh = fake_tree.patched(home / ".cache/ollama-tiering", installed, "v0.32.16-1")
    assert choice.usual_binary() == fresh.binary


def test_the_unit_of_a_user_is_accepted(
    systemd_machine: Machine, tree: LinkTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    here = Machine(Path("/"), systemd_machine.build)
    here.tiering("install", "--binary", tree.binary, "--user", HOME=str(home))
    server = home / ".config/systemd/user" / SERVER
    assert Unit(server.read_text())["Service"]["ExecStart"].endswith(
        " %t/ollama-tiering/sidecar.sock.engine"
    )
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    done = analyze("--user", "verify", server, home / ".config/systemd/user" / SIDECAR)
    said = [line for line in done.stderr.splitlines() if "ollama-tier" in line]
    assert (done.returncode, said) == (0, [])
    here.tiering("uninstall", "--user", HOME=str(home))
    assert list(home.rglob("*")) == []
