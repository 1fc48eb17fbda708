"""Which Ollama libggml-cuda is taken from, and when it is refused: one line, and its cure."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.errors import MissingTool, TieringError, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import identity, manifest, stock
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report
from tests.unit.patchset.conftest import FakeTools
from tests.unit.patchset.fake_stock import library, ollama, program
from tests.unit.patchset.test_release_archive import archive

TAG = "v0.16.0"
CUDA_12 = "lib/ollama/cuda_v12/libggml-cuda.so"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return ollama(tmp_path / "stock")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Ollama of this machine is found: neither on PATH nor in the usual places."""
    bin_dir = tmp_path / "path"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", str(bin_dir))
    monkeypatch.setattr(stock, "USUAL", (tmp_path / "local", tmp_path / "distribution"))
    return tmp_path


def _check(place: Path, patchset: Patchset, tag: str = TAG) -> str:
    found = stock.at(place)
    assert found is not None
    return stock.check(found, tag, patchset)


def _refused(place: Path, patchset: Patchset, kind: type[TieringError], tag: str = TAG) -> str:
    """What is said: one line and a cure."""
    with pytest.raises(kind) as caught:
        _check(place, patchset, tag)
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return f"{caught.value.message}; {caught.value.hint}"


# --- where ----------------------------------------------------------------------------------------


def test_every_place_of_an_installation_names_it(place: Path) -> None:
    whole = stock.at(place)
    assert whole is not None
    assert [folder.name for folder in whole.folders] == ["cuda_v12", "cuda_v13"]
    assert whole.program == place / "bin/ollama"
    assert whole.base.name.startswith("libggml-base.so")
    names = [path.name for path in whole.folders[0].others]
    assert names == ["libcublas.so.12", "libcublas.so.12.8.4"]
    libraries = stock.at(place / "lib/ollama")
    assert libraries is not None
    assert libraries.folders == whole.folders
    one = stock.at(place / "lib/ollama/cuda_v13")
    assert one is not None
    assert one.folders == whole.folders[1:]
    assert one.program == whole.program


def test_a_source_tree_with_its_build_is_one(place: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "build/lib").mkdir(parents=True)
    (place / "lib/ollama").rename(tree / "build/lib/ollama")
    program(tree / "ollama", "0.16.0")
    found = stock.at(tree)
    assert found is not None
    assert found.program == tree / "ollama"


def test_of_a_distributions_folder_only_cudas_libraries_are_taken(
    place: Path, patchset: Patchset
) -> None:
    """All libraries of all kinds lie side by side there."""
    libraries = place / "lib/ollama"
    for file in (libraries / "cuda_v12").iterdir():
        file.rename(libraries / file.name)
    shutil.rmtree(libraries / "cuda_v12")
    shutil.rmtree(libraries / "cuda_v13")
    (libraries / "libvulkan.so.1").write_bytes(b"vulkan")
    found = stock.at(place)
    assert found is not None
    (folder,) = found.folders
    assert folder.name == "cuda"
    assert {path.name for path in folder.others} == {"libcublas.so.12", "libcublas.so.12.8.4"}
    assert _check(place, patchset) == "0.16.0"


@pytest.mark.parametrize("gone", ["lib/ollama/cuda_v1*", "lib/ollama/libggml-base*"])
def test_an_ollama_for_the_cpu_is_none(place: Path, gone: str) -> None:
    for path in place.glob(gone):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert stock.at(place) is None


def test_the_ollama_on_path_comes_first(elsewhere: Path) -> None:
    ollama(elsewhere / "local")
    found = stock.usual()
    assert found is not None
    assert found.place == elsewhere / "local"
    on_path = ollama(elsewhere / "mine")
    (elsewhere / "path/ollama").symlink_to(on_path / "bin/ollama")
    found = stock.usual()
    assert found is not None
    assert found.place == on_path


def test_our_own_build_on_path_is_not_taken_for_stock(elsewhere: Path) -> None:
    ours = ollama(elsewhere / "ours")
    with (ours / "bin/ollama").open("ab") as file:
        file.write(b"\n#" + identity.MARK + b"0123456789abcdef\n")
    (elsewhere / "path/ollama").symlink_to(ours / "bin/ollama")
    assert stock.usual() is None
    stock_place = ollama(elsewhere / "distribution")
    found = stock.usual()
    assert found is not None
    assert found.place == stock_place


def test_without_any_ollama_it_says_where_it_looked(elsewhere: Path, report: Report) -> None:
    with pytest.raises(MissingTool, match="no Ollama with libggml-cuda") as caught:
        stock.find("stock", report)
    assert str(elsewhere / "local") in caught.value.message
    assert "--gpu stock=PLACE" in str(caught.value.hint)


def test_a_release_archive_is_a_place(tmp_path: Path, place: Path, report: Report) -> None:
    path = archive(tmp_path / "ollama-linux-amd64.tgz", root=place)
    found = stock.find(f"stock={path}", report)
    assert found.place == path
    assert stock.version_of(found) == "0.16.0"
    assert [folder.name for folder in found.folders] == ["cuda_v12", "cuda_v13"]


