"""What the steps that ask Ollama call a success, with answers made up."""

from __future__ import annotations

import subprocess

import pytest

from ollama_tiering.launch.ollama import Generated
from ollama_tiering.launch.server_log import LoadPlan
from scripts.gpuday import asking, bounds, measuring
from scripts.gpuday.asking import Asked, Sizes
from scripts.gpuday.steps import DONE, FAILED, LACKING

ALL = LoadPlan(9, 9, kv={"CUDA0": 1 << 20})


def answer(rate: float = 10.0, logprob: float = -0.5) -> Generated:
    return Generated(["a"], [[("a", logprob)]], 0.1, 0.2, 700, rate)


class FakeAsker:
    """Answers by label; what no label names is answered as stock's."""

    def __init__(self, **by_label: tuple[LoadPlan, Generated]) -> None:
        self.sizes: Sizes = asking.small()
        self.by_label = {label.replace("_", " "): one for label, one in by_label.items()}
        self.asked: list[tuple[str, dict[str, str], int | None]] = []

    def free_bytes(self) -> int:
        return 8 << 30

    def ask(self, label: str, env: dict[str, str], num_ctx: int | None = None) -> Asked:
        self.asked.append((label, dict(env), num_ctx))
        return Asked(label, num_ctx or 0, *self.by_label.get(label, (ALL, answer())))


REFERENCE = Asked("stock", 0, ALL, answer()).digest


def test_one_bit_makes_another_digest_and_no_answer_is_none() -> None:
    other = Asked("x", 0, ALL, answer(logprob=-0.5000000001))
    assert other.digest != REFERENCE
    assert Asked("x", 0, ALL, Generated()).digest == "no answer"


def test_hot_none_and_half_are_asked_and_each_must_be_stocks() -> None:
    asker = FakeAsker()
    outcome = asking.sequential(asker, REFERENCE)  # type: ignore[arg-type]
    assert outcome.status == DONE
    hot = [env["OLLAMA_PAGED_HOT_LAYERS"] for _, env, _ in asker.asked]
    assert hot == ["8", "0", "4"]
    assert {env["OLLAMA_PAGED_PREFETCH"] for _, env, _ in asker.asked} == {"0"}
    assert {env["OLLAMA_PAGED_MIRROR"] for _, env, _ in asker.asked} == {"0"}
    asker = FakeAsker()
    asker.by_label["in turn, 0 of 8 hot"] = ALL, answer(logprob=-0.6)
    outcome = asking.sequential(asker, REFERENCE)  # type: ignore[arg-type]
    assert outcome.status == FAILED
    assert outcome.why == "another answer than stock's: in turn, 0 of 8 hot"


def test_mirrors_are_asked_beside_copies_ahead_and_must_be_stocks() -> None:
    asker = FakeAsker()
    outcome = asking.prefetch(asker, REFERENCE, {}, None)  # type: ignore[arg-type]
    assert outcome.status == DONE
    mirrored = [label for label, env, _ in asker.asked if "OLLAMA_PAGED_MIRROR" not in env]
    assert mirrored == ["mirrors, 0 of 8 hot"]
    asker.by_label[mirrored[0]] = ALL, answer(logprob=-0.6)
    outcome = asking.prefetch(asker, REFERENCE, {}, None)  # type: ignore[arg-type]
    assert outcome.why == "another answer than stock's: mirrors, 0 of 8 hot"


def test_stock_without_all_layers_is_no_reference() -> None:
    assert asking.stock(FakeAsker()).figures["digest"] == REFERENCE  # type: ignore[arg-type]
    asker = FakeAsker(stock=(LoadPlan(5, 9), answer()))
    assert asking.stock(asker).status == FAILED  # type: ignore[arg-type]


def test_rates_of_the_bus_are_judged_only_with_all_their_parts() -> None:
    sizes = asking.small()
    used = (700 + 8) * sizes.shape.kv_bytes_per_token
    pinned = 10.0 * used  # a token's copies take 0.1 s
    staging, ahead = asking.copy_bounds(sizes, 8.0, 5.0, pinned)
    assert staging.value == pytest.approx(0.8)
    assert ahead.value == pytest.approx((0.2 - 0.125) / 0.1)
    assert [b.value for b in asking.copy_bounds(sizes, 8.0, 5.0, None)] == [None, None]
    staging, ahead = asking.copy_bounds(sizes, 8.0, None, pinned)
    assert (staging.holds, ahead.holds) == (False, None)


