"""What Ollama does with GPUs, on GPUs that are not there (`tests/attention/fakegpu`): discovery,
which layers go where, allocations that fail, and answers, which are those of the CPU backend to the
bit.

Of the fake GPU every fault of an access ends the runner: a kernel that reads what is not on its
device, a host that touches device memory. An answer is also the proof that there was none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.attention.fake_gpu import MINIMUM_MIB, NO_DEVICE, computed, devices, offloaded
from tests.engine.harness import Result, Server, Sidecar, assert_same, text, wait_until

PROMPT_TOKENS = 700  # two batches
FLASH = {"OLLAMA_FLASH_ATTENTION": "1"}
LATE = {"DELAY_US": 3000, "SEED": 5}


@pytest.fixture
def device_log(tmp_path: Path) -> Path:
    return tmp_path / "devices.log"


def _answers(server: Server, model: str, seed: object, **options: object) -> list[Result]:
    """Cold, from memory, and gone on with: what was computed on a device is read there again."""
    prompt = text(PROMPT_TOKENS, seed)
    cold = server.generate(model, prompt, **options)
    hit = server.generate(model, prompt, **options)
    longer = prompt + hit.text + text(30, ("more", seed))
    return [cold, hit, server.generate(model, longer, **options)]


def _lines(log: Path) -> Iterator[str]:
    return iter(log.read_text(encoding="utf-8").splitlines())


def _same(mine: list[Result], theirs: list[Result], what: object) -> None:
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.tokens
        assert_same(one, other, (what, number))


def test_devices_are_found_with_the_memory_that_they_have(
    gpu_binary: Path, models: Path, tmp_path: Path
) -> None:
    with Server(gpu_binary, tmp_path / "two", models, env=devices(768, 2048)) as server:
        wait_until("devices", lambda: "inference compute" in server.log_text(), 60)
        found = re.findall(
            r'msg="inference compute" id=(\S+).* library=CUDA compute=8\.9 name=CUDA\d .*'
            r'description="Fake GPU".* driver=13\.0 .*total="([\d.]+ \w+)"',
            server.log_text(),
        )
    ids = [f"GPU-fa4e0000-0000-0000-0000-00000000000{number}" for number in (0, 1)]
    assert sorted(found) == [(ids[0], "768.0 MiB"), (ids[1], "2.0 GiB")]
    with Server(gpu_binary, tmp_path / "none", models, env=NO_DEVICE | devices(768)) as server:
        wait_until("devices", lambda: "inference compute" in server.log_text(), 60)
        assert "library=CUDA" not in server.log_text()
        assert "library=cpu" in server.log_text()


@pytest.mark.parametrize(
    ("model", "cache"),
    [("g2", "f16"), ("g2", "q8_0"), ("sliding", "f16"), ("sinks", "f16"), ("llama", "f16")],
)
def test_all_layers_on_a_device_answer_as_the_cpu_does(
    gpu_binary: Path, models: Path, tmp_path: Path, device_log: Path, model: str, cache: str
) -> None:
    env = FLASH | {"OLLAMA_KV_CACHE_TYPE": cache}
    with Server(gpu_binary, tmp_path / "cpu", models, env=env | NO_DEVICE) as server:
        expected = _answers(server, model, (model, cache))
    late = devices(1024, LOG=str(device_log), **LATE)
    with Server(gpu_binary, tmp_path / "gpu", models, env=env | late) as server:
        found = _answers(server, model, (model, cache))
        layers, of = offloaded(server)
    assert layers == of
    assert computed(_lines(device_log))[0] > 0
    _same(found, expected, (model, cache))


@pytest.mark.parametrize(
    "layers", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]
)
def test_some_layers_on_a_device_answer_as_the_cpu_does(
    gpu_binary: Path, models: Path, eight: str, tmp_path: Path, device_log: Path, layers: int
) -> None:
    """Of 8 and the output: the first ones stay on the CPU, and the output while not all are off."""
    with Server(gpu_binary, tmp_path / "cpu", models, env=NO_DEVICE) as server:
        expected = _answers(server, eight, layers)
    env = devices(1024, LOG=str(device_log), **LATE)
    with Server(gpu_binary, tmp_path / "gpu", models, env=env) as server:
        found = _answers(server, eight, layers, num_gpu=layers)
        assert offloaded(server) == (layers, 9)
    graphs = re.findall(r"graph of \d+ nodes, (\d+) of attention", device_log.read_text())
    assert max(map(int, graphs)) == layers
    _same(found, expected, layers)


@pytest.mark.parametrize("visible", [0, 1], ids=["its own memory", "memory of the host"])
def test_attention_on_a_device_is_given_no_positions(
    gpu_binary: Path, models: Path, tmp_path: Path, device_log: Path, visible: int
) -> None:
    """Only the CPU's exact attention reads them. Who writes K decides, not who can read it. All
    layers, for GGML has a device compute some attentions of layers whose K the CPU writes.
    """
    env = FLASH | {"OLLAMA_CPU_ATTENTION": "exact"}
    env |= devices(1024, HOST_VISIBLE=visible, LOG=str(device_log))
    with Server(gpu_binary, tmp_path, models, env=env) as server:
        assert server.generate("g2", text(100, "positions")).tokens
    assert computed(_lines(device_log))[0] > 0
    assert "attention has a source" not in device_log.read_text()


def test_a_context_shift_on_a_device_answers_as_on_the_cpu(
    gpu_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """K is turned in place there. With tiering, with a device and without: see shifts.py."""
    answers = []
    for number, env in enumerate((NO_DEVICE, devices(1024, **LATE))):
        folder = tmp_path / str(number)
        with Server(gpu_binary, folder, models, socket=sidecar.socket, env=FLASH | env) as server:
            answers.append(server.generate("g2", text(480, "shift"), predict=60, num_ctx=512))
            assert "context limit hit - shifting" in server.log_text()
    assert len(answers[0].tokens) == 60
    assert_same(answers[1], answers[0])


@pytest.mark.parametrize("spread", [True, False], ids=["spread", "too small for all"])
def test_two_devices_answer_as_the_cpu_does(
    gpu_binary: Path, models: Path, eight: str, tmp_path: Path, device_log: Path, spread: bool
) -> None:
    with Server(gpu_binary, tmp_path / "cpu", models, env=NO_DEVICE) as server:
        expected = _answers(server, eight, spread, num_ctx=8192)
    vram = (1024, 1024) if spread else (MINIMUM_MIB + 80, MINIMUM_MIB + 80)
    env = devices(*vram, LOG=str(device_log), **LATE) | {"OLLAMA_SCHED_SPREAD": str(int(spread))}
    with Server(gpu_binary, tmp_path / "gpu", models, env=env) as server:
        found = _answers(server, eight, spread, num_ctx=8192)
        assert offloaded(server) == (9, 9)
    nodes = computed(_lines(device_log))
    assert nodes[0] > 0 < nodes[1]
    _same(found, expected, spread)


def test_a_larger_context_leaves_fewer_layers_on_a_device(
    gpu_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """Stock's plan: K/V takes the room of layers. The answers stay the CPU's."""
    contexts = (4096, 12288, 24576, 32768)
    with Server(gpu_binary, tmp_path / "cpu", models, env=NO_DEVICE) as server:
        expected = _answers(server, eight, "plan")
    found = {}
    with Server(gpu_binary, tmp_path / "gpu", models, env=devices(MINIMUM_MIB + 90)) as server:
        for num_ctx in contexts:
            _same(_answers(server, eight, "plan", num_ctx=num_ctx), expected, num_ctx)
            found[num_ctx] = offloaded(server)[0]
            server.unload(eight)
    layers = [found[num_ctx] for num_ctx in contexts]
    assert layers[0] == 9
    assert layers[0] > layers[1] > layers[-1]
    assert layers == sorted(layers, reverse=True)


def test_a_device_that_is_too_small_is_not_used(
    gpu_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    with Server(gpu_binary, tmp_path / "cpu", models, env=NO_DEVICE) as server:
        expected = _answers(server, eight, "small")
    with Server(gpu_binary, tmp_path / "gpu", models, env=devices(MINIMUM_MIB - 1)) as server:
        _same(_answers(server, eight, "small"), expected, "small")
        assert offloaded(server) == (0, 9)


@pytest.mark.parametrize(
    ("what", "failing"), [("weights", 1), ("K of the second layer", 4), ("graph", 18)]
)
def test_an_allocation_that_fails_leaves_fewer_layers_on_the_device(
    gpu_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    device_log: Path,
    what: str,
    failing: int,
) -> None:
    """Stock believes in less and less memory, until its plan is another."""
    with Server(gpu_binary, tmp_path / "cpu", models, env=NO_DEVICE) as server:
        expected = _answers(server, eight, "fails")
    env = devices(1024, FAIL_ALLOC=failing, LOG=str(device_log))
    with Server(gpu_binary, tmp_path / "gpu", models, env=env) as server:
        _same(_answers(server, eight, "fails"), expected, what)
        assert "model layout did not fit, applying backoff" in server.log_text()
        assert offloaded(server)[0] < 9
    failed = re.findall(r"allocation (\d+) of \d+ bytes fails", device_log.read_text())
    assert failed == [str(failing)]


def test_layers_that_were_asked_for_and_cannot_be_allocated_are_an_error_that_says_so(
    gpu_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    with Server(gpu_binary, tmp_path, models, env=devices(1024, FAIL_ALLOC=1)) as server:
        with pytest.raises(AssertionError, match="cannot be allocated with num_gpu = 9"):
            server.generate(eight, text(10, "error"), num_gpu=9)
        assert server.generate(eight, text(10, "error"), num_gpu=0).tokens
