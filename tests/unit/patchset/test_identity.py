"""The name of a build changes with all that may change a bit of K/V, and with nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.errors import BuildError
from ollama_tiering.patchset import build, finished, identity, manifest, stored_rows
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from ollama_tiering.store.tools.listing import build_of
from tests.unit.patchset.conftest import FakeTools

NATIVE = build.BuildOptions(tag="v0.16.0", cpu="native", cuda="off")
LDFLAGS = '\n[go.ldflags]\n"github.com/ollama/ollama/kvtier.buildStamp" = "kvtier-build:{build}"\n'
COMPILER = """#!/bin/sh
case " $* " in *" -dM "*) echo "#define __VERSION__ \\"${FAKE_CC_VERSION:-1}\\""
case "$*" in *march=native*) echo "#define __tune_${FAKE_CPU:-znver4}__ 1";; esac;; esac
"""


@pytest.fixture
def stamped(patches: Path, fake_tools: FakeTools) -> Path:
    with (patches / "upstream.toml").open("a", encoding="utf-8") as file:
        file.write(LDFLAGS)
    for name in ("gcc", "g++"):
        fake_tools.add(name, COMPILER)
    return patches


def _name(patches: Path, cache: SourceCache, options: build.BuildOptions = NATIVE) -> str:
    chosen = build.plan(options)
    return build._build_id(chosen, manifest.load(patches), cache, Path("go"))


def test_the_name_is_linked_into_the_binary_and_kept_beside_it(
    stamped: Path, cache: SourceCache, report: Report, fake_tools: FakeTools
) -> None:
    build.build(NATIVE, manifest.load(stamped), cache, report)
    (binary,) = build.built_binaries()
    name = json.loads((binary.parent / finished.RECORD).read_text())["build"]
    assert len(name) == identity.DIGITS
    assert int(name, 16) >= 0
    (command,) = fake_tools.calls("go build")
    assert f"-X=github.com/ollama/ollama/kvtier.buildStamp=kvtier-build:{name}" in command
    assert identity.known_build_ids() == {name}
    assert name == _name(stamped, cache)


def test_every_build_in_the_cache_is_known(
    stamped: Path, cache: SourceCache, report: Report
) -> None:
    for options in (NATIVE, replace(NATIVE, go_tags=("x",)), replace(NATIVE, cpu="variants")):
        build.build(options, manifest.load(stamped), cache, report)
    assert len(identity.known_build_ids()) == 3


def _record(patches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever has changed them does."""
    found = stored_rows.digest(manifest.load(patches).compiled)
    monkeypatch.setattr(stored_rows, "RECORDED", found)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    "change",
    [
        *("overlay", "hook", "tag", "kind", "go tags", "compiler", "processor", "runner"),
        *("store", "counts", "store, not recorded", "names", "rows stored wrong"),
        *("flags", "flags of CMake", "flags of nvcc", "tests only", "test builds only"),
    ],
)
def test_what_decides_the_code_is_in_the_name(
    stamped: Path, cache: SourceCache, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    _record(stamped, monkeypatch)
    before, options = _name(stamped, cache), NATIVE
    if change == "overlay":
        (stamped / "overlay/kvcache/tier.go").write_text("package kvcache // new\n")
    elif change == "runner":  # cuts prompts into batches, and takes cells
        _write(stamped / "overlay/runner/ollamarunner/kvtier.go", "package ollamarunner\n")
    elif change in ("store", "store, not recorded"):
        _write(stamped / "overlay/kvtier/tiering/queue.go", "package tiering\n")
    elif change == "counts":
        _write(stamped / "overlay/openai/kvtier.go", "package openai\n")
    elif change == "names":
        _write(stamped / "overlay/kvtier/variables.go", "package kvtier\n")
    elif change == "rows stored wrong":
        monkeypatch.setattr(stored_rows, "NUMBER", stored_rows.NUMBER + 1)
    elif change == "hook":
        file = stamped / "hooks/go/cells.patch"
        file.write_text(file.read_text().replace("tierInit", "tierBegin"))
    elif change == "tag":
        options = replace(NATIVE, tag="v0.17.0")
    elif change == "kind":
        options = replace(NATIVE, cpu="variants")
    elif change == "go tags":
        options = replace(NATIVE, go_tags=("x",))
    elif change == "compiler":
        monkeypatch.setenv("FAKE_CC_VERSION", "2")
    elif change == "processor":  # the same flags, another machine
        monkeypatch.setenv("FAKE_CPU", "icelake")
    elif change == "flags":
        monkeypatch.setenv("CGO_CFLAGS", "-O1")
    elif change == "flags of CMake":
        monkeypatch.setenv("CXXFLAGS", "-ffast-math")
    elif change == "flags of nvcc":
        monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    elif change == "tests only":
        (stamped / "overlay/kvcache/tier_test.go").write_text("package kvcache\n")
    else:
        file = stamped / "overlay/kvcache/replay.go"
        file.write_text("//go:build kvtier_replay\n\npackage kvcache\n")
    if change in ("store", "counts"):
        _record(stamped, monkeypatch)
    same = change in ("tests only", "test builds only", "store", "counts")
    assert (_name(stamped, cache, options) == before) == same


def test_a_cache_on_another_processor_is_built_anew(
    stamped: Path,
    cache: SourceCache,
    report: Report,
    fake_tools: FakeTools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a move, or on a home that machines share; and with other flags in Go's own cache."""
    flags = []
    for processor in ("znver4", "znver4", "icelake"):
        monkeypatch.setenv("FAKE_CPU", processor)
        flags.append(build.build(NATIVE, manifest.load(stamped), cache, report).read_text())
    assert flags[0] == flags[1] != flags[2]
    assert len(fake_tools.calls("go build")) == 2


def test_a_build_whose_successor_failed_is_known(
    stamped: Path, cache: SourceCache, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = build.build(NATIVE, manifest.load(stamped), cache, report)
    before = identity.known_build_ids()
    assert len(before) == 1
    binary.write_bytes(b"\x7fELF" + identity.MARK + "".join(before).encode())
    (stamped / "overlay/kvcache/tier.go").write_text("package kvcache // new\n")
    monkeypatch.setenv("FAKE_GO_FAILS", "no")
    with pytest.raises(BuildError):
        build.build(NATIVE, manifest.load(stamped), cache, report)
    assert identity.known_build_ids() == before


def test_another_compiler_makes_ggml_anew(
    stamped: Path,
    cache: SourceCache,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CMake would keep the libraries of the compiler before."""
    options = replace(NATIVE, cpu="variants")
    binary = build.build(options, manifest.load(stamped), cache, report)
    made = finished.source_of(binary) / "build/lib/ollama/libggml-cpu-x.so"
    for version, kept in (("1", True), ("2", False)):
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()
        binary.unlink(missing_ok=True)
        monkeypatch.setenv("FAKE_CC_VERSION", version)
        build.build(options, manifest.load(stamped), cache, report)
        assert made.exists() == kept


def test_a_compiler_that_says_nothing_is_named(
    patchset: Patchset, cache: SourceCache, fake_tools: FakeTools
) -> None:
    fake_tools.add("gcc", "#!/bin/sh\nexit 1\n")
    with pytest.raises(BuildError, match="gcc does not say what it is"):
        build._build_id(build.plan(NATIVE), patchset, cache, Path("go"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"build": 7}', '{"build": ""}', "\xff"])
def test_a_stamp_of_another_kind_names_no_build(
    patchset: Patchset, cache: SourceCache, content: str
) -> None:
    record = finished.root() / "v0.16.0-native/0" / finished.RECORD
    for stamp in (record, build.plan(NATIVE).old_stamp):
        stamp.parent.mkdir(parents=True)
        stamp.write_text(content, encoding="latin-1")
    assert not finished.is_whole(record.parent)
    assert identity.known_build_ids() == frozenset()


def test_the_build_is_read_from_the_name_of_the_engine() -> None:
    assert build_of("ollama-go/0.16.3+0123456789abcdef") == "0123456789abcdef"
    assert build_of("ollama-go/0.16.3") == ""
