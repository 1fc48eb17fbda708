"""How the shim is compiled; what it does is tests/engine/attention/test_shim_library.py's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import BuildError, UnsupportedUpstream
from ollama_tiering.patchset import manifest, shim
from ollama_tiering.patchset.report import Report
from tests.unit.patchset.conftest import FakeTools


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    headers = tmp_path / "tree" / shim.GGML / "src"
    headers.mkdir(parents=True)
    (headers / "ggml-backend-impl.h").write_text("")
    return tmp_path / "tree"


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    folder = tmp_path / "lib/ollama/cuda_v13"
    folder.mkdir(parents=True)
    (folder.parent / "libggml-base.so.0").write_text("")
    return folder


def _compile(tree: Path, libraries: Path, report: Report) -> Path:
    sources = shim.default_sources(manifest.load().root)
    target = libraries / shim.LIBRARY
    shim.compile_shim(sources, tree, shim.find_base(libraries), target, report)
    return target


def test_all_sources_are_compiled_against_the_trees_headers_and_linked_to_its_base(
    fake_tools: FakeTools,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    tree: Path,
    libraries: Path,
) -> None:
    fake_tools.add("special++", 'for last; do :; done; echo "$@" > "$last"')
    monkeypatch.setenv("CXX", "special++ -m64")
    words = _compile(tree, libraries, report).read_text().split()
    assert words[0] == "-m64"
    sources = shim.default_sources(manifest.load().root)
    wanted = {*sources.glob("*.cpp"), *(sources.parent / name for name in shim.HOST)}
    assert all(file.is_file() for file in wanted)
    assert {word for word in words if word.endswith(".cpp")} == set(map(str, wanted))
    assert f"-I{sources.parent / 'include'}" in words
    assert f'-DSHIM_SOURCES="{shim.digest(sources, tree)}"' in words
    assert f"-isystem{tree / shim.GGML / 'src'}" in words
    assert str(libraries.parent / "libggml-base.so.0") in words
    assert [file.name for file in libraries.iterdir()] == [shim.LIBRARY]


def test_it_is_put_beside_a_stock_library_alone_and_compiled_when_something_changed(
    fake_tools: FakeTools,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    tree: Path,
    libraries: Path,
    tmp_path: Path,
) -> None:
    fake_tools.add("counting++", 'for last; do :; done; echo made > "$last"; echo >> "$COUNT"')
    monkeypatch.setenv("CXX", "counting++")
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text("")
    assert not shim.put_beside(libraries, sources, tree, report)
    assert not (libraries / shim.LIBRARY).exists()
    (libraries / shim.STOCK).write_text("")

    def compiled() -> int:
        assert shim.put_beside(libraries, sources, tree, report)
        assert (libraries / shim.LIBRARY).read_text() == "made\n"
        return len((tmp_path / "count").read_text())

    assert (compiled(), compiled()) == (1, 1)
    (sources / "one.h").write_text("// new")
    assert (compiled(), compiled()) == (2, 2)
    (tree / shim.GGML / "src/ggml-backend-impl.h").write_text("// of another version")
    assert (compiled(), compiled()) == (3, 3)
    (libraries / shim.LIBRARY).unlink()
    assert compiled() == 4
    for number, name in enumerate((shim.HOST[0], "cuda/problem.h"), 5):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("// the host side of the kernels")
        assert compiled() == number


def test_a_compiler_that_fails_is_quoted_and_what_was_there_stays(
    fake_tools: FakeTools,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    tree: Path,
    libraries: Path,
) -> None:
    fake_tools.add("broken++", "echo 'x.cpp:1: error: no luck' >&2; exit 1")
    monkeypatch.setenv("CXX", "broken++")
    (libraries / shim.LIBRARY).write_text("old")
    with pytest.raises(BuildError, match="no luck"):
        _compile(tree, libraries, report)
    assert (libraries / shim.LIBRARY).read_text() == "old"


def test_without_headers_or_base_it_says_what_is_missing(
    report: Report, tree: Path, libraries: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedUpstream, match="no headers of GGML"):
        _compile(tmp_path, libraries, report)
    (libraries.parent / "libggml-base.so.0").unlink()
    with pytest.raises(UnsupportedUpstream, match=r"no libggml-base\.so"):
        _compile(tree, libraries, report)
