"""Of llama.cpp's kinds of memory those are tiered of which all is stored (kvt_complete), and none
that merely derives from one (kvt_exactly).
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.integration.engine_program import SOURCE, WARNINGS

LLAMA = SOURCE / "src" / "llama"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("kvt") / "kvt_kinds"
    tests = SOURCE / "tests"
    command = [compiler, "-std=c++17", *WARNINGS, "-I", tests / "stub", "-I", SOURCE / "src"]
    sources = tests / "kvt_kinds.cpp", LLAMA / "kvt_complete.cpp"
    subprocess.run([*command, *sources, "-o", built], check=True, timeout=600)
    lines = subprocess.run([built], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("what", ["rows", "rows and states", "rows and windows"])
def test_what_is_stored_whole_is_tiered(said: dict[str, str], what: str) -> None:
    assert said[what] == ""


def test_a_third_cache_is_refused_in_one_line(said: dict[str, str]) -> None:
    """Such as that of an indexer: it would come back empty."""
    keeps = "llama.cpp keeps {} bytes of a sequence, of which {} are known here"
    assert said["rows and keys"] == keeps.format(25800, 25600)
    assert said["rows, states and keys"] == keeps.format(25800 + 12345, 25600 + 12345)


@pytest.mark.parametrize(
    "what", ["rows and windows with more", "windows of more rows than are held"]
)
def test_windows_that_are_more_than_their_rows_are_refused(said: dict[str, str], what: str) -> None:
    assert said[what] == "llama.cpp keeps other bytes of a window than its rows"


def test_a_class_that_derives_from_a_known_one_is_another(said: dict[str, str]) -> None:
    assert said["derived"] == "refused"
    assert said["known"] == "taken"
    assert "dynamic_cast" not in (LLAMA / "kvt_cache.cpp").read_text()
