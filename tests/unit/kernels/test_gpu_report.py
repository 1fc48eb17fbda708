"""What `tiering kernel report` says of a case, and what the model of a GPU says beside it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ollama_tiering.kernels import gpu_model, gpu_predicted, gpu_report, nvrtc
from ollama_tiering.kernels.gpu_model import ThreadBlock
from ollama_tiering.kernels.nvrtc import Instance

CASE = {
    "case": "first contact",
    "ok": True,
    "error": 1e-6,
    "bound": 1e-4,
    "seconds": 0.001,
    "registers": {"pa_decode": 168, "pa_wide": 255},
    "spilled": [],
    "blocks": {"pa_decode": 3, "pa_wide": 1},
}
INSTANCE = Instance(128, 128, "f16", "f16", 5, 16)
BLOCK = ThreadBlock(128, 168, 34 << 10)


def test_a_case_says_how_many_blocks_a_multiprocessor_holds() -> None:
    said = gpu_report.text(CASE)
    assert "registers decode 168 wide 255" in said
    assert "blocks per multiprocessor decode 3 wide 1" in said
    assert "blocks" not in gpu_report.text(CASE | {"blocks": {}})


def test_a_ratio_says_what_was_predicted_and_is_judged_by_its_bound() -> None:
    ratio = {"name": "decode", "value": 0.71, "bound": 0.7, "at_least": True, "predicted": 0.86}
    line = {"case": "x", "ok": True, "ratios": [ratio, ratio | {"predicted": None}]}
    said = gpu_report.text(line)
    assert "decode 0.710 (≥ 0.70, predicted 0.86); decode 0.710 (≥ 0.70)" in said


@dataclass
class FakeDevice:
    arch: int
    name: str = "a card"

    def attribute(self, name: str) -> int:
        return {"multiprocessors": 82, "clock_khz": 1_695_000}[name]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_predicted, "thread_blocks", lambda *_: {"pa_decode": BLOCK})


@pytest.mark.usefixtures("blocks")
def test_the_prediction_for_this_gpu_is_the_models_for_such_a_card() -> None:
    rate = 936e9 * gpu_model.READ_SHARE  # as the 3090 of the list reads
    [card] = [gpu for gpu in gpu_model.GPUS if gpu.name == "RTX 3090"]
    how = {"group": 5, "n_cells": 32768, "n_kv_head": 8}
    found = gpu_predicted.share(FakeDevice(86), INSTANCE, rate=rate, **how)  # type: ignore[arg-type]
    expected = gpu_model.decode(card, BLOCK, group=5, n_cells=32768).share
    assert found == pytest.approx(expected, rel=1e-3)
    assert gpu_predicted.resident(INSTANCE, 86) == {"pa_decode": 2}


@pytest.mark.usefixtures("blocks")
def test_of_a_chip_that_the_model_does_not_know_it_says_nothing() -> None:
    how = {"group": 5, "n_cells": 32768, "n_kv_head": 8, "rate": 1e12}
    assert gpu_predicted.share(FakeDevice(130), INSTANCE, **how) is None  # type: ignore[arg-type]
    assert gpu_predicted.resident(INSTANCE, 130) == {}


def test_the_model_knows_every_chip_that_images_are_made_for() -> None:
    assert set(gpu_model.LIMITS) == set(nvrtc.ARCHS)
    assert {gpu.arch for gpu in gpu_model.GPUS} == set(nvrtc.ARCHS)
