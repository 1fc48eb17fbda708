"""What travels to a machine with a GPU: packed and unpacked, it is what it was."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts.gpuday import command, pack, preparing
from scripts.gpuday.day import Day

LOCK = """\
# made by a tool
click==8.5.1 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via
    #   ollama-tiering
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:cc
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:dd
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A patched tree that was built, as it lies in the product's cache."""
    tree = tmp_path / "trees/v0.16.3-native/src"
    for name in (
        *("CMakeLists.txt", "main.go", "ml/backend/ggml/ggml/include/ggml.h"),
        *("ml/backend/ggml/ggml/src/ggml.c", "ml/backend/ggml/ggml/src/ggml-cuda/fattn.cu"),
        "ml/backend/ggml/ggml/src/ggml-vulkan/shader.comp",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "ollama").write_text("the program")
    (tree / "ollama").chmod(0o755)
    return tree


def wheel(target: Path, *_: object) -> None:
    target.mkdir()
    with zipfile.ZipFile(target / "thing-1-py3-none-any.whl", "w") as content:
        content.writestr("thing/__init__.py", "ANSWER = 42\n")


def test_what_is_unpacked_is_what_was_packed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "download_wheels", wheel)
    parts = pack.make(tmp_path / "pack", tree / "ollama", [], lambda _: None)
    assert parts[pack.PROGRAM] == (tmp_path / "pack" / pack.PROGRAM).stat().st_size > 0
    program = pack.unpack(tmp_path / "pack", tmp_path / "work")
    assert program.read_text() == "the program"
    assert program.stat().st_mode & 0o111
    ggml = tmp_path / "work/ggml"
    files = {str(path.relative_to(ggml)) for path in ggml.rglob("*") if path.is_file()}
    assert files == {
        "CMakeLists.txt",
        "ml/backend/ggml/ggml/include/ggml.h",
        "ml/backend/ggml/ggml/src/ggml.c",
        "ml/backend/ggml/ggml/src/ggml-cuda/fattn.cu",
    }
    assert (tmp_path / "work/site/thing/__init__.py").read_text() == "ANSWER = 42\n"
    assert pack.read_about(tmp_path / "pack")["build"] == "v0.16.3-native"


def test_a_program_for_all_processors_takes_its_libraries_along(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "download_wheels", wheel)
    pack.make(tmp_path / "native", tree / "ollama", [], lambda _: None)
    flags = set(pack.read_about(tmp_path / "native")["processor"].split())
    assert flags == pack.processor_flags()
    libraries = tree / "build/lib/ollama"
    libraries.mkdir(parents=True)
    (libraries / "libggml-cpu-haswell.so").write_text("a library")
    (libraries / "libggml-cuda.so").touch()
    pack.make(tmp_path / "all", tree / "ollama", [], lambda _: None)
    assert pack.read_about(tmp_path / "all")["processor"] == ""
    program = pack.unpack(tmp_path / "all", tmp_path / "work")
    carried = program.parent / "build/lib/ollama"
    assert [path.name for path in carried.iterdir()] == ["libggml-cpu-haswell.so"]


def test_flags_of_a_processor_are_those_that_compilers_use(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: x\nflags\t\t: fpu avx2 avx512f clzero fma nx\n")
    assert pack.processor_flags(info) == {"avx2", "avx512f", "fma"}


def test_what_a_processor_lacks_of_the_programs_is_said(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "download_wheels", wheel)
    monkeypatch.setattr(pack, "processor_flags", lambda: {"avx2", "avx512f"})
    pack.make(tmp_path / "pack", tree / "ollama", [], lambda _: None)
    day = Day(tmp_path / "out", tmp_path / "work", tmp_path / "pack")
    assert len(preparing.unpack(day, {}).lines) == 1
    monkeypatch.setattr(pack, "processor_flags", lambda: {"avx2"})
    said = preparing.unpack(day, {}).lines
    assert "It was built for a processor with avx512f, which this one has not" in said[1]


def test_a_pack_that_is_not_whole_is_none(tmp_path: Path) -> None:
    assert pack.read_about(tmp_path) == {}
    (tmp_path / pack.ABOUT).write_text(json.dumps({"program": "ollama"}))
    assert pack.read_about(tmp_path) == {}


def test_a_program_without_its_tree_cannot_be_packed(tmp_path: Path) -> None:
    (tmp_path / "ollama").touch()
    with pytest.raises(ValueError, match="no sources of ggml-cuda that ollama was built from"):
        pack.make(tmp_path / "pack", tmp_path / "ollama", [], lambda _: None)


def test_the_same_files_make_the_same_archive(tree: Path, tmp_path: Path) -> None:
    files = list(pack.sources_of(tree))
    pack.write_archive(tmp_path / "a", tree, files)
    (tree / files[0]).touch()
    pack.write_archive(tmp_path / "b", tree, files)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_wheels_are_those_of_the_locks_for_another_python(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text(LOCK)
    assert pack.requirements([lock, lock], {"numpy", "colorama"}) == (
        "click==8.5.1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "    # via\n    #   ollama-tiering\n"
    )
    both = pack.requirements([lock], ())
    assert "numpy==2.4.6 \\\n    --hash=sha256:cc" in both
    assert "python_full_version" not in both


def test_more_than_may_travel_is_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pack, "download_wheels", wheel)
    monkeypatch.setattr(pack, "checkout_bytes", lambda _: 9 * pack.MIB)
    assert command.make_pack(tmp_path / "pack", tree / "ollama") == 0
    assert "the checkout        9.0 MiB" in capsys.readouterr().out
    monkeypatch.setattr(pack, "checkout_bytes", lambda _: pack.MOST_BYTES)
    assert command.make_pack(tmp_path / "pack", tree / "ollama") == 1
    assert "more than may travel" in capsys.readouterr().err


def test_files_that_git_ignores_do_not_count(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("/build/\n")
    (tmp_path / "file").write_bytes(b"x" * 1000)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/large").write_bytes(b"x" * 5000)
    assert pack.checkout_bytes(tmp_path) == 1000 + len("/build/\n")
