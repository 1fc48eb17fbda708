"""docs/attention/long-context.md says what the models of K/V and of the bus say."""

from __future__ import annotations

import re

import pytest

from ollama_tiering.config import GIB
from ollama_tiering.kernels.known_models import GO_ENGINE, MODELS
from ollama_tiering.kernels.shape import Dtype
from ollama_tiering.patchset.upstream import SourceCache
from scripts.attention import bus_model, long_context_page
from scripts.attention.bus_model import BUSES, Bus

TEXT = long_context_page.PAGE.read_text(encoding="utf-8")


def _rows(table: str) -> list[list[str]]:
    lines = table.strip().splitlines()
    widths = {line.count("|") for line in lines}
    assert len(widths) == 1, "a table has as many cells in each row"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_bytes_of_a_token_are_those_of_its_rows() -> None:
    rows = {row[0]: row for row in _rows(long_context_page.models_table())}
    assert set(rows) == {model.name for model in MODELS}
    # 40 layers, K and V, 8 heads of 128 values: 2 bytes each, or 34 for 32 of them
    assert float(rows["qwen3:14b"][2]) * 1024 == 40 * 2 * 8 * 128 * 2
    assert float(rows["qwen3:14b"][3]) * 1024 == 40 * 2 * 8 * 128 // 32 * 34
    assert float(rows["qwen3:14b"][4]) * GIB == 32768 * 40 * 2 * 8 * 128 * 2
    gemma = rows["gemma3:4b"]
    window = 29 * 1024 * 2 * 4 * 256 * 2
    assert float(gemma[4]) == round((32768 * 5 * 2 * 4 * 256 * 2 + window) / GIB, 1)


def test_the_example_in_the_text_is_what_the_models_say() -> None:
    said = re.search(
        r"(\S+) with 32K tokens has ([\d.]+) GiB of K/V in f16. If 2 GiB .* at most (\S+) tokens/s,"
        r" and\s+PCIe 3.0 at most (\S+)\.\n",
        TEXT,
    )
    assert said
    model = next(one for one in MODELS if one.name == said[1])
    assert float(said[2]) == round(model.kv_bytes(32768, Dtype.F16) / GIB, 1)
    for bus, rate in ((BUSES[1], said[3]), (BUSES[0], said[4])):
        exact = bus_model.decode_tokens_per_second(2 * GIB, bus)
        assert float(rate) == pytest.approx(exact, rel=0.05)


def test_what_a_mirror_saves_in_the_example_is_what_its_room_holds() -> None:
    said = re.search(
        r"With (\d+)K tokens of these 32K, ([\d.]+) GiB cross the bus for each token, and\s+with up"
        r" to (\d+)K\s+tokens nothing does",
        TEXT,
    )
    assert said
    token = next(one for one in MODELS if one.name == "qwen3:14b").kv_bytes(1, Dtype.F16)
    on_gpu = 32768 - 2 * GIB // token  # cells
    assert int(said[3]) == on_gpu // 1024
    assert float(said[2]) == round((int(said[1]) * 1024 - on_gpu) * token / GIB, 2)


def test_rates_are_those_of_the_bus_over_the_bytes() -> None:
    bus = Bus("slow", 1.0)
    assert bus_model.decode_tokens_per_second(0.1e9 * bus_model.USABLE_SHARE, bus) == 10
    rows = _rows(long_context_page.decode_table())
    assert [row[0] for row in rows] == [bus.name for bus in BUSES]
    assert [float(row[1]) for row in rows] == [12.6, 25.2, 50.4]
    for row in rows:
        rates = [float(cell) for cell in row[2:]]
        assert rates == sorted(rates, reverse=True)
    assert f"{bus_model.USABLE_SHARE:.0%}".replace("%", " %") in TEXT


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 5000])
def test_each_batch_of_a_prompt_reads_what_is_before_and_in_it(tokens: int) -> None:
    batches = range(0, tokens, 512)
    cells = sum(min(tokens, begin + 512) for begin in batches)
    bus = Bus("", 1 / bus_model.USABLE_SHARE)
    assert bus_model.prefill_seconds(tokens, 1.0, bus) == pytest.approx(cells / 1e9)


def test_the_nominal_rates_are_those_of_16_lanes() -> None:
    for bus, transfers in zip(BUSES, (8, 16, 32), strict=True):
        assert bus.nominal_gb_s == pytest.approx(16 * transfers / 8 * 128 / 130, rel=1e-3)


def test_the_engine_of_each_model_is_what_ollama_chooses() -> None:
    cache, tag = SourceCache(), "v0.16.3"
    if not cache.has(tag):
        pytest.skip(f"{tag} is not in the source cache {cache.root} (run `tiering fetch`)")
    source = (cache.read(tag, "fs/ggml/ggml.go") or b"").decode()
    chosen = source.partition("OllamaEngineRequired() bool {")[2].partition("}, kv.")[0]
    required = set(re.findall(r'"([\w-]+)"', chosen))
    assert {model.arch for model in MODELS} & required == GO_ENGINE
