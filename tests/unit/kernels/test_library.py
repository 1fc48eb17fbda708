"""How libpaged_attn.so is found or built. The sources here are a stand-in of one line."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from ollama_tiering.errors import BuildError, MissingTool
from ollama_tiering.kernels import compile as compiling
from ollama_tiering.kernels import library
from ollama_tiering.kernels.binding import bind

CSRC = Path(__file__).parents[3] / "csrc"


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if compiling.find_compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / compiling.SOURCES).write_text("# comment\n\nanswer.cpp any -DANSWER=42\n")
    (folder / "answer.cpp").write_text(
        '#define SHOWN __attribute__((visibility("default")))\n'
        'extern "C" SHOWN int answer() { return ANSWER; }\n'
    )
    monkeypatch.setattr(library, "csrc_dir", lambda: folder)
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    return folder


def test_it_is_built_once(csrc: Path) -> None:
    built = library.build()
    made = built.stat().st_mtime_ns
    assert ctypes.CDLL(str(built)).answer() == 42
    assert library.build() == built
    assert built.stat().st_mtime_ns == made
    assert sorted(path.name for path in built.parent.iterdir()) == [compiling.LIBRARY]


def test_other_sources_are_another_library(csrc: Path) -> None:
    first = library.build()
    (csrc / compiling.SOURCES).write_text("answer.cpp any -DANSWER=43\n")
    second = library.build()
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 43
    (csrc / "new.h").write_text("// a header counts as well\n")
    assert library.build() not in (first, second)


def test_without_a_compiler_the_error_says_how_to_get_one(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingTool, match=r"no C\+\+ compiler on PATH") as caught:
        library.build()
    assert caught.value.hint is not None
    assert "g++" in caught.value.hint


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(csrc: Path, tmp_path: Path) -> None:
    (csrc / "answer.cpp").write_text("int answer() { return nonsense; }\n")
    with pytest.raises(BuildError, match="nonsense") as caught:
        library.build()
    assert "answer.cpp" in caught.value.message
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob(".compile-*"))


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_a_cache_that_cannot_be_written(csrc: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(BuildError, match="Permission denied"):
        library.build()


def test_a_library_of_another_interface_is_refused(csrc: Path) -> None:
    with pytest.raises(OSError, match="has no pa_abi_version"):
        bind(ctypes.CDLL(str(library.build())))


def test_a_shipped_library_that_does_not_load_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / compiling.LIBRARY
    shipped.write_bytes(b"made for another system")
    monkeypatch.setattr(library, "SHIPPED", shipped)
    library.load.cache_clear()
    try:
        assert library.library_path() == library.build()
    finally:
        library.load.cache_clear()


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64", "riscv64"])
def test_every_listed_source_is_there_and_only_those(machine: str) -> None:
    listed = {source.path for source in compiling.sources(CSRC, machine)}
    assert all((CSRC / path).is_file() for path in listed)
    assert "src/isa_scalar.cpp" in listed
    assert ("src/isa_avx512.cpp" in listed) == (machine in ("x86_64", "AMD64"))
    assert ("src/isa_neon.cpp" in listed) == (machine in ("aarch64", "arm64"))


def test_no_source_is_forgotten() -> None:
    listed = {
        source.path for name in ("x86_64", "aarch64") for source in compiling.sources(CSRC, name)
    }
    there = {
        str(path.relative_to(CSRC))
        for folder in ("src", "reference", "cuda/host")
        for path in (CSRC / folder).glob("*.cpp")
    }
    assert listed == there
