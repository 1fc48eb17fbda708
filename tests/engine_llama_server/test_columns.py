"""Columns of a device's tensor, which V's rows are without flash attention, by GGML's own copies:
llama_server/tests/kvt_columns.cpp.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.engine_program import SOURCE

WRONG = {"lost": 0, "a cell too far": 1, "small numbers are 0": 2, "one element without gaps": 3}


def passed(server: Path, to: Path, *defined: str) -> bool:
    """GGML is that of this llama-server."""
    libraries = server.parent
    headers = next(folder for folder in _headers(server) if (folder / "ggml.h").is_file())
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", *defined]
    command += ["-I", str(SOURCE / "src/llama"), "-I", str(SOURCE / "src"), "-I", str(headers)]
    command += [str(SOURCE / "tests/kvt_columns.cpp"), f"-L{libraries}", "-o", str(to)]
    command += ["-lggml", "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True, timeout=600)
    done = subprocess.run([to], capture_output=True, text=True, timeout=300)
    return (done.returncode, done.stdout) == (0, "passed\n")


def _headers(server: Path) -> list[Path]:
    return [folder / "source/ggml/include" for folder in server.parents]


def test_what_is_copied_is_what_lies_there_and_all_else_stays(
    patched: Path, tmp_path: Path
) -> None:
    assert passed(patched, tmp_path / "columns")


@pytest.mark.parametrize("what", WRONG)
def test_a_device_that_copies_otherwise_is_turned_down(
    patched: Path, tmp_path: Path, what: str
) -> None:
    assert passed(patched, tmp_path / "columns", f"-DWRONG_COPY={WRONG[what]}")
