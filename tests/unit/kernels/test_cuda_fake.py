"""What Python does with a GPU, on a driver that emulates one (csrc/tests/cuda/fake_libcuda.cpp):
the report, the benchmark and tests/attention/gpu, each in a process that finds it as libcuda.so.1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ollama_tiering.errors import TieringError
from ollama_tiering.kernels import library, nvrtc
from ollama_tiering.kernels.nvrtc import Instance

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        nvrtc.compiler()
    except TieringError as error:
        pytest.skip(f"{error.message}; {error.hint}")
    library.load()  # compiled now, not within a case's time
    for instance in (Instance(64, 64, "f16", "f16", 5, 16), Instance(64, 64, "q8_0", "f16", 5, 4)):
        nvrtc.image(instance, 80)  # kept: NVRTC opens libcuda, too, and falls over this one
    nvrtc.read_kernel(80)
    folder = tmp_path_factory.mktemp("driver")
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-DPA_EMULATE", "-U_FORTIFY_SOURCE"]
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Wno-unknown-pragmas", "-Werror"]
    source = "tests/cuda/fake_libcuda.cpp"
    made = subprocess.run(
        [*command, *warnings, "-I.", "-Iinclude", source, "-o", str(folder / "libcuda.so.1")],
        cwd=CSRC,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-4000:]
    return folder


def run(fake: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"LD_LIBRARY_PATH": str(fake)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def features(fake: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """tests/attention/gpu's, without a cache in the checkout and without clearing away what other
    sessions left in the shared folder for temporary files: what cannot be removed there fails a
    session.
    """
    apart = ["-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")]
    tests = "tests/attention/gpu/test_gpu_features.py"
    return run(fake, "-m", "pytest", "-q", *apart, "-m", "gpu", tests, **environment)


def report(fake: Path, out: Path, **environment: str) -> tuple[int, list[dict[str, object]], str]:
    ran = run(
        fake,
        *["-m", "ollama_tiering", "kernel", "report", "--out", str(out)],
        *["--case", "GPU", "--case", "first contact"],
        **environment,
    )
    return ran.returncode, [json.loads(x) for x in out.read_text().splitlines()], ran.stdout


def test_the_report_of_a_gpu_that_works(fake: Path, tmp_path: Path) -> None:
    code, lines, said = report(fake, tmp_path / "report.jsonl")
    assert code == 0, said
    assert [line["case"] for line in lines] == ["GPU", "first contact"]
    assert lines[0]["compute_capability"] == 8.0
    error = lines[1]["error"]
    assert isinstance(error, float)
    assert error < 1e-5
    assert "emulation, CC 8.0" in said
    assert "compute-sanitizer" in said


@pytest.mark.parametrize("call", ["cuLaunchKernel:1", "cuStreamSynchronize:1", "cuMemAlloc_v2:1"])
def test_a_fault_leaves_the_lines_before_it(fake: Path, tmp_path: Path, call: str) -> None:
    code, lines, said = report(fake, tmp_path / "report.jsonl", PA_FAKE_FAIL=call)
    assert code == 1
    assert [line["ok"] for line in lines] == [True, False]
    assert "illegal memory access" in said


def test_a_driver_that_does_not_start_is_a_failure_and_none_without_a_gpu_is_said(
    fake: Path, tmp_path: Path
) -> None:
    code, lines, _ = report(fake, tmp_path / "broken.jsonl", PA_FAKE_INIT="999")
    assert (code, [line["status"] for line in lines]) == (1, ["DEVICE_ERROR"])
    code, lines, _ = report(fake, tmp_path / "none.jsonl", PA_FAKE_INIT="100")
    assert (code, [line["status"] for line in lines]) == (1, ["NO_DEVICE"])
    broken = features(fake, tmp_path, PA_FAKE_INIT="999")
    assert broken.returncode == 1, broken.stdout[-2000:] + broken.stderr[-2000:]
    none = features(fake, tmp_path, PA_FAKE_INIT="100")
    assert none.returncode == 0, none.stdout[-2000:] + none.stderr[-2000:]
    assert "skipped" in none.stdout
    assert "passed" not in none.stdout


def test_the_suite_for_a_gpu_passes_on_the_emulated_one(fake: Path, tmp_path: Path) -> None:
    ran = features(fake, tmp_path)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "skipped" not in ran.stdout


BENCH = """
from ollama_tiering.kernels import gpu_bench
from ollama_tiering.kernels.gpu_device import GpuDevice
sizes = gpu_bench.Sizes(
    working_set_bytes=1 << 17, n_kv_head=2, d=64, repeats=1, piece_cells=64, cold_layers=1
)
with GpuDevice() as device:
    ratios = [
        gpu_bench.hot_decode(device, sizes, 5, 128),
        gpu_bench.hot_decode(device, sizes, 5, 128, masked=True),
        gpu_bench.hot_decode(device, sizes, 5, 128, tensor_cores=True),
        *gpu_bench.cold_decode(device, sizes, 5, 256),
        gpu_bench.cold_prefill(device, sizes, 5, 256, n_q=4),
    ]
    assert all(ratio.value > 0 for ratio in ratios), ratios
    print(len(ratios))
"""


def test_the_benchmark_runs_to_its_end(fake: Path) -> None:
    ran = run(fake, "-c", BENCH)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.strip() == "6"
