"""What `tiering kernel report` says of a case."""

from __future__ import annotations

from ollama_tiering.kernels import gpu_report

CASE = {
    "case": "first contact",
    "ok": True,
    "error": 1e-6,
    "bound": 1e-4,
    "seconds": 0.001,
    "registers": {"pa_decode": 168, "pa_wide": 255},
    "spilled": [],
}


def test_a_case_says_what_its_kernels_take() -> None:
    assert "registers decode 168 wide 255" in gpu_report.text(CASE)
    assert "SPILLS: pa_wide" in gpu_report.text(CASE | {"spilled": ["pa_wide"]})


def test_a_ratio_says_its_bound() -> None:
    ratio = {"name": "decode", "value": 0.71, "bound": 0.7, "at_least": True}
    line = {"case": "x", "ok": True, "ratios": [ratio, ratio | {"at_least": False}]}
    assert "decode 0.710 (≥ 0.70); decode 0.710 (≤ 0.70)" in gpu_report.text(line)
