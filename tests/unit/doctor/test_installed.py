"""What the doctor says of an installed Ollama from v0.30 on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ollama_tiering.doctor import check_build
from ollama_tiering.doctor.check import Check, CheckState
from ollama_tiering.patchset import build, elf
from ollama_tiering.patchset.llama_server import (
    built,
    choose,
    exact_processor,
    guard,
    installation,
    link_tree,
)
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from tests.unit.patchset import fake_installed as fake

NEEDS = ("version of Ollama", "C++ compiler")
OF_THE_GO_ENGINE = ("git", "compiler", "make", "go", "cmake", "nvcc", "source cache", "binary")


@pytest.fixture(autouse=True)
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstalledOllama:
    """An installed Ollama on PATH, and all that it takes to make a tree of it."""
    for name in [n for n in os.environ if n.startswith("OLLAMA_")]:
        monkeypatch.delenv(name)
    for kind in ("STATE", "DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    monkeypatch.setattr(installation, "_UNITS", ())
    monkeypatch.setattr(installation, "_PREFIXES", ())
    monkeypatch.setattr(installation, "PROGRAM_MAGIC", b"#!")  # scripts stand for programs here
    monkeypatch.setattr(elf, "read", fake.all_exported)
    monkeypatch.setattr(build, "built_binaries", list)
    place = fake.installed(tmp_path / "installed")
    monkeypatch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", str(fake.compiler(tmp_path / "compiler")))
    return fake.at(place)


def checks() -> dict[str, Check]:
    return {check.name: check for check in check_build.checks()}


def states() -> dict[str, CheckState]:
    return {name: check.state for name, check in checks().items()}


def add_tree(
    found: InstalledOllama, root: Path, *, ours: str, fits: bool = True, **more: str
) -> None:
    folder = built.folder() / "v0.32.15-abc"
    fake.script(folder / "bin/ollama", "")
    state = found.state() if fits else []
    tree = LinkTree(folder, str(found.program), fake.VERSION, fake.PIN, state, ours, **more)  # type: ignore[arg-type]
    (folder / built.RECORD).write_text(link_tree.text_of(tree))


def test_one_that_is_not_patched_needs_a_compiler_and_nothing_of_the_go_engine(
    found: InstalledOllama,
) -> None:
    said = checks()
    assert said["installed Ollama"].state is CheckState.WARN
    assert said["installed Ollama"].cure == "tiering patch"
    assert not set(OF_THE_GO_ENGINE) & set(said)
    assert [said[name].state for name in NEEDS] == [CheckState.OK] * 2
    assert said["version of Ollama"].finding == "v0.32.15, llama.cpp b10488"


def test_what_patch_would_refuse_fails(
    found: InstalledOllama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script(found.program, "#!/bin/sh\necho 'ollama version is 0.40.0'\n")
    fake.script(found.server, "#!/bin/sh\necho 'version: 1 (unknown)'\n")
    fake.compiler(tmp_path / "compiler", gcc=10)
    said = checks()
    assert [said[name].state for name in NEEDS] == [CheckState.FAIL] * 2
    assert "does not say it" in said["version of Ollama"].finding
    assert "g++ 11" in said["C++ compiler"].finding
    assert all(said[name].cure for name in NEEDS)
    monkeypatch.setattr(installation, "PROGRAM_MAGIC", b"\x7fELF")
    assert "a script" in checks()["version of Ollama"].finding


def test_a_version_that_is_not_on_the_list_is_left_to_the_self_test(found: InstalledOllama) -> None:
    """Nobody is asked for the tag of its commit: doctor needs no network."""
    fake.script(found.program, "#!/bin/sh\necho 'ollama version is 0.40.0'\n")
    fake.script(found.server, "#!/bin/sh\necho 'version: 1 (abc1234)'\n")
    version = checks()["version of Ollama"]
    assert version.state is CheckState.OK
    assert version.finding == (
        "v0.40.0, llama.cpp abc1234, not on the list of tested ones: the self-test decides"
    )


def test_a_build_of_the_go_engine_needs_none_of_it(
    found: InstalledOllama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake.script(tmp_path / "go/ollama", "")
    for module in (build, choose):  # both ask
        monkeypatch.setattr(module, "built_binaries", lambda: [program])
    said = states()
    assert "make" in said
    assert said["installed Ollama"] is CheckState.OK
    assert not set(NEEDS) & set(said)


def test_a_tree_of_today_is_well(found: InstalledOllama, tmp_path: Path) -> None:
    add_tree(found, tmp_path, ours=built.digest_of(built.default_sources()))
    (tree,) = built.trees()
    fake.script(tree.lib / "llama-server", guard.text(found, tree.state, tree.version))
    said = checks()
    assert said["installed Ollama"].state is CheckState.OK
    assert "anew" not in said["installed Ollama"].finding
    assert not set(NEEDS) & set(said)


@pytest.mark.parametrize(
    ("known", "state", "said"),
    [
        ({"exact": "avx2", "processor": "fma avx2"}, CheckState.OK, "exact (avx2)"),
        ({"exact": "avx2", "processor": "fma amx"}, CheckState.WARN, "for another processor"),
        ({"not_exact": "it is not tried on arm64"}, CheckState.OK, "stock (it is not tried on"),
        ({}, CheckState.OK, "stock"),
    ],
)
def test_it_says_which_attention_computes(
    found: InstalledOllama,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: dict[str, str],
    state: CheckState,
    said: str,
) -> None:
    monkeypatch.setattr(exact_processor, "flags", lambda: "avx2 fma sse")
    add_tree(found, tmp_path, ours="ours", **known)
    check = checks()["attention on the CPU"]
    assert check.state is state
    assert said in check.finding


def test_a_tree_of_an_older_tiering_is_made_anew_and_serves_meanwhile(
    found: InstalledOllama, tmp_path: Path
) -> None:
    add_tree(found, tmp_path, ours="older")
    fake.compiler(tmp_path / "compiler", gcc=10)
    said = checks()
    assert said["installed Ollama"].state is CheckState.OK
    assert "`tiering up` makes it anew" in said["installed Ollama"].finding
    assert said["C++ compiler"].state is CheckState.WARN  # what there is goes on working


def test_a_tree_for_other_files_is_not_built_any_more(
    found: InstalledOllama, tmp_path: Path
) -> None:
    add_tree(found, tmp_path, ours="older", fits=False)
    fake.compiler(tmp_path / "compiler", gcc=10)
    said = checks()
    assert said["installed Ollama"].state is CheckState.WARN
    assert said["C++ compiler"].state is CheckState.FAIL


def test_one_that_is_gone_or_half_installed(
    found: InstalledOllama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.server.unlink()
    assert states()["installed Ollama"] is CheckState.FAIL
    add_tree(found, tmp_path, ours="older")
    said = checks()["installed Ollama"]
    assert said.state is CheckState.WARN
    assert "is gone or not whole" in said.finding
    assert said.cure.endswith("tiering patch revert --ollama auto")
