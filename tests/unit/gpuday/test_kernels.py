"""What the steps that measure kernels call a success."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.patchset.run import Finished
from scripts.gpuday import kernels
from scripts.gpuday.steps import DONE, FAILED, LACKING, Day, Outcome

DAY = Day(Path("out"), Path("work"))
RATIO = {"bound": 0.7, "at_least": True}
LINES = [
    {"case": "GPU", "ok": True},
    {"case": "a", "ok": True, "ratios": [
        {"name": "VRAM decode, G=1, 8192 keys: rate / read", "value": 0.9, **RATIO},
        {"name": "VRAM decode, G=5, 8192 keys: rate / read", "value": 0.72, **RATIO},
        {"name": "VRAM decode, G=8, 8192 keys, tensor cores: rate / read", "value": 0.1, **RATIO},
    ]},
    {"case": "b", "ok": True, "ratios": [
        {"name": "cold decode, G=5, 16384 keys: rate / pinned copy", "value": 0.97, **RATIO},
        {"name": "cold decode, G=5, 16384 keys: time / max(copy, compute)", "value": 1.04, **RATIO},
        {"name": "cold decode, G=8, 16384 keys: time / max(copy, compute)", "value": 1.01, **RATIO},
    ]},
]  # fmt: skip


def test_the_bounds_are_the_worst_of_the_kernel_reports_ratios() -> None:
    assert kernels.worst(LINES) == {"vram": 0.72, "cold": 0.97, "step": 1.04}
    assert kernels.worst(LINES[:1]) == {}


def test_a_report_with_a_case_that_failed_failed_and_one_without_a_case_lacks() -> None:
    assert kernels.of_report(LINES, "").status == DONE
    broken = {"case": "x", "ok": False, "failed": "exit code -11"}
    outcome = kernels.of_report([*LINES, broken], "")
    assert (outcome.status, outcome.why) == (FAILED, "failed, or outside its bound: x")
    outcome = kernels.of_report([], "a kernel on a GPU needs nvidia.cuda_nvrtc")
    assert (outcome.status, outcome.why) == (LACKING, "a kernel on a GPU needs nvidia.cuda_nvrtc")


@pytest.mark.parametrize(
    ("step", "code", "said", "status"),
    [
        (kernels.suite, 0, "....\n41 passed, 2 deselected in 80.1s", DONE),
        (kernels.suite, 0, "s\n1 skipped, 2 deselected in 0.3s", LACKING),  # which is no result
        (kernels.suite, 5, "no tests ran in 0.01s", LACKING),
        (kernels.suite, 1, "FAILED tests/attention/gpu/x.py\n1 failed, 40 passed in 80.1s", FAILED),
        (kernels.suite, -11, "Fatal Python error: Segmentation fault", FAILED),
        (kernels.sanitizer, 0, "{}\n========= ERROR SUMMARY: 0 errors", DONE),
        (kernels.sanitizer, 9, "========= ERROR SUMMARY: 2 errors", FAILED),
        (kernels.sanitizer, 0, "{}", FAILED),  # it says nothing: it was not there
        (kernels.sanitizer, 1, "no device\n========= ERROR SUMMARY: 0 errors", FAILED),
    ],
)
def test_only_what_ran_and_found_no_error_is_done(
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[[Day], Outcome],
    code: int,
    said: str,
    status: str,
) -> None:
    done = Finished(code, said, tuple(said.splitlines()))
    monkeypatch.setattr(kernels, "run", lambda *_, **__: done)
    assert step(DAY).status == status