@pytest.mark.parametrize("kind", ["missing", "empty folder", "archive of something else"])
def test_a_place_that_is_none_is_bad_usage(tmp_path: Path, report: Report, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "empty folder":
        place.mkdir()
    elif kind != "missing":
        archive(place, ("readme", b"text"))
    with pytest.raises(UsageError) as caught:
        stock.find(f"stock={place}", report)
    assert str(place) in caught.value.message
    assert caught.value.hint


# --- whether it fits ------------------------------------------------------------------------------


def test_the_same_version_fits(place: Path, patchset: Patchset) -> None:
    assert _check(place, patchset) == "0.16.0"


def _pinned(patchset: Patchset, headers: dict[str, str]) -> Patchset:
    """With names of GGML's headers, by tag."""
    name = f"{stock.INTERFACE}include"
    pins = {
        tag: replace(pin, folders=pin.folders | {name: headers[tag]}) if tag in headers else pin
        for tag, pin in patchset.pins.items()
    }
    return replace(patchset, pins=pins)


def test_another_version_fits_with_the_same_headers_only(place: Path, patchset: Patchset) -> None:
    program(place / "bin/ollama", "0.17.0")
    same = _pinned(patchset, {"v0.16.0": "aa", "v0.17.0": "aa"})
    assert _check(place, same) == "0.17.0"
    for headers in ({"v0.16.0": "aa", "v0.17.0": "bb"}, {"v0.16.0": "aa"}, {"v0.17.0": "aa"}, {}):
        said = _refused(place, _pinned(patchset, headers), UnsupportedUpstream)
        assert "is Ollama 0.17.0, whose GGML is not known to fit v0.16.0" in said
        assert "/tag/v0.16.0" in said
        assert "--tag v0.17.0" in said


def test_a_version_that_nobody_pinned_is_not_offered_for_patching(
    place: Path, patchset: Patchset
) -> None:
    program(place / "bin/ollama", "0.99.0")
    assert "--tag" not in _refused(place, patchset, UnsupportedUpstream)


def test_all_accepted_versions_have_ggmls_headers_pinned() -> None:
    patchset = manifest.load()
    for tag in patchset.pins:
        pinned = stock.interface(patchset, tag)
        names = {path.removeprefix(stock.INTERFACE) for path in pinned}
        assert names == {"include", "src/ggml-backend-impl.h", "src/ggml-impl.h"}, tag


def test_without_a_program_the_version_is_not_known(place: Path, patchset: Patchset) -> None:
    (place / "bin/ollama").unlink()
    assert "would say their version" in _refused(place, patchset, UnsupportedUpstream)


def test_a_program_that_does_not_say_its_version_is_refused(
    place: Path, patchset: Patchset
) -> None:
    (place / "bin/ollama").write_text("#!/bin/sh\necho Illegal instruction >&2; exit 1\n")
    assert "Illegal instruction" in _refused(place, patchset, UnsupportedUpstream)


def test_a_program_that_cannot_be_run_is_refused(place: Path, patchset: Patchset) -> None:
    (place / "bin/ollama").write_bytes(b"\x7fELF and no more")
    assert "does not say its version" in _refused(place, patchset, UnsupportedUpstream)


def test_a_running_server_of_another_version_is_not_asked(place: Path, patchset: Patchset) -> None:
    (place / "bin/ollama").write_text(
        '#!/bin/sh\n[ "$OLLAMA_HOST" = 127.0.0.1:1 ] || { echo ollama version is 9.9.9; exit; }\n'
        "echo Warning: client version is 0.16.0\n"
    )
    assert _check(place, patchset) == "0.16.0"


def test_libraries_of_two_versions_are_refused(place: Path, patchset: Patchset) -> None:
    library(
        place / CUDA_12,
        defined=["ggml_backend_init"],
        wanted=["ggml_of_the_future"],
        needed=["libggml-base.so.0"],
    )
    said = _refused(place, patchset, UnsupportedUpstream)
    assert "ggml_of_the_future" in said
    assert "two versions" in said


def test_a_library_for_another_processor_is_refused(place: Path, patchset: Patchset) -> None:
    library(place / CUDA_12, defined=["ggml_backend_init"], machine=22)
    assert "another processor" in _refused(place, patchset, UnsupportedUpstream)


def test_a_library_that_is_no_backend_is_refused(place: Path, patchset: Patchset) -> None:
    library(place / CUDA_12, defined=["something"])
    assert "no backend of GGML" in _refused(place, patchset, UsageError)


@pytest.mark.parametrize("name", [CUDA_12, "lib/ollama/libggml-base.so.0.0.0"])
def test_a_damaged_library_is_named(place: Path, patchset: Patchset, name: str) -> None:
    content = (place / name).read_bytes()
    (place / name).write_bytes(content[: len(content) // 2])
    assert Path(name).name.partition(".so")[0] in _refused(place, patchset, UsageError)


def test_a_cuda_library_that_is_nowhere_is_a_missing_tool(
    place: Path, patchset: Patchset, fake_tools: FakeTools
) -> None:
    for path in (place / "lib/ollama/cuda_v12").glob("libcublas*"):
        path.unlink()
    fake_tools.add("ldconfig", "")
    assert "libcublas.so.12, which is neither" in _refused(place, patchset, MissingTool)
    fake_tools.add("ldconfig", 'printf "1 libs\\n\\tlibcublas.so.12 (libc6) => /opt/cuda/x\\n"')
    assert _check(place, patchset) == "0.16.0"


# --- what it is -----------------------------------------------------------------------------------


def test_its_content_changes_with_a_library_and_its_state_with_a_file(place: Path) -> None:
    found = stock.at(place)
    assert found is not None
    content, state = found.content(), found.state()
    assert stock.at(place) == found
    assert (found.content(), found.state()) == (content, state)
    path = place / CUDA_12
    info = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert found.content() != content
    os.utime(path)
    assert found.state() != state
    cublas = place / "lib/ollama/cuda_v12/libcublas.so.12"
    before = found.content()
    cublas.unlink()
    cublas.with_name("libcublas.so.12.8.4").rename(cublas.with_name("libcublas.so.12.9.1"))
    cublas.symlink_to("libcublas.so.12.9.1")
    renewed = stock.at(place)
    assert renewed is not None
    assert renewed.content() != before
