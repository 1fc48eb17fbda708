"""A library with the table of patchset/llama_server/linked.py in it, loaded beside the libraries
that it was linked against, and beside others.
"""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from ollama_tiering.patchset import elf
from ollama_tiering.patchset.llama_server import guard, linked
from tests.integration.engine_program import SOURCE, WARNINGS

BESIDE = "libllama.so.0"
IDS = {
    "build id": "-Wl,--build-id=sha1",
    "no build id": "-Wl,--build-id=none",
}
FLAGS = ("-std=gnu++17", *WARNINGS, f"-I{SOURCE / 'src'}", "-fPIC")
PROGRAM = """\
#include <cstdio>
int ours();
int main() { std::printf("%d\\n", ours()); }
"""


def compile_(*words: str | Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    subprocess.run([compiler, *words], check=True, timeout=120)


def make_library(folder: Path, name: str, answer: int, build_id: str) -> Path:
    """It has the same symbol and size, whatever it answers."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "beside.cpp"
    source.write_text(f"int beside() {{ return {answer}; }}\n")
    options = ("-shared", "-fPIC", f"-Wl,-soname,{name}", build_id)
    compile_(*options, source, "-o", folder / name)
    source.unlink()
    return folder / name


@functools.cache
def parts() -> tuple[Path, ...]:
    """Objects of what is the same in all trees."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-linked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = tuple(folder / f"{name}.o" for name in ("kvt_linked", "kvt_crc"))
    for each in made:
        compile_(*FLAGS, "-c", SOURCE / "src" / f"{each.stem}.cpp", "-o", each)
    return made


class Tree:
    """A program and our library, linked against `installed`, which it has by links."""

    def __init__(self, root: Path, installed: Path, *others: Path) -> None:
        self.folder = root / "tree"
        self.folder.mkdir()
        table, ours, program = (root / name for name in (linked.FILE, "ours.cpp", "program.cpp"))
        table.write_text(linked.source([*others, installed]))
        ours.write_text("int beside();\nint ours() { return beside(); }\n")
        program.write_text(PROGRAM)
        library = self.folder / "libours.so"
        shared = ("-shared", "-Wl,-rpath,$ORIGIN", "-o", library)
        compile_(*FLAGS, *shared, ours, table, *parts(), installed)
        options = ("-Wl,-rpath,$ORIGIN", f"-Wl,-rpath-link,{installed.parent}")
        compile_(program, library, "-o", self.folder / "program", *options)
        self.put(installed)

    def put(self, library: Path) -> None:
        link = self.folder / BESIDE
        link.unlink(missing_ok=True)
        link.symlink_to(library)

    def run(self, name: str = "program", *arguments: str) -> subprocess.CompletedProcess[str]:
        program = [self.folder / name, *arguments]
        return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)

    def answers(self) -> str:
        done = self.run()
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture(params=IDS)
def build_id(request: pytest.FixtureRequest) -> str:
    return IDS[request.param]


@pytest.fixture
def installed(tmp_path: Path, build_id: str) -> Path:
    return make_library(tmp_path / "installed", BESIDE, 1, build_id)


def test_beside_the_same_libraries_it_runs(tmp_path: Path, installed: Path) -> None:
    """Through links, and beside a copy with another time and place."""
    tree = Tree(tmp_path, installed)
    assert tree.answers() == "1\n"
    moved = tmp_path / "elsewhere" / "copy"
    moved.parent.mkdir()
    shutil.copyfile(installed, moved)
    os.utime(moved, ns=(1, 1))
    tree.put(moved)
    assert tree.answers() == "1\n"


@pytest.mark.parametrize("other_id", IDS.values(), ids=IDS)
def test_beside_another_library_it_ends_before_anything_else(
    tmp_path: Path, installed: Path, other_id: str
) -> None:
    tree = Tree(tmp_path, installed)
    updated = make_library(tmp_path / "updated", BESIDE, 2, other_id)
    tree.put(updated)
    done = tree.run()
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tree.folder / BESIDE} is not the library that")
    assert "run `tiering patch`" in line
    tree.put(installed)
    assert tree.answers() == "1\n"


def test_the_guard_beside_it_takes_its_place(tmp_path: Path, installed: Path) -> None:
    """As a router starts the program for each model: by its file, past the guard. One that starts
    it again is asked once.
    """
    tree = Tree(tmp_path, installed)
    copy, script = tree.folder / guard.COPY, tree.folder / "llama-server"
    (tree.folder / "program").rename(copy)
    script.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    script.chmod(0o755)
    assert tree.run(guard.COPY).stdout == "1\n", "nothing was updated"
    tree.put(make_library(tmp_path / "updated", BESIDE, 2, IDS["build id"]))
    done = tree.run(guard.COPY, "-m", "a model", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "<-m><a model><>", "")
    script.write_text(f'#!/bin/sh\necho asked\nexec {shlex.quote(str(copy))} "$@"\n')
    done = tree.run(guard.COPY)
    assert (done.returncode, done.stdout) == (1, "asked\n")
    assert "is not the library that" in done.stderr
    script.unlink()
    assert tree.run(guard.COPY).returncode == 1


def test_a_file_that_was_written_anew_is_another(tmp_path: Path, installed: Path) -> None:
    """As an installer does it: the link stays."""
    tree = Tree(tmp_path, installed)
    updated = make_library(tmp_path / "updated", BESIDE, 2, IDS["no build id"])
    updated.replace(installed)
    assert tree.run().returncode == 1


def test_a_library_of_which_nothing_is_used_may_be_any(tmp_path: Path, installed: Path) -> None:
    others = [
        make_library(tmp_path / "installed", name, 3, IDS["build id"])
        for name in ("libmtmd.so", "libllama-common.so.0")
    ]
    tree = Tree(tmp_path, installed, *others)
    for other in others:
        other.unlink()
    assert tree.answers() == "1\n"


def test_a_build_id_is_that_of_the_linker(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    assert elf.build_id(make_library(folder, "a.so", 1, "-Wl,--build-id=0xabcd")) == "abcd"
    assert elf.build_id(make_library(folder, "b.so", 1, IDS["no build id"])) == ""
    whole = (folder / "a.so").read_bytes()
    cut = folder / "cut.so"
    for length in range(0, 2048):
        cut.write_bytes(whole[:length])
        assert elf.build_id(cut) in ("", "abcd")
