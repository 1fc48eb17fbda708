"""Why there is no GPU, in the words of who lacks what; and what is there and fails is no "no GPU".
(What a GPU computes: tests/gpu; the whole way on an emulated driver: test_cuda_fake.py.)"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

from ollama_tiering.cli import main
from ollama_tiering.errors import MissingTool
from ollama_tiering.kernels import check, check_gpu, gpu_report
from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.samples import Problem

SMALL = {"a": Problem(1, 1, 64, 64, 4), "b": Problem(1, 1, 64, 64, 5)}


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    devices, why = check_gpu.gpu_devices()
    assert devices == []
    assert "no NVIDIA driver here" in why


@pytest.mark.parametrize(
    "error",
    [
        PaError(PaStatus.DEVICE_ERROR, "cuInit: unknown error (999)"),
        PaError(PaStatus.UNSUPPORTED, "the NVIDIA driver is older than this code"),
    ],
)
def test_a_driver_that_does_not_start_is_an_error(
    error: PaError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(check_gpu, "GpuDevice", fails)
    with pytest.raises(PaError) as caught:
        check_gpu.gpu_devices()
    assert caught.value is error


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["kernel", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.usefixtures("numpy_kernels")
def test_kernel_check_without_the_compiler_of_the_gpu_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking() -> Any:
        raise MissingTool("a kernel on a GPU needs NVRTC", hint="pip install it")

    monkeypatch.setattr(check_gpu, "gpu_devices", lacking)
    monkeypatch.setattr(check, "PROBLEMS", SMALL)
    assert run("check") == MissingTool.exit_code
    said = capsys.readouterr()
    assert "CPU, avx512" in said.out  # the CPU was checked all the same
    assert "pip install it" in said.err


class Faulty:
    """A GPU whose second shape ends its context."""

    name, bound = "GPU, CC 8.6", 1e-4

    def __init__(self) -> None:
        self.asked = 0

    def compute(self, sample: Any) -> Any:
        self.asked += 1
        if self.asked == 2:
            raise PaError(PaStatus.DEVICE_ERROR, "cuStreamSynchronize: illegal access (700)")
        return check.exact(sample, [0]), 1e-3


@pytest.mark.usefixtures("numpy_kernels")
def test_rows_before_a_fault_are_printed_and_the_device_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Faulty()
    monkeypatch.setattr(check_gpu, "gpu_devices", lambda: ([gpu], ""))
    problems = SMALL | {"c": Problem(1, 1, 64, 64, 6)}
    monkeypatch.setattr(check, "PROBLEMS", problems)
    assert run("check", "--json") == 1
    said = capsys.readouterr()
    rows = [r for r in json.loads(said.out)["rows"] if r["device"] == gpu.name]
    assert [row["ok"] for row in rows] == [True, False, False]
    assert "illegal access" in rows[1]["failed"]
    assert "not run" in rows[2]["failed"]
    assert "b on GPU, CC 8.6" in said.err
    assert gpu.asked == 2


def test_the_report_without_a_driver_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {"GPU": {"case": "GPU", "ok": False, "failed": "no NVIDIA driver here"}}
    monkeypatch.setattr(gpu_report, "one", lambda name: lines[name])
    monkeypatch.setattr(gpu_report.nvrtc, "compiler", lambda: None)
    assert run("report") == 1
    said = capsys.readouterr()
    assert "FAILED  GPU" in said.out
    assert "no NVIDIA driver" in said.out
    assert "compute-sanitizer" in said.out


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("print('not JSON')", "exit code 0"),
        ("import os; os._exit(134)", "exit code 134"),
        ("import sys; sys.exit('CUDA_ERROR: all is lost')", "exit code 1: CUDA_ERROR: all is lost"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ('print(\'{"case": "x", "ok": true}\')', "answered"),
        ('print(\'{"case": "GPU", "ok": true}\'); raise SystemExit(3)', "after its answer"),
    ],
)
def test_however_a_case_ends_there_is_a_line(
    code: str, failed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "ends_so.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_report, "MODULE", "ends_so")
    line = gpu_report.one("GPU", timeout_s=1.0)
    assert line["case"] == "GPU"
    assert not line["ok"]
    assert failed in line["failed"]
    assert failed in gpu_report.text(line)


def test_a_case_that_nobody_knows_is_named() -> None:
    assert run("report", "--case", "first contac") == 2