def test_a_planner_that_loses_layers_is_a_failure_and_so_is_nothing_to_plan() -> None:
    divided = LoadPlan(4, 9), answer(5.0)
    good = FakeAsker()
    good.by_label["stock's plan"] = divided
    outcome = asking.planner(good, REFERENCE)  # type: ignore[arg-type]
    assert (outcome.status, outcome.figures["paged_to_divided"]) == (DONE, 2.0)
    room = {env["OLLAMA_GPU_OVERHEAD"] for _, env, _ in good.asked}
    assert room == {str((8 << 30) - (457 << 20) - good.sizes.room_bytes)}
    assert {num_ctx for _, _, num_ctx in good.asked} == {32768}
    assert asking.planner(FakeAsker(), REFERENCE).status == FAILED  # type: ignore[arg-type]
    lost = FakeAsker(paged=divided)
    lost.by_label["stock's plan"] = divided
    assert "paged 4, of 9" in asking.planner(lost, REFERENCE).why  # type: ignore[arg-type]


def test_all_hot_is_compared_with_stock_by_the_best_of_two() -> None:
    asker = FakeAsker(all_hot=(ALL, answer(9.9)))
    outcome = asking.graphs(asker, REFERENCE)  # type: ignore[arg-type]
    assert [bound.value for bound in outcome.bounds] == [pytest.approx(0.99)]
    assert len(asker.asked) == 8


RATIO = {"bound": 0.7, "at_least": True, "predicted": None}
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
    ]},
]  # fmt: skip


def test_the_bounds_are_the_worst_of_the_kernel_reports_ratios() -> None:
    found = {bound.name: bound.value for bound in measuring.worst(LINES)}
    assert found == {bounds.VRAM.name: 0.72, bounds.COLD.name: 0.97, bounds.STEP_TIME.name: 1.04}
    assert measuring.worst(LINES[:1]) == []


def test_a_report_without_a_gpu_lacks_it_and_one_that_failed_failed() -> None:
    none = {"case": "GPU", "ok": False, "failed": "no NVIDIA driver here", "status": "NO_DEVICE"}
    outcome = measuring.of_report([none], "")
    assert (outcome.status, outcome.why) == (LACKING, "no NVIDIA driver here")
    assert measuring.of_report([], "a kernel on a GPU needs nvidia.cuda_nvrtc").status == LACKING
    broken = {"case": "x", "ok": False, "failed": "exit code -11"}
    outcome = measuring.of_report([*LINES, broken], "")
    assert outcome.status == FAILED
    assert "x" in outcome.why
    assert measuring.of_report(LINES, "").status == DONE


def ended(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    done = subprocess.CompletedProcess([], code, said)
    monkeypatch.setattr(measuring, "_run", lambda *_: done)


@pytest.mark.parametrize(
    ("code", "said", "status"),
    [
        (0, "....\n41 passed, 2 deselected in 80.1s", DONE),
        (0, "s\n1 skipped, 2 deselected in 0.3s", LACKING),  # nothing ran, which is no result
        (5, "no tests ran in 0.01s", LACKING),
        (1, "FAILED tests/gpu/x.py\n1 failed, 40 passed in 80.1s", FAILED),
        (1, "/usr/bin/python3: No module named pytest", LACKING),
        (-11, "Fatal Python error: Segmentation fault", FAILED),
    ],
)
def test_a_suite_that_did_not_run_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str, status: str
) -> None:
    ended(monkeypatch, code, said)
    assert measuring.suite().status == status


@pytest.mark.parametrize(
    ("code", "said", "status"),
    [
        (0, "{}\n========= ERROR SUMMARY: 0 errors", DONE),
        (9, "========= ERROR SUMMARY: 2 errors", FAILED),
        (0, "{}", FAILED),  # it says nothing: it was not there
        (1, "Device not supported\n========= ERROR SUMMARY: 0 errors", FAILED),
    ],
)
def test_only_a_sanitizer_that_found_no_error_is_done(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str, status: str
) -> None:
    ended(monkeypatch, code, said)
    assert measuring.sanitizer({"compute-sanitizer"}).status == status
    assert measuring.sanitizer({}).status == LACKING
