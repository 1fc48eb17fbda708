"""Bytes that were read into llama-server's cells, and are no rows, stay in none: attention reads
free cells too, and a NaN in one of them spreads.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.engine_program import SOURCE


def test_what_was_read_and_is_no_row_is_zeroed(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path / "kvt_spoiled"
    tests = SOURCE / "tests"
    checks = ["-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    folders = ["-I", tests / "stub", "-I", SOURCE / "src"]
    ours = [SOURCE / "src" / f"{name}.cpp" for name in ("kvt_images", "kvt_sha256")]
    command = [
        compiler,
        "-std=c++17",
        *checks,
        *folders,
        tests / "kvt_spoiled.cpp",
        *ours,
        "-o",
        built,
    ]
    subprocess.run(command, check=True, timeout=600)
    done = subprocess.run([built], capture_output=True, text=True, check=True)
    assert done.stdout == "zero\n"
