"""The ExecStart line of the server's unit for a tree of links, run as systemd would run it: it
starts the tree, or the installed Ollama as stock and says why; and it always starts one of them.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ollama_tiering.config.environment import ENV_ENGINE_SOCKET, ENV_LLAMA_CACHE
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.ollama import llama_server_environment
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, InstalledOllama
from ollama_tiering.systemd import plan, service, tree_start
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.manifest import MANIFEST_NAME
from ollama_tiering.systemd.plan import InstallRequest
from ollama_tiering.systemd.trust import foreign
from ollama_tiering.systemd.units import SERVER_UNIT
from tests.unit.systemd import fake_tree
from tests.unit.systemd.test_units import Unit

ADDRESS = Address(port=11499)


@dataclass
class Started:
    program: Path
    same_process: bool
    environment: dict[str, str]
    said: str


class World:
    """A service installed on this machine, in a folder; `shared` as the system's, else a user's."""

    def __init__(self, root: Path, *, shared: bool) -> None:
        self.root = root
        self.shared = shared
        self.installed: InstalledOllama = fake_tree.installed(root / "installed")
        self.tree = fake_tree.patched(root / "cache", self.installed, listed=True)
        self.place = root / "pre fix"
        self.python = ""
        self.package = ""

    @property
    def made_after(self) -> Path:
        """The cache of what is made after an update."""
        user = f"-{os.getuid()}" if self.shared else ""
        return self.root / f"var/ollama-tiering{user}"

    def install(self) -> None:
        request = InstallRequest(
            user_mode=not self.shared,
            prefix=self.place,
            run_as=pwd.getpwuid(os.getuid()).pw_name if self.shared else None,
            binary=self.tree.binary,
            address=ADDRESS,
        )
        service.install(request, Manager(user_mode=True, root=self.root), dry_run=False, now=False)
        self.unit_directory = request.unit_directory
        self.unit = Unit((self.unit_directory / SERVER_UNIT).read_text())

    def command(self) -> list[str]:
        (line,) = self.unit.all("ExecStart")
        words = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(line)]
        words = [word.replace("%t", str(self.root / "run"), 1) for word in words]
        words = [word.replace("%C", str(self.root / "var"), 1) for word in words]
        words[4] = self.python or words[4]
        words[5] = self.package or words[5]
        return words

    def start(self, change: Callable[[str], str] = str, **more: str) -> Started:
        seen = self.root / "seen"
        seen.unlink(missing_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(self.root), fake_tree.SEEN: str(seen)}
        for setting in self.unit.all("Environment"):
            name, _, value = shlex.split(setting)[0].partition("=")
            env[name] = value
        process = subprocess.Popen(
            [change(word) for word in self.command()],
            env=env | more,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        _, said = process.communicate(timeout=90)
        assert process.returncode == 0, said
        program, pid, *rest = seen.read_text().splitlines()
        variables = dict(line.partition("=")[::2] for line in rest)
        return Started(Path(program), int(pid) == process.pid, variables, said)

    def require_stock(self, why: str, **more: str) -> Started:
        """The line in the journal says why, and what to do."""
        started = self.start(**more)
        assert started.program == self.installed.program
        assert started.same_process
        assert ENV_ENGINE_SOCKET not in started.environment
        (line,) = started.said.splitlines()
        assert line.startswith("tiering: Ollama starts as stock: ")
        assert why in line, line
        return started

    def require_tiered(self) -> Started:
        started = self.start()
        assert started.program == self.place / "tree/bin/ollama", started.said
        assert started.same_process  # signals of systemd reach it
        assert started.said == ""
        return started


@pytest.fixture(params=["shared", "own"])
def mode(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def world(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(plan, "_SYSTEM_UNITS", tmp_path / "units")
    monkeypatch.setattr(plan, "_SYSTEM_CONFIG", tmp_path / "config.toml")
    monkeypatch.setattr(plan, "_SYSTEM_CACHE", tmp_path / "var")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "var"))
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(ENV_LLAMA_CACHE, raising=False)
    made = World(tmp_path, shared=mode == "shared")
    made.install()
    return made


def test_the_tree_is_started_with_the_variables_of_tiering_up(world: World) -> None:
    started = world.require_tiered()
    socket = Path(started.environment[ENV_ENGINE_SOCKET])
    run = Path("/run") if world.shared else world.root / "run"
    assert socket == run / "ollama-tiering/sidecar.sock.engine"
    wanted = llama_server_environment(ADDRESS, socket, cpu_attention="exact")
    names = {*wanted, "OLLAMA_KV_TIERING", "OLLAMA_KV_TIER_SOCKET", "PYTHONPATH"}
    assert {n: v for n, v in started.environment.items() if n in names} == wanted


def test_a_server_beside_it_that_has_the_same_models_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock has none of our variables, and a person's own setting counts."""
    assert "OLLAMA_NOPRUNE" not in world.require_tiered().environment
    monkeypatch.setattr(plan, "_shares_models", lambda *_: True)
    world.install()
    assert world.require_tiered().environment["OLLAMA_NOPRUNE"] == "1"
    assert world.start(OLLAMA_NOPRUNE="0").environment["OLLAMA_NOPRUNE"] == "0"
    (world.installed.lib / "libllama.so").write_text("updated")
    assert "OLLAMA_NOPRUNE" not in world.require_stock("was updated").environment


