"""What a wheel says it is for, and what its library was compiled for, are one machine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ollama_tiering.kernels import compile as compiling

pytest.importorskip("hatchling")
REPO = Path(__file__).parents[3]

# Says what it compiles for, notes what it is told, and writes something.
COMPILER = """#!/bin/sh
case $1 in
-dumpmachine) {dumpmachine} ;;
--version) echo 1.0 ;;
*)
    echo "$*" >>"{log}"
    while [ $# -gt 1 ]; do [ "$1" = -o ] && echo compiled >"$2"; shift; done ;;
esac
"""


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hook_of_the_wheel", REPO / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler(tmp_path: Path, dumpmachine: str) -> str:
    path = tmp_path / "compiler"
    path.write_text(COMPILER.format(dumpmachine=dumpmachine, log=tmp_path / "log"))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("said", "machine", "compiled", "left_out"),
    [
        ("x86_64-linux-gnu", "x86_64", "src/isa_avx512.cpp", "src/isa_neon.cpp"),
        ("aarch64-linux-gnu", "aarch64", "src/isa_neon.cpp", "src/isa_avx512.cpp"),
        ("aarch64-unknown-linux-musl", "aarch64", "src/isa_neon.cpp", "-mavx2"),
    ],
)
def test_a_wheel_is_for_the_machine_that_its_compiler_compiles_for(
    hook: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    machine: str,
    compiled: str,
    left_out: str,
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, f"echo {said}"))
    monkeypatch.setattr(sys.modules["sysconfig"], "get_platform", lambda: "linux-x86_64")
    (tmp_path / "csrc").symlink_to(REPO / "csrc")
    (tmp_path / "ollama_tiering").symlink_to(REPO / "ollama_tiering")
    app: Any = type("App", (), {"display_info": print, "display_warning": print})
    made = hook.PagedAttention(str(tmp_path), {}, None, None, str(tmp_path), "wheel", app)
    data: dict[str, Any] = {"force_include": {}}
    made.initialize("standard", data)
    assert data["tag"] == f"py3-none-linux_{machine}"
    told = (tmp_path / "log").read_text()
    assert compiled in told
    assert left_out not in told


def test_a_compiler_that_does_not_say_compiles_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.platform, "machine", lambda: "arm64")
    assert compiling.machine_of(compiler(tmp_path, "exit 1")) == "aarch64"
    assert compiling.machine_of(compiler(tmp_path, "true")) == "aarch64"


def test_another_machine_is_another_library(tmp_path: Path) -> None:
    csrc = REPO / "csrc"
    of = [
        compiling.fingerprint(csrc, compiler(tmp_path, f"echo {m}-")) for m in ("x86_64", "riscv64")
    ]
    assert of[0] != of[1]
