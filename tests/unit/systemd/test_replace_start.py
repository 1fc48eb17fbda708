"""What `ollama.service` starts with our drop-in, run as systemd would run it: the patched server,
or the installed Ollama as stock with one line that says why; and it always starts one of them.
"""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

import pytest

from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.systemd import plan, replaced, service, stock
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.plan import InstallRequest
from tests.unit.patchset import fake_installed as fake
from tests.unit.systemd import fake_tree
from tests.unit.systemd.ollama_service import NAME, OllamaService, Start

SETTINGS = """[Service]
Environment="OLLAMA_HOST=0.0.0.0:11500" OLLAMA_KEEP_ALIVE=1h
Environment="OLLAMA_MODELS=/srv/mo dels"
"""


class Place:
    """A service of this user on this machine, in a folder; `kind` is `go` or `tree`."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.prefix, self.units = root / "pre fix", root / "units"
        self.stock = root / "installed/bin/ollama"
        self.lay()
        self.ours = self.prefix / ("tree/bin/ollama" if kind == "tree" else "bin/ollama")
        self.patch()
        self.write(f"{NAME}.d/override.conf", SETTINGS)

    def lay(self) -> None:
        """The stock Ollama and its unit."""
        fake_tree.installed(self.stock.parents[1])
        if self.kind == "go":
            (self.stock.parents[1] / "lib/ollama/llama-server").unlink()
        self.write(NAME, self.unit())

    def patch(self) -> None:
        """As `tiering patch` leaves it."""
        if self.kind == "tree":
            cache, found = self.root / "cache", fake.at(self.stock.parents[1])
            shutil.rmtree(cache, ignore_errors=True)
            self.binary = fake_tree.patched(cache, found, listed=True).binary
        else:
            self.binary = self.root / "src/ollama"
            self.binary.parent.mkdir(exist_ok=True)
            fake.script(self.binary, fake_tree.PROGRAM + "# patched\n")

    def unit(self) -> str:
        return (
            f"[Unit]\nDescription=Ollama Service\n\n[Service]\nExecStart={self.stock} serve\n"
            f'User={self.user}\nRestart=always\nRestartSec=3\nEnvironment="PATH=/usr/bin:/bin"\n'
        )

    def write(self, name: str, text: str) -> Path:
        path = self.units / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    @property
    def request(self) -> InstallRequest:
        return InstallRequest(prefix=self.prefix, binary=self.binary, replaces=True)

    @property
    def manager(self) -> Manager:
        return Manager(user_mode=False, root=self.root)  # none that runs

    def install(self) -> None:
        service.install(self.request, self.manager, dry_run=False, now=False)

    @property
    def service(self) -> OllamaService:
        return OllamaService(self.units)

    def update(self) -> None:
        if self.kind == "tree":
            (self.stock.parents[1] / "lib/ollama/libllama.so").write_text("updated")
        else:
            with self.stock.open("a") as program:
                program.write("# newer\n")

    def require_tiered(self) -> Start:
        started = self.service.start()
        assert started.program == self.ours, started.said
        assert started.same_process  # signals of systemd reach it
        assert started.said == ""
        assert self.why_stock() == ""
        return started

    def require_stock(self, why: str, **more: str) -> Start:
        started = self.service.start(**more)
        assert started.program == self.stock
        assert started.same_process
        assert ENV_ENGINE_SOCKET not in started.environment
        (line,) = started.said.splitlines()
        assert line.startswith("tiering: Ollama starts as stock: "), line
        assert why in line, line
        return started

    def why_stock(self) -> str:
        found = replaced.found(self.request)
        assert found is not None
        return found["why_stock"]


@pytest.fixture(params=["go", "tree"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(plan, "_SYSTEM_UNITS", tmp_path / "units")
    monkeypatch.setattr(plan, "_SYSTEM_CONFIG", tmp_path / "config.toml")
    monkeypatch.setattr(plan, "_SYSTEM_CACHE", tmp_path / "var")
    made = Place(tmp_path, request.param)
    made.install()
    return made


def test_ours_is_started_with_every_setting_of_theirs(place: Place) -> None:
    started = place.require_tiered()
    wanted = {
        "OLLAMA_HOST": "0.0.0.0:11500",
        "OLLAMA_KEEP_ALIVE": "1h",
        "OLLAMA_MODELS": "/srv/mo dels",
        "PATH": "/usr/bin:/bin",
    }
    assert {name: started.environment[name] for name in wanted} == wanted
    socket = "/run/ollama-tiering/sidecar.sock"
    if place.kind == "tree":
        assert started.environment[ENV_ENGINE_SOCKET] == f"{socket}.engine"
    else:
        assert started.environment["OLLAMA_KV_TIER_SOCKET"] == socket
        assert started.environment["OLLAMA_KV_TIERING"] == "1"
        assert started.environment["OLLAMA_CPU_ATTENTION"] == "exact"
    assert "OLLAMA_NOPRUNE" not in started.environment  # it is alone with its models
    for key, value in (("User", place.user), ("Restart", "always"), ("RestartSec", "3")):
        assert place.service.values(key) == [value]


def test_a_setting_that_comes_later_counts_at_the_next_start(place: Place) -> None:
    place.write(f"{NAME}.d/port.conf", '[Service]\nEnvironment="OLLAMA_HOST=127.0.0.1:1"\n')
    assert place.require_tiered().environment["OLLAMA_HOST"] == "127.0.0.1:1"


def test_an_updated_ollama_is_started_as_stock_until_it_is_patched(place: Place) -> None:
    """Not an older one, and not none."""
    place.update()
    place.require_stock("was updated or changed since")
    assert "was updated or changed since" in place.why_stock()
    place.patch()
    place.install()
    place.require_tiered()


def test_an_update_with_another_program_of_the_same_name_is_seen(place: Place) -> None:
    """As tar lays it: a new file, with an old time."""
    old = place.stock.stat()
    new = place.stock.with_name("new")
    fake.script(new, fake_tree.PROGRAM + "# new\n")
    os.utime(new, ns=(old.st_atime_ns, old.st_mtime_ns))
    new.replace(place.stock)
    place.require_stock("was updated or changed since")


@pytest.mark.parametrize("how", ["gone", "not executable"])
def test_stock_is_started_where_our_part_is_gone(place: Place, how: str) -> None:
    if how == "gone":
        shutil.rmtree(place.prefix)
    else:
        place.ours.chmod(0o644)
    if how == "gone" or place.kind == "go" or os.geteuid():
        place.require_stock("")
    else:
        place.require_stock("cannot be executed")


def test_an_ollama_that_an_update_put_elsewhere_is_found(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its installer takes the first of three folders that is on the PATH."""
    elsewhere = place.root / "elsewhere/ollama"
    elsewhere.parent.mkdir()
    monkeypatch.setattr("ollama_tiering.systemd.units.PROGRAMS", (str(elsewhere), *stock.PROGRAMS))
    place.install()
    place.stock.rename(elsewhere)
    started = place.service.start()
    assert started.program == elsewhere
    assert "starts as stock" in started.said


