"""Which layers' K/V are paged, on GPUs that are not there (tests/attention/fakegpu); and that
without OLLAMA_PAGED_ATTN nothing of it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.patchset import shim
from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import MINIMUM_MIB, NO_DEVICE, devices, offloaded
from tests.engine.attention.paged import answers, cpu_answers
from tests.engine.harness import Server

CONTEXTS = (4096, 8192, 16384, 32768, 65536)
FEWER = (4096, 16384, 65536)
ALL = (9, 9)  # layers of the model, and its output
SMALL = MINIMUM_MIB + 170  # MiB: at 32768 cells K/V alone take 256


def _plans(
    binary: Path,
    models: Path,
    folder: Path,
    model: str,
    env: dict[str, str],
    contexts: Sequence[int] = CONTEXTS,
) -> dict[int, tuple[int, int]]:
    """By num_ctx: layers on GPUs, and bytes of pinned K/V. Every answer is checked, too."""
    kind = {key: env[key] for key in ("OLLAMA_KV_CACHE_TYPE",) if key in env}
    expected = cpu_answers(binary, models, folder / "cpu", model, "plan", **kind)
    found = {}
    with Server(binary, folder / "gpu", models, env=env) as server:
        for num_ctx in contexts:
            got = answers(server, model, "plan", num_ctx=num_ctx)
            paged.assert_all_same(got, expected, num_ctx)
            assert f"KvSize:{num_ctx} " in server.log_text()
            found[num_ctx] = offloaded(server)[0], paged.kv_bytes(server).get("Pinned", 0)
            server.unload(model)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "contexts", [FEWER, pytest.param(CONTEXTS, marks=pytest.mark.slow)], ids=["three", "five"]
)
def test_no_layer_leaves_its_device_for_a_larger_context(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path, contexts: Sequence[int]
) -> None:
    """Stock's plan beside it: K/V takes the room of layers."""
    small = devices(MINIMUM_MIB + 243)
    stock = _plans(paged_binary, models, tmp_path / "stock", eight, paged.FLASH | small, contexts)
    ours = _plans(paged_binary, models, tmp_path / "paged", eight, paged.ON | small, contexts)
    assert [layers for layers, _ in ours.values()] == [9] * len(contexts)
    layers = [layers for layers, _ in stock.values()]
    assert layers[0] == 9 > layers[-1]
    assert layers == sorted(layers, reverse=True)
    pinned = [size for _, size in ours.values()]
    assert pinned[0] == 0 < pinned[-1]
    assert pinned == sorted(pinned)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("vram_mib", [700, 1024, 1536, 2048])
def test_no_layer_leaves_any_device_for_a_larger_context(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    vram_mib: int,
    count: int,
    cache: str,
) -> None:
    env = paged.ON | {"OLLAMA_KV_CACHE_TYPE": cache} | devices(*[vram_mib] * count)
    plans = _plans(paged_binary, models, tmp_path, eight, env)
    print(vram_mib, count, cache, plans)
    assert [layers for layers, _ in plans.values()] == [plans[4096][0]] * len(CONTEXTS)
    assert plans[4096] == (9, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_card_of_one_gibibyte_keeps_all_layers_where_stock_is_left_with_none(
    paged_binary: Path, models: Path, tmp_path: Path
) -> None:
    """32 KiB of K/V a token: 2 GiB of them at 65536 cells."""
    shape = make_shape("qwen3-tiny", layers=8, heads=16, kv_heads=16, ctx=1 << 17)
    gguf = tmp_path / "large.gguf"
    make_model(shape, gguf)
    with Server(paged_binary, tmp_path / "maker", models, env=NO_DEVICE) as server:
        server.create("large", gguf)
    card = devices(1024)
    stock = _plans(paged_binary, models, tmp_path / "stock", "large", paged.FLASH | card)
    ours = _plans(paged_binary, models, tmp_path / "paged", "large", paged.ON | card)
    print({"stock": stock, "paged": ours})
    assert stock[4096][0] == 9 > stock[16384][0] > stock[65536][0] == 0
    assert {layers for layers, _ in ours.values()} == {9}


def test_room_for_one_layer_of_staging_is_enough(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """At 65536 cells one takes 64 MiB, and so does the mask; weights and the rest take 20."""
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "turns")
    env = paged.ON | devices(MINIMUM_MIB + 180)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = answers(server, eight, "turns", num_ctx=65536)
        assert offloaded(server) == ALL
        assert "none is copied ahead of its turn" in server.log_text()
    paged.assert_all_same(found, expected)


def test_what_does_not_fit_without_any_k_and_v_is_divided_as_stock_does(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "divided")
    env = paged.ON | devices(MINIMUM_MIB + 90)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = answers(server, eight, "divided", num_ctx=65536)
        assert offloaded(server) < ALL
        assert "the layers are divided as stock does" in server.log_text()
    paged.assert_all_same(found, expected)


def test_more_than_may_be_pinned_is_refused_in_words(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    env = paged.ON | devices(SMALL) | {"OLLAMA_PAGED_HOST_GB": "0.05"}
    with Server(paged_binary, tmp_path, models, env=env) as server:
        with pytest.raises(AssertionError, match=r"OLLAMA_PAGED_HOST_GB=0\.05"):
            server.generate(eight, "a", num_ctx=32768)
        assert server.generate(eight, "a").tokens
        assert offloaded(server) == ALL


def test_num_ctx_of_the_environment_is_the_context_of_a_model_that_says_none(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    env = paged.ON | devices(SMALL) | {"OLLAMA_NUM_CTX": "32768"}
    with Server(paged_binary, tmp_path, models, env=env) as server:
        assert server.generate(eight, "a", num_ctx=None).tokens
        assert "KvSize:32768" in server.log_text()
        assert offloaded(server) == ALL


@pytest.mark.parametrize("value", [None, pytest.param("0", marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_without_the_variable_nothing_of_ours_is_loaded_and_all_is_stocks(
    paged_binary: Path,
    stock_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    value: str | None,
) -> None:
    """Plans and answers of stock's own program, where all layers fit its device and where not."""
    stock = paged.with_program(paged_binary, stock_binary, tmp_path / "stock-program")
    off = {} if value is None else {"OLLAMA_PAGED_ATTN": value}
    env = paged.FLASH | devices(SMALL, **paged.BOTH_LATE)
    for num_ctx in (4096, 32768):
        with Server(stock, tmp_path / f"stock-{num_ctx}", models, env=env) as server:
            expected = answers(server, eight, "off", num_ctx=num_ctx)
            plan = offloaded(server), paged.kv_bytes(server)
        assert (plan[0] == ALL) == (num_ctx == 4096)
        with Server(paged_binary, tmp_path / f"off-{num_ctx}", models, env=env | off) as server:
            found = answers(server, eight, "off", num_ctx=num_ctx)
            assert (offloaded(server), paged.kv_bytes(server)) == plan
            pid = server.runner_pid(eight)
            assert pid is not None
            loaded = paged.libraries_of(pid)
        assert shim.STOCK in loaded
        assert shim.LIBRARY not in loaded
        paged.assert_all_same(found, expected, num_ctx)


def test_without_the_library_the_plan_is_stocks_and_that_is_said(
    gpu_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    with Server(gpu_binary, tmp_path, models, env=paged.ON | devices(SMALL)) as server:
        assert server.generate(eight, "a", num_ctx=32768).tokens
        assert offloaded(server) < ALL
        assert f"is {shim.LIBRARY} beside {shim.STOCK}?" in server.log_text()
