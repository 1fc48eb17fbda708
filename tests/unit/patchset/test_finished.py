"""A finished build is never touched by another one: not by other flags, another patch set, or one
that is interrupted; and what is gone of it is said.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.errors import BuildError
from ollama_tiering.launch import build_watch, running_up
from ollama_tiering.launch.build_watch import BuildWatch
from ollama_tiering.launch.running_up import RunningUp
from ollama_tiering.patchset import build, finished, manifest
from ollama_tiering.patchset.llama_server import tree_use
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import FakeTools, Make, snapshot

NATIVE = build.BuildOptions(tag="v0.16.0", cpu="native", cuda="off")
VARIANTS = replace(NATIVE, cpu="variants")
REPOSITORY = Path(__file__).parents[3]
# CMake as it behaves: it writes into the files that it finds, as some linkers do.
CMAKE = """[ "$1" = --version ] && echo version 3.25.1 && exit
echo "cmake $*" >>"$TIERING_CALLS"
/bin/mkdir -p build/lib/ollama
echo "$CFLAGS cpu$FAKE_SOURCE" >build/lib/ollama/libggml-cpu-haswell.so
echo "$CFLAGS base" >build/lib/ollama/libggml-base.so.0
[ -z "$FAKE_CMAKE_WAITS" ] || { /bin/touch "$FAKE_CMAKE_WAITS"; /bin/sleep 60; }
"""


@pytest.fixture
def cmake(fake_tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERING_CALLS", str(fake_tools.log))
    fake_tools.add("cmake", CMAKE)


@pytest.fixture
def served(cmake: None, make: Make) -> Path:
    """The program of a build that somebody serves from: this process."""
    binary = make(VARIANTS)
    assert (binary.parent / "build/lib/ollama/libggml-cpu-haswell.so").is_file()
    return binary


def other_flags(monkeypatch: pytest.MonkeyPatch, patches: Path) -> None:
    monkeypatch.setenv("CFLAGS", "-g1")


def other_cgo_flags(monkeypatch: pytest.MonkeyPatch, patches: Path) -> None:
    monkeypatch.setenv("CGO_CFLAGS", "-O1")


def conda(monkeypatch: pytest.MonkeyPatch, patches: Path) -> None:
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setenv("LDFLAGS", "-Wl,-O2 -Wl,--as-needed")


def other_patches(monkeypatch: pytest.MonkeyPatch, patches: Path) -> None:
    (patches / "overlay/kvcache/tier.go").write_text("package kvcache // new\n")
    monkeypatch.setenv("FAKE_SOURCE", " of the new patch set")


CHANGES = (other_flags, other_cgo_flags, conda, other_patches)
Change = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_another_build_leaves_the_one_in_use_as_it_is(
    served: Path,
    patches: Path,
    cache: SourceCache,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    fails: bool,
) -> None:
    before = snapshot(served.parent)
    change(monkeypatch, patches)
    if fails:
        monkeypatch.setenv("FAKE_GO_FAILS", "x.c:1: error: no")
        with pytest.raises(BuildError):
            build.build(VARIANTS, manifest.load(patches), cache, report)
    else:
        assert build.build(VARIANTS, manifest.load(patches), cache, report) != served
    assert snapshot(served.parent) == before
    assert finished.is_whole(served.parent)
    assert [one.parent for one in served.parent.parent.glob(".*")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_interrupted_leaves_the_one_in_use_as_it_is(
    served: Path,
    patches: Path,
    cache: SourceCache,
    report: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    before, waits = snapshot(served.parent), tmp_path / "waits"
    program = (
        "import signal, sys; from pathlib import Path\n"
        "from ollama_tiering.patchset import build, manifest\n"
        "from ollama_tiering.patchset.report import Report\n"
        "from ollama_tiering.patchset.upstream import SourceCache\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "options = build.BuildOptions(tag='v0.16.0', cpu='variants', cuda='off')\n"
        "patchset = manifest.load(Path(sys.argv[1]))\n"
        "build.build(options, patchset, SourceCache(), Report(quiet=True))\n"
    )
    env = os.environ | {
        "CFLAGS": "-g1",
        "FAKE_CMAKE_WAITS": str(waits),
        "PYTHONPATH": str(REPOSITORY),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(patches)],
        env=env,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not waits.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a terminal does
    process.wait(60)
    assert process.returncode != 0
    assert snapshot(served.parent) == before
    assert len(list(served.parent.parent.iterdir())) == 1 + (number == signal.SIGKILL)
    monkeypatch.setenv("CFLAGS", "-g1")
    fresh = build.build(VARIANTS, manifest.load(patches), cache, report)
    assert (fresh.parent / "build/lib/ollama/libggml-cpu-haswell.so").read_text() == "-g1 cpu\n"
    assert snapshot(served.parent) == before
    assert {one.name for one in served.parent.parent.iterdir()} == {
        served.parent.name, fresh.parent.name}  # fmt: skip


def test_an_older_build_goes_with_the_next_one_once_nobody_uses_it(
    served: Path, patches: Path, cache: SourceCache, report: Report
) -> None:
    stock = build.build(replace(VARIANTS, stock=True), manifest.load(patches), cache, report)
    tagged = build.build(replace(VARIANTS, go_tags=("x",)), manifest.load(patches), cache, report)
    kept = [served]
    for number in range(3):
        (patches / "overlay/kvcache/tier.go").write_text(f"package kvcache // {number}\n")
        kept.append(build.build(VARIANTS, manifest.load(patches), cache, report))
        assert all(one.is_file() for one in kept)  # held by this process
    finished.release()
    (patches / "overlay/kvcache/tier.go").write_text("package kvcache // last\n")
    last = build.build(VARIANTS, manifest.load(patches), cache, report)
    assert [one.is_file() for one in (*kept, last, stock, tagged)] == [False] * 4 + [True] * 3
    finished.release()
    assert build.build(VARIANTS, manifest.load(patches), cache, report) == last
    assert build.built_binaries() == [last]


def test_another_process_that_holds_a_build_keeps_it(
    served: Path, patches: Path, cache: SourceCache, report: Report
) -> None:
    finished.release()
    program = (
        "import sys; from pathlib import Path; from ollama_tiering.patchset import finished\n"
        "finished.hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(served)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout
    assert holder.stdin
    assert holder.stdout.readline() == b"held\n"
    for number, there in ((1, True), (2, False)):
        (patches / "overlay/kvcache/tier.go").write_text(f"package kvcache // {number}\n")
        build.build(VARIANTS, manifest.load(patches), cache, report)
        assert served.is_file() == there
        finished.release()
        if there:
            holder.stdin.close()
            holder.wait(30)
            holder.stdout.close()


def test_a_record_that_leads_elsewhere_is_neither_held_nor_changed(
    served: Path, tmp_path: Path
) -> None:
    finished.release()
    other = tmp_path / "of another"
    other.write_text("{}")
    other.chmod(0o644)
    record_file = served.with_name(finished.RECORD)
    for make in (record_file.symlink_to, record_file.hardlink_to):
        record_file.unlink()
        make(other)
        assert finished.hold(served) == served
        assert other.stat().st_mode & 0o777 == 0o644
        finished.release()


def test_a_build_that_another_user_holds_for_itself_is_started_all_the_same(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    finished.release()
    monkeypatch.setattr(tree_use.os, "open", denied)
    assert finished.hold(served) == served
    assert not tree_use.remove_unused(served.parent, finished.RECORD), "nobody knows who uses it"
    monkeypatch.undo()
    assert served.is_file()


@pytest.mark.parametrize(
    "damage", ["library gone", "library changed", "record gone", "folder gone"]
)
def test_what_is_gone_of_a_build_is_said_and_built_again(
    served: Path, monkeypatch: pytest.MonkeyPatch, damage: str, make: Make
) -> None:
    said: list[str] = []
    watch = BuildWatch(lambda: served, said.append)
    mine = RunningUp(pid=os.getpid(), url="", binary=str(served))
    monkeypatch.setattr(running_up, "records", lambda: [mine])
    watch()
    assert (finished.harm(served), said, build_watch.harmed()) == ("", [], [])
    library = served.parent / "build/lib/ollama/libggml-cpu-haswell.so"
    if damage == "library gone":
        library.unlink()
    elif damage == "library changed":
        library.write_text("other")
    elif damage == "record gone":
        (served.parent / finished.RECORD).unlink()
    else:
        shutil.rmtree(served.parent)
    named = str(library) if "library" in damage else f"{served.parent} is gone"
    assert named in finished.harm(served)
    watch()
    watch()
    assert len(said) == 1
    assert named in said[0]
    assert "other, slower code" in said[0]
    assert len(build_watch.harmed()) == 1
    assert str(os.getpid()) in build_watch.harmed()[0]
    assert make(VARIANTS) == served
    assert finished.harm(served) == ""
    assert library.read_text() == " cpu\n"
    watch()
    library.unlink()
    watch()
    assert len(said) == 2


def test_a_build_of_an_older_tiering_counts_until_the_next_one(
    patchset: Patchset, cache: SourceCache, report: Report, fake_tools: FakeTools
) -> None:
    """Or `up` would take an installed Ollama, of another version, for it."""
    plan = build.plan(NATIVE)
    plan.tree.parent.mkdir(parents=True)
    cache.extract("v0.16.0", plan.tree)
    old = plan.tree / "ollama"
    old.write_text("")
    plan.old_stamp.write_text('{"build": "0123456789abcdef"}')
    assert build.built_binaries() == [old]
    new = build.build(NATIVE, patchset, cache, report)
    assert build.built_binaries() == [new]
    assert old.is_file()  # a server may still run from it
    assert finished.harm(old) == ""


def test_programs_elsewhere_are_no_builds_of_ours(tmp_path: Path) -> None:
    program = tmp_path / "bin/ollama"
    assert finished.folder_of(program) is None
    assert finished.hold(program) == program
    assert finished.source_of(program) == program.parent


def test_a_build_for_another_processor_is_never_started_here(make: Make) -> None:
    for options in (replace(NATIVE, goarch="arm64"), replace(NATIVE, march="x86-64-v2")):
        binary = make(options)
        assert binary.is_file()
        assert "-for-" in binary.parents[1].name
    assert build.built_binaries() == []
    assert (config.cache_dir() / "builds/v0.16.0-native-for-arm64").is_dir()
