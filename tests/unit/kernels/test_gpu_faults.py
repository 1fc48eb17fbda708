"""`tiering kernel check` where a GPU is there and fails: what was found before it is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ollama_tiering.cli import main
from ollama_tiering.errors import MissingTool
from ollama_tiering.kernels import check, check_gpu
from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.samples import Problem

pytestmark = pytest.mark.usefixtures("numpy_kernels")
SMALL = {"a": Problem(1, 1, 64, 64, 4), "b": Problem(1, 1, 64, 64, 5)}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["kernel", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


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
