"""Why there is no GPU, in the words of who lacks what; and what is there and fails is no "no GPU".
(What a GPU computes: tests/attention/gpu; the whole way on an emulated driver: test_cuda_fake.py.)
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ollama_tiering.cli import main
from ollama_tiering.kernels import check_gpu, gpu_report
from ollama_tiering.kernels.binding import PaError, PaStatus


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
