"""What a build says: packages counted, time and disk before. And headers compiled once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.patchset import build, estimate, headers, report
from ollama_tiering.patchset.go_env import go_environment
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.progress import PackageCount, is_package, package_total
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import FakeTools, Make

NATIVE = build.BuildOptions(tag="v0.16.0", cpu="native", cuda="off")

LOOKED_UP = estimate.is_first  # as it is, before fake tools replace it


def test_packages_are_counted_and_other_lines_are_not() -> None:
    said: list[str] = []
    count = PackageCount(3, said.append)
    count("internal/goarch")
    count("# github.com/x/y")
    count("github.com/ollama/ollama/ml/nn")
    count("./x.go:3:1: undefined: y")
    count("go: downloading golang.org/x/sys v0.37.0")
    assert said == [
        "1 of ~3 packages, internal/goarch",
        "2 of ~3 packages, ml/nn",
        "downloading golang.org/x/sys v0.37.0",
    ]


def test_without_a_total_the_count_stands_alone() -> None:
    said: list[str] = []
    PackageCount(0, said.append)("fmt")
    assert said == ["1 packages, fmt"]


@pytest.mark.parametrize("line", ["fmt", "crypto/internal/fips140/v1.0", "gonum.org/v1/x~y/z-a"])
def test_import_paths_are_packages(line: str) -> None:
    assert is_package(line)


@pytest.mark.parametrize("line", ["", "# fmt", "two words", "/abs/path", "x.go:3: no", "a//b"])
def test_other_lines_are_none(line: str) -> None:
    assert not is_package(line)


@pytest.mark.go
def test_go_itself_names_all_packages(tmp_path: Path) -> None:
    real = next((d for d in os.environ["PATH"].split(":") if Path(d, "go").exists()), None)
    if real is None:
        pytest.skip("no Go on PATH")
    (tmp_path / "go.mod").write_text("module example.org/x\n\ngo 1.21\n")
    (tmp_path / "main.go").write_text(
        'package main\n\nimport "fmt"\n\nfunc main() { fmt.Println() }\n'
    )
    environment = go_environment() | {"GOFLAGS": ""}
    go = Path(real, "go")
    listed = subprocess.run(
        [go, "list", "-deps", "."], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    total = package_total(go, tmp_path, (), environment)
    assert total == len(listed.stdout.split()) > 20
    (tmp_path / "go.mod").write_text("nonsense\n")
    assert package_total(go, tmp_path, (), environment) == 0


def test_a_build_says_time_and_disk_first_and_only_when_the_cache_is_empty(
    patchset: Patchset,
    cache: SourceCache,
    fake_tools: FakeTools,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimate, "usable_cores", lambda: 2)
    monkeypatch.setattr(estimate, "is_first", LOOKED_UP)
    build.build(NATIVE, patchset, cache, Report())
    said = capsys.readouterr().err.splitlines()
    expected = f"about {round(estimate.NATIVE_CPU_SECONDS / 120)} min on 2 cores, 1 GB below"
    (at,) = [n for n, line in enumerate(said) if expected in line]
    assert any(line.startswith("compiling Ollama") for line in said[at:])
    assert not any(line.startswith("compiling") for line in said[:at])
    built = Path(go_environment()["GOCACHE"], "00")
    built.mkdir(parents=True)
    for number in range(100):
        (built / f"{number}-d").write_text("")
    build.build(replace(NATIVE, go_tags=("x",)), patchset, cache, Report())
    assert "cores" not in capsys.readouterr().err


@pytest.mark.parametrize(("jobs", "minutes"), [(1, 4), (2, 2), (64, 2)])
def test_more_jobs_than_cores_do_not_help(
    monkeypatch: pytest.MonkeyPatch, jobs: int, minutes: int
) -> None:
    monkeypatch.setattr(estimate, "usable_cores", lambda: 2)
    monkeypatch.setattr(estimate, "NATIVE_CPU_SECONDS", 240)
    assert f"about {minutes} min" in estimate.first_build("v1", True, jobs, Path("/x"))


def test_little_space_is_a_warning_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setattr(estimate, "needed_bytes", lambda native: 1 << 60)
    make(NATIVE)
    assert re.search(
        r"warning: only .* free at .*; a first build takes about", capsys.readouterr().err
    )


# --- headers --------------------------------------------------------------------------------------


@pytest.fixture
def go_that_says(tmp_path: Path) -> Path:
    """A `go` that knows its C++ compiler and nothing else."""
    go = tmp_path / "go-env"
    go.write_text('#!/bin/sh\necho "$CXX"\necho "-fPIC -pthread -Wl,--x -fmessage-length=0"\n')
    go.chmod(0o755)
    return go


def test_a_compiled_header_is_used_and_goes_with_the_build(
    tmp_path: Path, go_that_says: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = next((d for d in os.environ["PATH"].split(":") if Path(d, "g++").exists()), None)
    if compiler is None:
        pytest.skip("no g++ on PATH")
    monkeypatch.setenv("CXX", f"{compiler}/g++")
    source = tmp_path / "x.cpp"
    source.write_text("int main() { std::vector<int> v{1}; return v.front(); }\n")
    folder = tmp_path / "a build"
    with headers.precompiled(go_that_says, "-O1", folder, {}) as flags:
        assert (folder / "headers/std.h.gch").is_file()
        command = [f"{compiler}/g++", "-fPIC", "-pthread", headers.STANDARD, *shlex.split(flags)]
        command += ["-H", "-Winvalid-pch", "-Werror", "-c", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        # with -H the compiler marks a compiled header that it used
        assert f"! {folder}/headers/std.h.gch" in done.stderr
    assert not (folder / "headers").exists()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiled_header_the_flags_stay(
    tmp_path: Path, go_that_says: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with headers.precompiled(go_that_says, "-O1", tmp_path, {}) as flags:
        assert flags == "-O1"
    assert not (tmp_path / "headers").exists()


# --- the report -----------------------------------------------------------------------------------


def test_without_a_terminal_a_silent_stage_still_says_that_it_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SECONDS_BETWEEN_LINES", 0.05)
    with Report().stage("compiling") as detail:
        detail("3 of ~4 packages")
        deadline = time.monotonic() + 10
        said = ""
        while "3 of ~4" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().err
    assert re.search(r"^compiling: 3 of ~4 packages, \d+ s so far$", said, re.MULTILINE)
    assert "done in" in capsys.readouterr().err


def test_quiet_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SECONDS_BETWEEN_LINES", 0.01)
    with Report(quiet=True).stage("compiling") as detail:
        detail("x")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_this_processor_only_is_the_default() -> None:
    assert config.PatchConfig().cpu == build.BuildOptions().cpu == "native"
