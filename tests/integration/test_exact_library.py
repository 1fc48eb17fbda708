"""Parts of exact attention for llama-server that need no GGML: the score by which GGML takes the
library, and the last columns of repacked weights.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from ollama_tiering.patchset import tools
from ollama_tiering.patchset.llama_server import exact_library, exact_processor
from tests.integration.compiled import object_of

SOURCES = exact_library.default_sources()
STRICT = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror")
GGML = """\
#define GGML_BACKEND_DL_SCORE_IMPL(fn) \\
    extern "C" int ggml_backend_score(void) { return fn(); }
"""
TAKEN = 1 << 20
VARIABLE = "OLLAMA_CPU_ATTENTION"


def score(folder: Path, flags: str) -> int:
    """As GGML asks for it. Compiled for no processor in particular."""
    (folder / "ggml-backend-impl.h").write_text(GGML)
    library = folder / f"{abs(hash(flags))}.so"
    command = [*tools.cxx_compiler(), "-std=gnu++17", "-O2", "-fPIC", *STRICT, f"-I{folder}"]
    command += [f'-DEXACTATTN_FLAGS="{flags}"']
    made = object_of(command, SOURCES / exact_library.SCORE, library.with_suffix(".o"))
    subprocess.run([*tools.cxx_compiler(), "-shared", made, "-o", library], check=True)
    return int(ctypes.CDLL(str(library)).ggml_backend_score())


@pytest.fixture
def own() -> str:
    if not (found := exact_processor.flags()):
        pytest.skip("Linux says no flags of this processor")
    return found


def test_it_is_taken_where_it_is_asked_for_on_its_processor(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "exact")
    assert score(tmp_path, own) == TAKEN
    assert score(tmp_path, own.split()[-1]) == TAKEN


@pytest.mark.parametrize("value", [None, "", "stock", "exact1", "inexact", "exact stock", "EXACT"])
def test_it_is_left_where_it_is_not_asked_for(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert score(tmp_path, own) == 0


@pytest.mark.parametrize("value", [" exact ", "'exact'", '"exact"\n'])
def test_spaces_and_quotes_do_not_count(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert score(tmp_path, own) == TAKEN


def test_it_is_left_on_a_processor_that_lacks_something(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the name is a part of another one's, at its begin or its end."""
    monkeypatch.setenv(VARIABLE, "exact")
    words = own.split()
    longest = max(words, key=len)
    for other in ("no_such_thing", longest[:-1], longest[1:]):
        assert other not in words
        assert score(tmp_path, f"{own} {other}") == 0, other
        assert score(tmp_path, f"{other} {own}") == 0, other
    assert score(tmp_path, f"{own} {64 * 'x'}") == 0


def test_the_last_columns_are_a_four(tmp_path: Path) -> None:
    source = SOURCES.parent / "tests/cpu/last_columns.cpp"
    program = tmp_path / "last"
    command = [*tools.cxx_compiler(), "-std=gnu++17", "-O1", *STRICT, f"-I{SOURCES}"]
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    assert subprocess.run([program], check=False).returncode == 0
