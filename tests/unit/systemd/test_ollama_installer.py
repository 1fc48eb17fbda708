"""Ollama's installer beside `install --replace`: with each update it rewrites its unit, its program
and its libraries, leaves drop-ins, and restarts the service. All of theirs is as without us.

The installer has the same bytes in every version from v0.16.3 to v0.32.15, so that of any of them
is that of all.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from ollama_tiering.patchset.upstream import SourceCache
from ollama_tiering.systemd import plan, service
from ollama_tiering.systemd.units import WANTED
from tests.unit.patchset import fake_installed as fake
from tests.unit.systemd import fake_tree
from tests.unit.systemd.ollama_installer import STEPS, OllamaInstaller
from tests.unit.systemd.ollama_service import NAME
from tests.unit.systemd.test_replace_start import SETTINGS, Place

INSTALLER = "scripts/install.sh"
SAME = "8bff7e2f41a3036bcf271dd35600df540ea893b1"  # its object name in v0.24.0 and in v0.32.15
RESTARTED = ["is-system-running", "daemon-reload", "enable ollama", "restart ollama"]


def installer_of_upstream() -> str:
    cache = SourceCache()
    for tag in reversed(cache.tags()):
        if cache.tree(tag, INSTALLER) == SAME:
            return (cache.read(tag, INSTALLER) or b"").decode()
    pytest.skip(f"no version with that installer is in {cache.root}; `tiering fetch` fills it")


class InstalledPlace(Place):
    """What the installer puts below a directory, which stands for /: its unit names the program as
    one sees it from outside, and this user.
    """

    def __init__(self, root: Path, kind: str, script: str) -> None:
        self.machine, scratch = root / "machine", root / "scratch"
        scratch.mkdir()
        self.installer = OllamaInstaller(script, self.machine, scratch)
        super().__init__(root, kind)

    def lay(self) -> None:
        self.stock = self.machine / "usr/local/bin/ollama"
        self.units = self.machine / "etc/systemd/system"
        self.run_installer("first")

    def run_installer(self, version: str) -> list[str]:
        release = self.root / version
        shutil.rmtree(release, ignore_errors=True)
        fake.installed(release)
        fake.script(release / "bin/ollama", fake_tree.PROGRAM + f"# {version}\n")
        (release / f"lib/ollama/{version}.so").write_text("of this version only")
        if self.kind == "go":
            (release / "lib/ollama/llama-server").unlink()
        asked = self.installer.run(release)
        text = (self.units / NAME).read_text()
        assert "ExecStart=/usr/local/bin/ollama serve\nUser=ollama\n" in text
        text = text.replace("=/usr/local/", f"={self.machine}/usr/local/")
        (self.units / NAME).write_text(text.replace("=ollama\n", f"={self.user}\n"))
        return asked

    def theirs(self) -> dict[str, str]:
        """SHA-256, or where it leads to, of all there is but for our own units and drop-in."""
        ours = ("tiering.conf", "ollama-tiering.service", *WANTED, "seen")
        files = [p for p in self.machine.rglob("*") if not p.is_dir() and p.name not in ours]
        return {
            str(path): f"-> {path.readlink()}"
            if path.is_symlink()
            else hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        }


@pytest.fixture(params=["go", "tree"])
def kind(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(params=["steps", pytest.param("upstream", marks=pytest.mark.upstream)])
def place(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> InstalledPlace:
    script = STEPS if request.param == "steps" else installer_of_upstream()
    monkeypatch.setattr(plan, "_SYSTEM_UNITS", tmp_path / "machine/etc/systemd/system")
    monkeypatch.setattr(plan, "_SYSTEM_CONFIG", tmp_path / "config.toml")
    return InstalledPlace(tmp_path, kind, script)


def test_replace_update_and_restore_leave_every_byte_of_theirs(place: InstalledPlace) -> None:
    first = place.theirs()
    place.install()
    drop_in = place.units / f"{NAME}.d/tiering.conf"
    ours = drop_in.read_bytes()
    assert place.theirs() == first
    wanted = place.require_tiered().environment["OLLAMA_HOST"]

    assert place.run_installer("second")[-4:] == RESTARTED
    second = place.theirs()
    assert second != first
    assert str(place.stock.parents[1] / "lib/ollama/first.so") not in second  # it removed the old
    assert drop_in.read_bytes() == ours
    started = place.require_stock("was updated or changed since")  # of the new version
    assert started.environment["OLLAMA_HOST"] == wanted == "0.0.0.0:11500"

    place.patch()
    place.install()
    assert place.theirs() == second
    assert place.require_tiered().environment["OLLAMA_HOST"] == wanted

    assert service.restore(place.request, place.manager, dry_run=False)
    assert place.theirs() == second
    assert not drop_in.exists()
    assert place.service.command() == [str(place.stock), "serve"]
    assert place.service.start().environment["OLLAMA_HOST"] == wanted
    assert (place.units / f"{NAME}.d/override.conf").read_text() == SETTINGS


def test_an_update_after_restore_is_as_without_us(place: InstalledPlace) -> None:
    place.install()
    service.restore(place.request, place.manager, dry_run=False)
    service.uninstall(place.request, place.manager, dry_run=False)
    before = place.theirs()
    place.run_installer("first")
    assert place.theirs() == before
