"""scripts/distros and scripts/arm64, as far as they go without root, mounts and an emulator."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from scripts import arm64, distros

REPO = Path(__file__).parents[2]


def test_a_fresh_system_gets_what_readme_names() -> None:
    assert set(distros.needed()) == {"python3-venv", "git", "gcc", "g++", "make"}
    assert set(distros.packages(distros.CASES["debian12"])) == set(distros.needed())
    clang = distros.packages(distros.CASES["debian13-clang"])
    assert "clang" in clang
    assert not set(distros.COMPILERS) & set(clang)


def test_its_user_types_readmes_commands() -> None:
    shown = re.findall(r"^(\./scripts/tiering [a-z -]+?)(?: +#.*)?$", readme(), re.MULTILINE)
    typed = (REPO / "scripts/distros_inside").read_text()
    needed = {"./scripts/tiering demo --engine reference", "./scripts/tiering up"}
    assert needed <= set(shown)
    for command in needed | {"./scripts/tiering demo", "./scripts/tiering status"}:
        assert re.search(rf"^(OLLAMA_HOST=\S+ )?{re.escape(command)}\b", typed, re.MULTILINE)


def readme() -> str:
    return (REPO / "README.md").read_text()


def test_settings_for_the_network_travel_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "PIP_INDEX_URL", "GOPROXY", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("GOFLAGS", "-v")
    monkeypatch.setenv("OLLAMA_HOST", "x")
    found = distros.network_settings()
    assert {"https_proxy", "PIP_INDEX_URL", "GOPROXY", "SSL_CERT_FILE"} <= found.keys()
    assert not {"GOFLAGS", "OLLAMA_HOST", "PATH", "HOME"} & found.keys()


def test_a_checkout_is_what_git_knows_of(tmp_path: Path) -> None:
    if not (REPO / ".git").exists():
        pytest.skip("no git checkout")
    distros.put_checkout(tmp_path / "copy", -1)
    assert (tmp_path / "copy/README.md").read_bytes() == (REPO / "README.md").read_bytes()
    assert (tmp_path / "copy/scripts/tiering").stat().st_mode & stat.S_IXUSR
    assert not (tmp_path / "copy/.venv").exists()
    assert not (tmp_path / "copy/.git").exists()


def test_what_arm64_needs_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["arm64"])
    assert arm64.main() == 0
    assert capsys.readouterr().out == (
        "SKIPPED arm64: apt-get install gcc-aarch64-linux-gnu g++-aarch64-linux-gnu "
        "qemu-user-static\n"
    )


def test_the_cross_compiler_is_never_asked_for_this_processor() -> None:
    assert all("native" not in value for value in arm64.flags("cortex-a76").values())
