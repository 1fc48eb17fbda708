"""The device code, the launcher and the ring without a GPU: csrc/tests/cuda, compiled and run."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-unknown-pragmas", "-Werror"]
# longjmp between stacks is what fibers are; fortified longjmp refuses it
EMULATE = ["-DPA_EMULATE", "-U_FORTIFY_SOURCE"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def run(*command: str | Path) -> str:
    ran = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, cwd=CSRC
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    return ran.stdout


def compile_objects(sources: list[str], folder: Path, *flags: str) -> list[Path]:
    def one(source: str) -> Path:
        made = folder / f"{Path(source).stem}.o"
        base = ["c++", "-std=c++17", "-O1", *WARNINGS, "-I.", "-Iinclude"]
        run(*base, *flags, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, sources))


@pytest.fixture(scope="module")
def host_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    names = ["driver", "device", "plan", "ring", "share"]
    folder = tmp_path_factory.mktemp("host")
    return compile_objects([f"cuda/host/{name}.cpp" for name in names], folder, "-Wconversion")


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emulate")
    names = ["emulate_decode", "emulate_tile", "emulate_main"]
    objects = compile_objects([f"tests/cuda/{name}.cpp" for name in names], folder, *EMULATE)
    run("c++", *objects, "-o", folder / "emulate")
    return folder / "emulate"


def test_kernels_agree_with_f64_and_do_not_race(emulate: Path) -> None:
    assert ", 0 failed" in run(emulate, "--seeds", "2")


def test_every_missing_barrier_is_noticed(emulate: Path) -> None:
    assert "mutants, 0 missed" in run(emulate, "--mutants")


def test_ring_order_overlap_cancellation_and_mistakes(
    host_objects: list[Path], tmp_path: Path
) -> None:
    objects = compile_objects(["tests/cuda/ring_test.cpp"], tmp_path)
    run("c++", *objects, *host_objects, "-ldl", "-o", tmp_path / "ring_test")
    said = run(tmp_path / "ring_test")
    assert "MISSED" not in said
    assert said.count("caught") == 5


def test_c_api_end_to_end_with_a_driver_that_emulates(
    host_objects: list[Path], tmp_path: Path
) -> None:
    objects = compile_objects(["tests/cuda/launch_test.cpp"], tmp_path, *EMULATE)
    run("c++", *objects, *host_objects, "-ldl", "-o", tmp_path / "launch_test")
    assert "0 failed checks" in run(tmp_path / "launch_test")


def test_splits_fill_whole_turns_and_divisions_are_exact(tmp_path: Path) -> None:
    objects = compile_objects(["tests/cuda/rules_test.cpp"], tmp_path, *EMULATE)
    run("c++", *objects, "-o", tmp_path / "rules_test")
    assert "0 failed checks" in run(tmp_path / "rules_test")
