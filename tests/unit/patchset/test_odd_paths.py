"""`tiering patch` and its subcommands with paths that mean something to somebody on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ollama_tiering.patchset import manifest
from tests.odd_paths import NAMES, WRONG, Said, Tiering, nothing_there, run_command
from tests.unit.patchset import fake_installed, fake_stock
from tests.unit.patchset.conftest import FakeTools, snapshot
from tests.unit.patchset.test_release_archive import archive


@pytest.fixture
def tiering(
    patches: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Tiering:
    """Runs the command; exit code, stdout, stderr. It says at most one error, in one line."""
    monkeypatch.setattr(manifest, "default_root", lambda: patches)

    def run(*args: str) -> Said:
        code, out, err = run_command(capfdbinary, *args)
        assert b"\x1b" not in err  # nothing that a terminal obeys
        if code:
            lines = err.splitlines()
            assert [line for line in lines if line.startswith(b"error: ")] == lines[-2:-1], lines
            assert lines[-1].startswith(b"hint: "), lines
        return code, out, err

    return run


@pytest.fixture(params=NAMES)
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of that name, which is the home, too."""
    directory = tmp_path / NAMES[request.param]
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    return directory


def test_everything_lies_there(
    odd: Path,
    tiering: Tiering,
    patches: Path,
    upstream_repo: Path,
    fake_tools: FakeTools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache, the clone that is the source, and the patch set."""
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(odd / "cache"))
    source = shutil.copytree(upstream_repo, odd / "clone")
    own = shutil.copytree(patches, odd / "patches")
    monkeypatch.setattr(manifest, "default_root", lambda: own)
    for words in (
        ["patch", "--tag", "v0.16.1", "--source", str(source), "--cuda", "off"],
        ["patch", "build", "--tag", "v0.16.0", "--source", source.as_uri(), "--cuda", "off"],
    ):
        code, out, err = tiering(*words)
        assert code == 0, err
        binary = Path(os.fsdecode(out.removesuffix(b"\n")))
        assert binary.is_file()
        assert binary.is_relative_to(odd)
    assert tiering("patch", "check", "--all-tags")[0] == 0
    code, out, err = tiering("patch", "apply", "--tag", "v0.16.1", "--cuda", "off")
    assert code == 0, err
    assert Path(os.fsdecode(out.removesuffix(b"\n"))).is_dir()
    rows = json.loads(tiering("patch", "status", "--json")[1])["trees"]
    assert [row["state"] for row in rows] == ["patched", "patched"]
    assert all(row["binary"] for row in rows)
    code, out, _ = tiering("patch", "status")
    assert (code, out.count(b"\n")) == (0, 5)
    assert tiering("patch", "revert", "--tag", "v0.16.1", "--cuda", "off")[0] == 0


def test_a_tree_of_that_name(odd: Path, tiering: Tiering, tree: Path) -> None:
    tree = tree.rename(odd / odd.name)
    before = snapshot(tree)
    where = f"--tree={tree}"
    for words in (["check"], ["apply", "--dry-run"], ["status"], ["revert", "--dry-run"]):
        code, out, err = tiering("patch", *words, where)
        assert code == 0, err
        assert out.count(b"\n") == (2 if words == ["status"] else 1)
    assert snapshot(tree) == before
    assert tiering("patch", "apply", where)[0] == 0
    assert json.loads(tiering("patch", "status", "--json", where)[1])["trees"][0]["state"] == (
        "patched"
    )
    assert tiering("patch", "revert", where)[0] == 0
    assert snapshot(tree) == before


@pytest.mark.parametrize("command", ["check", "apply", "status", "revert"])
def test_a_tree_that_is_none(
    odd: Path, tiering: Tiering, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without what is above it."""
    monkeypatch.chdir(odd)
    for path in (odd / "no", Path(f"./{odd.name}"), odd.parent / "no" / odd.name):
        code, _, err = tiering("patch", command, f"--tree={path}")
        assert code == 2, err
        assert b"no such directory" in err


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_directory(tiering: Tiering, tmp_path: Path, wrong: str) -> None:
    path = nothing_there(tmp_path)[wrong]
    for command in ("check", "apply", "status", "revert"):
        assert tiering("patch", command, f"--tree={path}")[0] == 2
    build = ("patch", "build", "--tag", "v0.16.0", "--cuda", "off")
    assert tiering(*build, f"--source={path}")[0] in (2, 3, 10)
    for command in ("build", "revert"):
        assert tiering("patch", command, f"--ollama={path}")[0] in (2, 10)


def test_a_gpus_library_from_there(
    odd: Path, tiering: Tiering, upstream_repo: Path, fake_tools: FakeTools
) -> None:
    """Out of a folder, and out of an archive."""
    build = ("patch", "--tag", "v0.16.0", "--source", str(upstream_repo), "--cuda")
    place = fake_stock.ollama(odd / "stock")
    packed = archive(odd / "o.tgz", root=place)
    named = archive(odd.parent / f"{odd.name[:250]}.tgz", root=place)
    for one in (place, packed, named):
        code, out, err = tiering(*build, f"stock={one}")
        assert code == 0, err
        folder = Path(os.fsdecode(out.removesuffix(b"\n"))).parent / "build/lib/ollama"
        assert (folder / "cuda_v12/libggml-cuda.so").is_file()


@pytest.mark.parametrize("wrong", WRONG)
def test_no_gpus_library_is_there(
    tiering: Tiering, tmp_path: Path, upstream_repo: Path, fake_tools: FakeTools, wrong: str
) -> None:
    path = nothing_there(tmp_path)[wrong]
    build = ("patch", "--tag", "v0.16.0", "--source", str(upstream_repo))
    assert tiering(*build, "--cuda", f"stock={path}")[0] in (2, 10)


def test_an_installed_ollama_there(
    odd: Path, tiering: Tiering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the source of llama.cpp: a folder, and an archive of that name."""
    place = fake_installed.installed(odd / "installed")
    source = fake_installed.llama_source(odd / "llama.cpp")
    packed = archive(odd.parent / f"{odd.name[:250]}.tgz", root=odd)
    fake_installed.compiler(odd.parent / "compiler")
    fake_installed.only_here(monkeypatch)
    monkeypatch.setenv("CXX", str(odd.parent / "compiler/c++"))
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(odd / "cache"))
    for one in (source, packed):
        code, out, err = tiering("patch", f"--ollama={place}", f"--llama-source={one}")
        assert code == 0, err
        binary = Path(os.fsdecode(out.removesuffix(b"\n")))
        assert binary.is_file()
        assert b"is up to date" in tiering("patch", f"--ollama={place}")[2]
        server = binary.parents[1] / "lib/ollama/llama-server"
        started = subprocess.run([server, "--version"], capture_output=True, check=True)
        assert started.stderr == b"version: 10488 (abc1234)\n"  # and not that it is as stock
        rows = json.loads(tiering("patch", "status", "--json")[1])["installed"]
        assert [row["state"] for row in rows] == ["patched"]
        code, out, _ = tiering("patch", "status")
        assert (code, out.count(b"\n")) == (0, 4)
        code, out, err = tiering("patch", "revert", f"--ollama={place}")
        assert code == 0, err
        assert not binary.exists()
