"""Layers stay on a GPU when their K/V do not fit there: K/V in pinned memory, copied to the device
ahead of the layer that reads them (csrc/shim), planned by the overlay (llm/kvpaged.go). On a GPU
that is not there (tests/fakegpu), whose streams are late by chance, answers are the CPU's to the
bit: whatever a device reads too early is wrong, or NaN, or ends the runner.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.patchset import shim
from tests.engine import paged
from tests.engine.fake_gpu import MINIMUM_MIB, NO_DEVICE, computed, devices, offloaded
from tests.engine.harness import Result, Server, Sidecar, assert_same, text
from tests.engine.test_restore import LookupTooSlow, until_heard

PROMPT_TOKENS = 700  # two batches
LAYERS = 8
EIGHT = make_shape("qwen3-tiny", layers=LAYERS, kv_heads=4)  # 8 KiB of K/V a token
FLASH = {"OLLAMA_FLASH_ATTENTION": "1"}
COMPUTING_LATE = {"DELAY_US": "20000,0", "SEED": 5}  # so that copies come too early, if they can
COPYING_LATE = {"DELAY_US": "0,20000", "SEED": 5}
BOTH_LATE = {"DELAY_US": 3000, "SEED": 5}


@pytest.fixture(scope="session")
def paged_binary(binary: Path, gpu_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched Ollama with a fake GPU and the shim; one binary for everything here."""
    return paged.install(gpu_binary, binary.parent, tmp_path_factory.mktemp("paged") / "ollama")


