"""What llama-server says of its files, and of what changes the values in them (kvt_given): two that
compute other bits never say the same.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.engine_program import SOURCE, WARNINGS

SAME = "the model's file is another one than when it was loaded"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("kvt") / "kvt_given"
    tests, parts = SOURCE / "tests", ("kvt_loaded", "kvt_sha256", "llama/kvt_given")
    sources = tests / "kvt_given.cpp", *(SOURCE / f"src/{part}.cpp" for part in parts)
    command = [compiler, "-std=c++17", *WARNINGS, "-I", tests / "stub", "-I", SOURCE / "src"]
    subprocess.run([*command, *sources, "-o", built], check=True, timeout=600)
    return built


def said(program: Path, *words: str | Path, line: str = "") -> list[str]:
    done = subprocess.run([program, *words], input=line, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_parts_of_a_model_are_named_as_llama_cpp_names_them(program: Path) -> None:
    first = "/a b/m-00001-of-00003.gguf"
    assert said(program, "--parts", first) == [
        first,
        "/a b/m-00002-of-00003.gguf",
        "/a b/m-00003-of-00003.gguf",
    ]
    assert len(said(program, "--parts", "m-00001-of-00163.gguf")) == 163


@pytest.mark.parametrize(
    "path",
    [
        "m.gguf",
        "best-of-both.gguf",
        "m-00002-of-00003.gguf",  # llama.cpp loads no model from it
        "m-00001-of-00001.gguf",
        "m-00001-of-00000.gguf",
        "m-00001-of-3.gguf",
        "m-00001-of-0000x.gguf",
        "m-00001-of-00003.ggml",
        "-00001-of-00003.gguf",
        "m-1-of-00003.gguf",
        f"sha256-{'0' * 64}",
    ],
)
def test_any_other_name_is_that_of_one_file(program: Path, path: str) -> None:
    assert said(program, "--parts", path) == [path]


def _made(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"m-{n + 1:05}-of-{count:05}.gguf" for n in range(count)]
    for path in paths:
        path.write_bytes(b"GGUF")
    return paths


def _rewritten(path: Path) -> None:
    path.write_bytes(b"GGUG")


def _in_its_place(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [Path.unlink, _rewritten, _in_its_place])
@pytest.mark.parametrize("which", range(3))
def test_a_part_that_is_another_one_or_lacking_is_seen(
    program: Path, tmp_path: Path, which: int, change: Callable[[Path], None]
) -> None:
    paths = _made(tmp_path, 3)
    with subprocess.Popen(
        [program, "--changed", paths[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "3\n"
        change(paths[which])
        assert running.communicate("\n")[0] == f"{SAME}\n"


def test_a_part_that_was_never_there_is_no_model(program: Path, tmp_path: Path) -> None:
    paths = _made(tmp_path, 3)
    assert said(program, "--changed", paths[0], line="\n") == ["3", ""]
    paths[1].unlink()
    assert said(program, "--changed", paths[0], line="\n") == ["3", SAME]


def test_of_more_files_than_the_sidecar_takes_one_more_is_looked_at(
    program: Path, tmp_path: Path
) -> None:
    assert said(program, "--changed", _made(tmp_path, 64)[0], line="\n") == ["64", ""]
    assert said(program, "--changed", tmp_path / "n-00001-of-00163.gguf", line="\n")[0] == "65"


def test_each_file_is_there_in_its_order_and_an_encoder_in_the_models_own_once(
    program: Path, tmp_path: Path
) -> None:
    (one, two), other = _made(tmp_path, 2), tmp_path / "other"
    other.write_bytes(b"GGUF")
    model = [f"model {one}", f"model {two}"]
    beside = [f"adapter {other}", f"control vector {other}"]
    assert said(program, "--files", one, other) == [*model, f"projector {other}", *beside]
    assert said(program, "--files", one, one) == [*model, f"adapter {one}", f"control vector {one}"]


def test_scales_are_said_exactly_and_in_their_order(program: Path) -> None:
    assert said(program, "--scales", "0.5") == ["0x1p-1", "at once", "waits"]
    assert said(program, "--scales", "0.1")[0] == "0x1.99999ap-4"
    assert said(program, "--scales", "0.5", "0")[0] == "0x1p-1,0x0p+0"
    assert said(program, "--scales", "0", "0.5")[0] == "0x0p+0,0x1p-1"
    # Two are always added in the same order, whatever their addresses.
    both = {said(program, "--scales", "0.5", "2")[0] for _ in range(4)}
    assert both == {"0x1p-1,0x1p+1 added 1 0"}
    names = said(program, "--scales", *["1"] * 5)[0].partition(" added ")[2]
    assert sorted(names.split()) == list("01234")


def test_strengths_and_layers_of_control_vectors_are_said(program: Path) -> None:
    all_said = [
        said(program, "--vectors", *words)[0]
        for words in (("1", "4"), ("1", "4", "1"), ("1", "4", "1", "1"), ("1", "4", "0.5"),
                      ("2", "4", "1"), ("1", "3", "1"))
    ]  # fmt: skip
    assert all_said[0] == ""
    assert all_said[1] == "0x1p+0, layers 1-4"
    assert len(set(all_said)) == len(all_said)


def test_other_values_are_said_otherwise(program: Path) -> None:
    given = [
        (),
        ("a", "int", "1"),
        ("a", "int", "2"),
        ("b", "int", "1"),
        ("a", "bool", "true"),
        ("a", "bool", "false"),
        ("a", "float", "1"),
        ("a", "float", "1.0000000000000002"),
        ("a", "str", "1"),
        ("a", "str", "true"),
        ("a", "str", "1 1:b 0 1:1"),
        ("a", "int", "1", "b", "int", "1"),
        ("b", "int", "1", "a", "int", "1"),
        ("a;b", "int", "1"),
        ("a_b", "int", "1"),
    ]
    all_said = ["".join(said(program, "--overrides", *(words or ("",)))) for words in given]
    assert len(set(all_said)) == len(all_said)
    assert all_said[0] == ""
    assert {len(one) for one in all_said[1:]} == {64}


def test_a_value_that_is_no_text_for_a_field_is_said_by_its_digest(program: Path) -> None:
    assert said(program, "--value", "blk.0=CPU") == ["blk.0=CPU"]
    for text in ("x" * 1025, "tab\there", "é"):
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert said(program, "--value", text) == [digest]
    assert said(program, "--value", "x" * 1024) == ["x" * 1024]