@pytest.mark.parametrize("place", ["go"], indirect=True)
def test_a_choice_of_theirs_about_our_part_counts(place: Place) -> None:
    chosen = "OLLAMA_CPU_ATTENTION=stock OLLAMA_KV_TIERING=0 OLLAMA_KV_TIER_SOCKET=/elsewhere"
    place.write(f"{NAME}.d/override.conf", f"[Service]\nEnvironment={chosen}\n")
    place.install()
    environment = place.require_tiered().environment
    assert environment["OLLAMA_CPU_ATTENTION"] == "stock"
    assert environment["OLLAMA_KV_TIERING"] == "0"
    assert environment["OLLAMA_KV_TIER_SOCKET"] == "/run/ollama-tiering/sidecar.sock"


def test_the_servers_runners_are_not_killed_before_they_have_stored(place: Place) -> None:
    assert place.service.values("KillMode") == ["mixed"]
    place.write(f"{NAME}.d/override.conf", "[Service]\nKillMode=process\nSyslogIdentifier=mine\n")
    place.install()
    assert place.service.values("KillMode") == ["process"]  # theirs
    assert place.service.values("SyslogIdentifier") == ["mine"]


def test_status_sees_what_a_person_did_since(place: Place) -> None:
    place.write(f"{NAME}.d/user.conf", "[Service]\nUser=somebody\n")
    assert f"runs as somebody now, and the sidecar as {place.user}" in place.why_stock()
    place.write(f"{NAME}.d/user.conf", "[Service]\nExecStart=\nExecStart=/bin/other serve\n")
    assert "user.conf sets ExecStart=, and is read after" in place.why_stock()
    (place.units / f"{NAME}.d/user.conf").unlink()
    place.write(NAME, place.unit().replace(str(place.stock), "/elsewhere/ollama"))
    assert "ollama.service starts /elsewhere/ollama now" in place.why_stock()
    (place.units / NAME).unlink()
    assert "there is no ollama.service" in place.why_stock()
    place.write(NAME, place.unit())
    place.require_tiered()
    with (place.units / f"{NAME}.d/tiering.conf").open("a") as drop_in:
        drop_in.write("# mine\n")
    assert "tiering.conf is changed" in place.why_stock()
