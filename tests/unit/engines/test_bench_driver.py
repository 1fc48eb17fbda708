"""The driver of the benchmarks: the attention it asks for, and how it names the one it got."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.engines.bench_driver import BenchDriver, GateDriver, Untiered
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.store.block.pb import block_store_pb2 as pb

LOADED = 'msg=load request="{Operation:commit Parallel:1 FlashAttention:%s KvSize:4096}"\n'
RESOLVED = "llama_context: Flash Attention was auto, set to %s\n"


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    with Scratch("test") as made:
        yield made


def log(driver: BenchDriver, text: str) -> None:
    with driver._log.open("a") as file:
        file.write(text)


@pytest.mark.parametrize("attention", ["exact", "stock"])
def test_every_driver_tells_its_server_which_attention(scratch: Scratch, attention: str) -> None:
    binary = Path("/no/ollama")
    for driver in (
        BenchDriver(binary, scratch, ctx=256, attention=attention),
        GateDriver(binary, scratch, ctx=256, attention=attention, ram=False),
        Untiered(binary, scratch, ctx=256, attention=attention),
    ):
        assert driver._env["OLLAMA_CPU_ATTENTION"] == attention


def test_threads_are_asked_for_only_where_a_number_is_given(scratch: Scratch) -> None:
    binary = Path("/no/trees/v0.16.3-native-stock/src/ollama")
    given = Untiered(binary, scratch, ctx=256, attention="stock", threads=2)
    assert given._options == {"num_ctx": 256, "num_thread": 2}
    assert Untiered(binary, scratch, ctx=256, attention="stock")._options == {"num_ctx": 256}


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("v0.16.3-native-stock", "this machine"),
        ("v0.16.3-variants-cuda12", "several"),
        ("x", "not"),
    ],
)
def test_a_build_says_what_it_was_compiled_for(scratch: Scratch, folder: str, words: str) -> None:
    binary = Path("/no/trees") / folder / "src/ollama"
    driver = BenchDriver(binary, scratch, ctx=256, attention="exact")
    assert driver.built_for.startswith(words)


def test_stock_is_named_by_the_flash_attention_of_the_last_load(scratch: Scratch) -> None:
    driver = Untiered(Path("/no/ollama"), scratch, ctx=256, attention="stock")
    log(driver, "nothing yet\n")
    assert (driver.flash, driver.attention) == (None, "stock")
    log(driver, LOADED % "Enabled")
    assert (driver.flash, driver.attention) == (True, "stock with flash attention")
    log(driver, LOADED % "Disabled")
    assert (driver.flash, driver.attention) == (False, "stock without flash attention")
    log(driver, LOADED % "Auto")
    assert driver.flash is False  # the runner has not said yet
    log(driver, RESOLVED % "enabled")
    assert (driver.flash, driver.attention) == (True, "stock with flash attention")
    log(driver, RESOLVED % "disabled")
    assert (driver.flash, driver.attention) == (False, "stock without flash attention")


def test_what_a_server_before_it_logged_is_not_of_this_one(scratch: Scratch) -> None:
    driver = Untiered(Path("/no/ollama"), scratch, ctx=256, attention="stock", flash=False)
    log(driver, LOADED % "Enabled")
    driver._log_before = driver._log.stat().st_size
    assert driver.flash is False  # as it was told


def test_the_runner_s_own_words_count_more_than_what_it_was_told(scratch: Scratch) -> None:
    driver = BenchDriver(Path("/no/ollama"), scratch, ctx=256, attention="exact")
    assert driver.attention == "exact"
    for said, name in (
        ("exact (avx512)", "exact (avx512)"),
        ("stock (flash attention is off)", "stock (flash attention is off)"),
        ("", "of the GPU"),
    ):
        driver.last_report = pb.RunnerReport(cpu_attention=said)
        assert driver.attention == name


def test_a_record_names_version_and_engine_and_no_path(scratch: Scratch) -> None:
    driver = BenchDriver(Path("/no/ollama"), scratch, ctx=256, attention="exact")
    driver.name = "Ollama 0.16.3 (/no/ollama)"
    assert driver.engine == "Ollama 0.16.3"
    for told, name in (
        ("ollama-go/0.16.3+0123", "Go engine"),
        ("llama.cpp/0.16.3+0123", "llama.cpp engine"),
        ("another/1", "another"),
    ):
        driver.last_report = pb.RunnerReport(engine=told)
        assert driver.engine == f"Ollama 0.16.3, {name}"