def test_where_the_installed_one_is_not_used_the_cache_is_not_needed(world: World) -> None:
    shutil.rmtree(world.tree.folder)
    world.require_tiered()


def test_attention_that_the_user_chose_stays(world: World) -> None:
    assert world.require_tiered().environment["OLLAMA_CPU_ATTENTION"] == "exact"
    started = world.start(OLLAMA_CPU_ATTENTION="stock")
    assert started.environment["OLLAMA_CPU_ATTENTION"] == "stock"


def test_a_cache_of_prompts_that_the_user_wants_stays(world: World) -> None:
    started = world.start(**{ENV_LLAMA_CACHE: "512"})
    assert started.program == world.place / "tree/bin/ollama"
    assert started.environment[ENV_LLAMA_CACHE] == "512"
    (world.installed.lib / "libllama.so").write_text("updated")
    stock = world.require_stock("was updated", **{ENV_LLAMA_CACHE: "512"})
    assert stock.environment[ENV_LLAMA_CACHE] == "512"


def test_an_ollama_that_was_updated_is_started_as_stock(world: World) -> None:
    (world.installed.lib / "cuda_v12/libggml-cuda.so").write_text("updated")
    started = world.require_stock("was updated or changed since it was patched as v0.32.15")
    assert "ollama-tiering-patch.service makes a tree for it" in started.said
    assert ENV_LLAMA_CACHE not in started.environment  # stock's own cache is as in stock
    assert started.environment["OLLAMA_HOST"] == str(ADDRESS)
    world.tree = fake_tree.patched(world.root / "cache", world.installed, "v0.32.16-1")
    world.install()
    world.require_tiered()


def test_without_the_prefix_the_installed_one_starts(world: World) -> None:
    shutil.rmtree(world.place)
    world.require_stock("there is no whole tree in")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no record": lambda place: (place / "tree/tree.json").unlink(),
    "damaged record": lambda place: (place / "tree/tree.json").write_text("{"),
    "a record that cannot be read": lambda place: _folder(place / "tree/tree.json"),
    "no program": lambda place: (place / "tree/bin/ollama").unlink(),
    "no library": lambda place: (place / "tree/lib/ollama" / IMPLEMENTATION).unlink(),
    "another library": lambda p: (p / "tree/lib/ollama" / IMPLEMENTATION).write_text("other"),
    "another program": lambda p: (p / "tree/bin/ollama").write_text(fake_tree.PROGRAM + "#"),
    "a program without the right": lambda place: (place / "tree/bin/ollama").chmod(0o644),
    "no llama-server": lambda place: (place / "tree/lib/ollama/llama-server").unlink(),
    "a link less": lambda place: (place / "tree/lib/ollama/libllama.so").unlink(),
    "a file for a link": lambda place: _replace(place / "tree/lib/ollama/libllama.so"),
    "no manifest": lambda place: (place / MANIFEST_NAME).unlink(),
    "damaged manifest": lambda place: (place / MANIFEST_NAME).write_text("["),
    "a manifest that cannot be read": lambda place: _folder(place / MANIFEST_NAME),
    "an empty manifest": lambda place: (place / MANIFEST_NAME).write_text("{}"),
}


def _folder(path: Path) -> None:
    """Reading it fails for everybody, root too."""
    path.unlink()
    path.mkdir()


def _replace(link: Path) -> None:
    link.unlink()
    link.write_text("mine")


@pytest.mark.parametrize("damage", list(DAMAGE))
@pytest.mark.parametrize("mode", ["shared"], indirect=True)
def test_a_tree_that_is_not_as_it_was_installed_is_not_started(world: World, damage: str) -> None:
    DAMAGE[damage](world.place)
    world.require_stock("")


@pytest.mark.parametrize("mode", ["own"], indirect=True)
def test_a_tree_that_cannot_be_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        (world.place / "tree/lib/ollama" / IMPLEMENTATION).chmod(0)
        world.require_stock("cannot be checked: PermissionError")

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tree_start, "startable", fail)
    assert tree_start.main([str(world.place), tree_start.OWN]) == tree_start.SAID_WHY