@pytest.fixture(scope="session")
def eight(paged_binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a model of eight layers."""
    folder = tmp_path_factory.mktemp("eight")
    gguf = folder / "paged.gguf"
    make_model(EIGHT, gguf)
    with Server(paged_binary, folder, models, env=NO_DEVICE) as server:
        server.create("paged", gguf)
    return "paged"


def _hot(layers: int) -> dict[str, str]:
    return paged.ON | {"OLLAMA_PAGED_HOT_LAYERS": str(layers)}


def _answers(server: Server, model: str, seed: object, **options: object) -> list[Result]:
    """Cold, from memory, and gone on with."""
    prompt = text(PROMPT_TOKENS, seed)
    cold = server.generate(model, prompt, **options)
    hit = server.generate(model, prompt, **options)
    longer = prompt + hit.text + text(30, ("more", seed))
    return [cold, hit, server.generate(model, longer, **options)]


def _cpu(binary: Path, models: Path, folder: Path, model: str, **env: str) -> list[Result]:
    with Server(binary, folder, models, env=FLASH | NO_DEVICE | env) as server:
        return _answers(server, model, "paged")


def _same(mine: list[Result], theirs: list[Result], what: object = "") -> None:
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.tokens
        assert_same(one, other, (what, number))


@pytest.mark.parametrize("late", [{}, BOTH_LATE, COMPUTING_LATE, COPYING_LATE], ids=str)
@pytest.mark.parametrize("prefetch", ["1", "0"])
@pytest.mark.timeout(300)
def test_paged_layers_answer_as_the_cpu_does(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    prefetch: str,
    late: dict[str, object],
) -> None:
    expected = _cpu(paged_binary, models, tmp_path / "cpu", eight)
    log = tmp_path / "devices.log"
    env = FLASH | _hot(2) | {"OLLAMA_PAGED_PREFETCH": prefetch}
    env |= devices(1024, LOG=str(log), **late)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = _answers(server, eight, "paged")
        assert offloaded(server) == (LAYERS + 1, LAYERS + 1)
        kv = paged.kv_bytes(server)
    assert kv["Pinned"] == 3 * kv["CUDA0"]
    said = log.read_text(encoding="utf-8")
    assert computed(said.splitlines())[0] > 0
    assert ("graph of 2 nodes, 0 of attention, 2 write rows" in said) == (prefetch == "1")
    _same(found, expected)


@pytest.mark.parametrize(
    ("model", "cache", "hot"),
    [
        ("g2", "q8_0", 0),
        ("g2", "f16", 0),
        ("g5", "f16", 3),
        ("sliding", "f16", 0),
        ("sinks", "f16", 0),
        ("wide", "f16", 1),
        ("latent", "f16", 0),
        ("chunks", "f16", 0),
        ("granite", "f16", 0),
    ],
)
@pytest.mark.timeout(300)
def test_paged_layers_of_other_models_answer_as_the_cpu_does(
    paged_binary: Path, models: Path, tmp_path: Path, model: str, cache: str, hot: int
) -> None:
    """Sinks, windows, chunks, a quantised cache, several caches, latent attention."""
    kind = {"OLLAMA_KV_CACHE_TYPE": cache}
    expected = _cpu(paged_binary, models, tmp_path / "cpu", model, **kind)
    env = FLASH | kind | _hot(hot) | devices(1024, **COMPUTING_LATE)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = _answers(server, model, "paged")
        layers, of = offloaded(server)
        assert layers == of
        assert paged.kv_bytes(server)["Pinned"] > 0
    _same(found, expected, (model, cache))


@pytest.mark.timeout(300)
def test_a_context_shift_of_paged_layers_answers_as_on_the_cpu(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """K is turned where it lies."""
    answers = []
    for number, env in enumerate((NO_DEVICE, _hot(2) | devices(1024, **COMPUTING_LATE))):
        with Server(paged_binary, tmp_path / str(number), models, env=FLASH | env) as server:
            answers.append(server.generate(eight, text(480, "shift"), predict=60, num_ctx=512))
            assert "context limit hit - shifting" in server.log_text()
    assert len(answers[0].tokens) == 60
    assert_same(answers[1], answers[0])


@pytest.mark.timeout(300)
def test_two_devices_with_paged_layers_answer_as_the_cpu_does(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """Each reads only its own layers' K/V: anything else is a fault of the fake GPU."""
    expected = _cpu(paged_binary, models, tmp_path / "cpu", eight)
    log = tmp_path / "devices.log"
    env = devices(1024, 1024, LOG=str(log), **COMPUTING_LATE) | {"OLLAMA_SCHED_SPREAD": "1"}
    with Server(paged_binary, tmp_path / "gpu", models, env=FLASH | _hot(0) | env) as server:
        found = _answers(server, eight, "paged")
        assert offloaded(server) == (LAYERS + 1, LAYERS + 1)
        assert set(paged.kv_bytes(server)) == {"Pinned"}
    nodes = computed(log.read_text(encoding="utf-8").splitlines())
    assert nodes[0] > 0 < nodes[1]
    _same(found, expected)


@pytest.mark.timeout(600)
def test_no_layer_leaves_its_device_for_a_larger_context(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """Stock's plan beside it: K/V takes the room of layers."""
    contexts = (4096, 12288, 24576, 32768)
    expected = _cpu(paged_binary, models, tmp_path / "cpu", eight)
    found: dict[str, list[int]] = {}
    pinned = []
    for name, on in (("stock", {}), ("paged", paged.ON)):
        env = FLASH | on | devices(MINIMUM_MIB + 170)
        with Server(paged_binary, tmp_path / name, models, env=env) as server:
            for num_ctx in contexts:
                _same(_answers(server, eight, "paged", num_ctx=num_ctx), expected, (name, num_ctx))
                found.setdefault(name, []).append(offloaded(server)[0])
                if on:
                    pinned.append(paged.kv_bytes(server).get("Pinned", 0))
                server.unload(eight)
    assert found["paged"] == [LAYERS + 1] * len(contexts)
    assert found["stock"][0] == LAYERS + 1 > found["stock"][-1]
    assert pinned[0] == 0 < pinned[-1]
    assert pinned == sorted(pinned)


def test_more_than_may_be_pinned_is_refused_in_words(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    env = FLASH | paged.ON | devices(MINIMUM_MIB + 170) | {"OLLAMA_PAGED_HOST_GB": "0.05"}
    with Server(paged_binary, tmp_path, models, env=env) as server:
        with pytest.raises(AssertionError, match=r"OLLAMA_PAGED_HOST_GB=0\.05"):
            server.generate(eight, "a", num_ctx=32768)
        assert server.generate(eight, "a").tokens
        assert offloaded(server) == (LAYERS + 1, LAYERS + 1)


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_nothing_of_ours_is_loaded(
    paged_binary: Path, gpu_binary: Path, models: Path, tmp_path: Path, value: str | None
) -> None:
    env = FLASH | devices(1024) | ({} if value is None else {"OLLAMA_PAGED_ATTN": value})
    with Server(gpu_binary, tmp_path / "without", models, env=env) as server:
        expected = _answers(server, "g2", "off")
    with Server(paged_binary, tmp_path / "off", models, env=env) as server:
        found = _answers(server, "g2", "off")
        pid = server.runner_pid("g2")
        assert pid is not None
        loaded = paged.libraries_of(pid)
        assert set(paged.kv_bytes(server)) == {"CUDA0"}
    assert shim.STOCK in loaded
    assert shim.LIBRARY not in loaded
    _same(found, expected)


def test_without_the_library_the_plan_is_stocks_and_that_is_said(
    gpu_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    env = FLASH | paged.ON | devices(MINIMUM_MIB + 170)
    with Server(gpu_binary, tmp_path, models, env=env) as server:
        assert server.generate(eight, "a", num_ctx=32768).tokens
        assert offloaded(server)[0] < LAYERS + 1
        assert f"is {shim.LIBRARY} beside {shim.STOCK}?" in server.log_text()


FAULTS = {
    "rows are not written again": (
        COMPUTING_LATE,
        ("attention.cpp", "part_of(graph, both, 2)", "part_of(graph, both, 1)"),
    ),
    "a slot is filled before it was read": (
        COMPUTING_LATE,
        (
            "attention.cpp",
            "if (index >= 2) copier_->iface.event_wait(copier_, slot.drained);",
            "",
        ),
    ),
    "a slot is read before it was filled": (
        COPYING_LATE,
        ("attention.cpp", "compute_->iface.event_wait(compute_, slot.filled);", ""),
    ),
    "a copy does not wait for what was computed before": (
        COMPUTING_LATE,
        ("attention.cpp", "copier_->iface.event_wait(copier_, begun_);", ""),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.timeout(300)
def test_without_one_of_its_rules_prefetching_gives_other_answers(
    binary: Path, gpu_binary: Path, models: Path, eight: str, tmp_path: Path, fault: str
) -> None:
    """Else the tests above would prove nothing of it."""
    late, change = FAULTS[fault]
    wrong = paged.install(gpu_binary, binary.parent, tmp_path / "wrong", change)
    expected = _cpu(wrong, models, tmp_path / "cpu", eight)
    env = FLASH | _hot(2) | devices(1024, **late)
    with Server(wrong, tmp_path / "gpu", models, env=env) as server:
        try:
            found = _answers(server, eight, "paged")
        except AssertionError:  # NaN can end a request
            return
    with pytest.raises(AssertionError):
        _same(found, expected)


@pytest.mark.parametrize("hot", [LAYERS, 3, 0])
@pytest.mark.timeout(300)
def test_rows_of_paged_layers_come_back_wherever_they_lay(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path, sidecar: Sidecar, hot: int
) -> None:
    """Stored with every layer's K/V in the device's memory, restored into hot, mixed, paged."""

    def check(attempt: int) -> None:
        prompt = text(PROMPT_TOKENS, ("tiers", hot, attempt))
        answers = []
        for number, layers in enumerate((LAYERS, hot)):
            env = FLASH | _hot(layers) | devices(1024, **BOTH_LATE)
            folder = tmp_path / f"{attempt}-{number}"
            with Server(paged_binary, folder, models, socket=sidecar.socket, env=env) as server:
                pauses = server.pauses()
                first = server.generate(eight, prompt)
                restored = sum(restore.tokens for restore in server.restores())
                if number and restored == 0 and server.pauses() > pauses:
                    raise LookupTooSlow
                answers.append(server.generate(eight, prompt) if number == 0 else first)
                assert restored == number * (PROMPT_TOKENS - 1)
                sidecar.settle(server, eight)
        assert_same(answers[1], answers[0])

    until_heard(check)
