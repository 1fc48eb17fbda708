"""What the parts make of their measurements: ratios, bounds, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from measure.attention import __main__ as program
from measure.attention import accuracy, decode, prefill
from measure.attention.__main__ import attention
from measure.attention.alternate import Series
from measure.attention.peaks import Peaks
from measure.attention.rig import (
    CACHED,
    FLASH,
    FMA,
    OURS,
    PLAIN,
    READ,
    AttentionRig,
    Comparison,
    roofline,
)
from ollama_tiering.kernels.samples import Problem


class FixedPeaks(Peaks):
    """100 GFLOP/s and 10 GB/s; no multiply-adds to measure for `scalar`."""

    def __init__(self, *_args: object) -> None:
        pass

    def fma_flops(self, isa: str) -> float:
        return 0.0 if isa == "scalar" else 100e9

    def read_bytes(self) -> float:
        return 10e9

    def copy_bytes(self) -> float:
        return 5e9


def rig(**changes: object) -> AttentionRig:
    settings: dict[str, object] = {"threads": 1, "isa": "avx512", "rounds": 1}
    settings |= {"peaks": FixedPeaks(), "ggml_program": None, "why_no_ggml": "none is cached"}
    return AttentionRig(**(settings | changes))  # type: ignore[arg-type]


def compared(problem: Problem, **seconds: float) -> Comparison:
    names = {"ours": OURS, "flash": FLASH, "plain": PLAIN, "fma": FMA, "read": READ}
    names["cached"] = CACHED
    series = {names[side]: Series((value, 2 * value)) for side, value in seconds.items()}
    return Comparison(problem, series, {OURS: 1e-6, FLASH: 0.4, PLAIN: 1e-5})


def test_prefill_counts_the_causal_half_and_divides_their_time_by_ours() -> None:
    problem = Problem(16, 8, 128, 128, 8192, n_q=8192)
    pairs = 8192 * 8193 // 2
    assert problem.flops == pairs * 16 * 4 * 128
    comparison = compared(
        problem,
        ours=problem.flops / 80e9,
        flash=20 * problem.flops / 80e9,
        fma=1 / 100e9,
        read=1 / 10e9,
    )
    of_peak, flash = prefill._ratios(rig(), comparison)
    assert of_peak.value == pytest.approx(0.8)
    assert of_peak.bound == 0.75
    assert flash.value == pytest.approx(20)
    assert flash.bound == 18
    (_, avx2) = prefill._ratios(rig(isa="avx2"), comparison)
    assert avx2.bound == 10


def test_decode_counts_each_byte_once() -> None:
    problem = decode.decode_problem(65536)
    assert problem.kv_bytes == 65536 * 8 * 2 * 128 * 2
    comparison = compared(problem, ours=problem.kv_bytes / 9e9, plain=1.0, read=1 / 10e9)
    of_read, plain = decode._ratios(comparison)
    assert of_read.value == pytest.approx(0.9)
    assert (of_read.bound, plain.bound) == (0.8, 4.5)
    short = compared(decode.decode_problem(8192), ours=1e-3, read=1 / 10e9)
    assert [ratio.bound for ratio in decode._ratios(short)] == [None]


def test_decode_stands_beside_computing_in_a_cache_and_reading() -> None:
    """10 GB/s and 100 GFLOP/s: 26.8 ms of reading, 13.4 ms of multiply-adds."""
    problem = decode.decode_problem(65536)
    comparison = compared(problem, ours=0.04, cached=0.0161, read=1 / 10e9, fma=1 / 100e9)
    _, longer, both, arithmetic = decode._ratios(comparison)
    assert longer.value == pytest.approx(40 / 26.84, rel=1e-3)
    assert both.value == pytest.approx(40 / (26.84 + 16.1), rel=1e-3)
    assert arithmetic.value == pytest.approx(16.1 / 13.42, rel=1e-3)
    slow = compared(problem, ours=0.04, cached=0.032, read=1 / 10e9)
    assert decode._ratios(slow)[1].value == pytest.approx(40 / 32)


def test_the_roofline_names_its_limit() -> None:
    problem = decode.decode_problem(65536)
    series = {READ: Series((1 / 10e9,)), FMA: Series((1 / 100e9,))}
    assert problem.kv_bytes == 268435456
    assert roofline(problem, series) == "roofline 26.8 ms (reading)"
    slow = {READ: Series((1 / 10e9,)), FMA: Series((1 / 10e9,))}
    assert problem.flops == 1342177280
    assert roofline(problem, slow) == "roofline 134 ms (multiply-adds)"


def test_fewer_keys_than_the_bounds_are_for_have_no_bound() -> None:
    assert rig(max_keys=100).keys(8192) == 100
    assert rig(max_keys=100).bound(0.75, 8192) is None
    assert rig(max_keys=8192).bound(0.75, 8192) == 0.75


@pytest.mark.usefixtures("numpy_kernels")
def test_accuracy_finds_an_error(numpy_kernels: object, monkeypatch: pytest.MonkeyPatch) -> None:
    section = accuracy.measure(rig(max_keys=70))
    assert [ratio.what for ratio in section.ratios] == [
        f"{keys}, {logits}, ours"
        for keys in ("1 key", "70 keys")
        for logits in ("diffuse", "sharp", "peaked")
    ]
    assert all(ratio.met for ratio in section.ratios)
    assert any("none is cached" in note for note in section.notes)
    for skew in (1e-3, float("nan")):
        monkeypatch.setattr(numpy_kernels, "skew", skew)
        assert not any(ratio.met for ratio in accuracy.measure(rig(max_keys=1)).ratios)


@pytest.mark.usefixtures("numpy_kernels")
def test_every_part_runs_without_ggml_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(program, "peaks_library", lambda report: Path("none"))
    monkeypatch.setattr(program, "Peaks", FixedPeaks)
    out = tmp_path / "attention.md"
    command = ["--keys", "40", "--rounds", "2", "--json", "--out", str(out)]
    result = CliRunner().invoke(attention, command)
    assert result.exit_code == 0, result.output
    assert "tiering fetch" in result.stderr
    document = json.loads(result.stdout)
    parts = [section["section"] for section in document["results"]]
    assert parts == ["accuracy", "prefill", "decode", "quant", "peaked"]
    quantised = {ratio["what"] for ratio in document["results"][3]["ratios"]}
    assert "decode, 40 keys, q4_0, ours ÷ longer of in cache and reading" in quantised
    assert "decode, 40 keys, f16, in cache ÷ multiply-adds alone" in quantised
    assert len(document["results"][3]["seconds"]["q8_0, in cache"]) == 2 * decode.REPEATS
    assert len(document["results"][4]["seconds"]["decode, 40 keys, peaked"]) == 2 * decode.REPEATS
    assert not any(
        "ggml" in ratio["what"] for one in document["results"] for ratio in one["ratios"]
    )
    text = out.read_text(encoding="utf-8")
    assert text.count("No line for ggml") == 3
    assert "## CPU decode" in text
    assert "memcpy: 5.0 GB/s" in text
    for part in parts:
        assert f"](attention-{part}.svg)" in text
        assert (tmp_path / f"attention-{part}.svg").is_file()