def test_the_installed_one_is_gone_and_another_is_there_by_that_name(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some installers put each version into a folder of its own, and change a link."""
    name = tmp_path / "bin/ollama"
    name.parent.mkdir()
    name.symlink_to(world.installed.program)
    monkeypatch.setattr(plan.installation, "_PREFIXES", (tmp_path,))
    monkeypatch.setattr(plan.installation, "_UNITS", ())
    world.install()
    world.require_tiered()
    newer = fake_tree.installed(tmp_path / "newer")
    name.unlink()
    name.symlink_to(newer.program)
    shutil.rmtree(world.root / "installed")
    started = world.start()
    assert started.program == name
    assert "was updated or changed since" in started.said


@pytest.mark.parametrize("mode", ["own"], indirect=True)
def test_ollama_starts_where_python_does_not(world: World) -> None:
    world.python = "/no/python"
    assert "could not be checked" in world.start().said
    assert world.start().program == world.installed.program
    world.python, world.package = "", str(world.root / "package")
    package = world.root / "package/ollama_tiering"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("half a line of an upgrade (")
    started = world.start()
    assert started.program == world.installed.program
    assert "could not be checked; run `tiering doctor`" in started.said.splitlines()[-1]
    assert ENV_ENGINE_SOCKET not in started.environment


@pytest.mark.parametrize("mode", ["own"], indirect=True)
def test_ollama_starts_where_the_check_hangs(world: World) -> None:
    hanging = world.root / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    world.python = str(hanging)
    started = world.start(lambda word: word.replace("-k 5 60 ", "-k 5 0.5 "))
    assert started.program == world.installed.program
    assert "could not be checked" in started.said


@pytest.mark.parametrize("what", ["tree/lib/ollama", "tree/lib/ollama/llama-server"])
def test_what_another_user_may_change_is_not_started_in_a_shared_service(
    world: World, what: str
) -> None:
    (world.place / what).chmod(0o775)
    if world.shared:
        world.require_stock(f"another user than the service's may change {world.place / what}")
    else:
        world.require_tiered()  # whoever shares a group with oneself


def test_an_installed_library_that_another_user_may_change(world: World) -> None:
    (world.installed.lib / "cuda_v12").chmod(0o777)
    if world.shared:
        world.require_stock(f"may change {world.installed.lib / 'cuda_v12'}")
    else:
        world.require_tiered()


def test_an_installed_program_that_another_user_may_change(world: World) -> None:
    world.installed.program.chmod(0o777)
    if world.shared:
        world.require_stock(f"may change {world.installed.program}")
    else:
        world.require_tiered()


def test_every_link_on_the_way_counts(tmp_path: Path) -> None:
    own = (0, os.getuid())
    (tmp_path / "real/lib").mkdir(parents=True)
    (tmp_path / "open").mkdir()
    (tmp_path / "open/link").symlink_to("../real")
    (tmp_path / "first").symlink_to(tmp_path / "open/link")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/inner").symlink_to(tmp_path / "first/lib")
    for path in (tmp_path / "first/lib", tmp_path / "own", tmp_path / "open/../real/lib"):
        assert foreign(path, own) is None
    (tmp_path / "open").chmod(0o777)
    for path in (tmp_path / "first/lib", tmp_path / "own"):
        assert foreign(path, own) == tmp_path / "open"
    with pytest.raises((OSError, RuntimeError)):
        foreign(tmp_path / "loop", own)


def test_whose_a_folder_is(tmp_path: Path) -> None:
    own = (0, os.getuid())
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    (folder / "file").write_text("")
    assert foreign(folder, own) is None
    assert foreign(tmp_path / "not/there", own) is None
    assert foreign(folder, (0xFFFF0000,)) == Path("/")  # nobody here has that number
    folder.parent.chmod(0o777)
    assert foreign(folder, own) == folder.parent
    folder.parent.chmod(0o1777)
    assert foreign(folder, own) is None  # as /tmp
    folder.parent.chmod(0o775)
    assert foreign(folder, own) is None  # as /usr/local on some systems
    (folder / "file").chmod(0o664)
    assert foreign(folder, own) == folder / "file"


def test_where_a_link_leads_counts(tmp_path: Path) -> None:
    own = (0, os.getuid())
    (tmp_path / "lib").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "library").write_text("")
    (tmp_path / "lib/folder").symlink_to(elsewhere)
    (tmp_path / "lib/loop").symlink_to(tmp_path / "lib")
    (tmp_path / "lib/nowhere").symlink_to(tmp_path / "nowhere")
    assert foreign(tmp_path / "lib", own) is None
    (elsewhere / "library").chmod(0o666)
    assert foreign(tmp_path / "lib", own) == elsewhere / "library"
