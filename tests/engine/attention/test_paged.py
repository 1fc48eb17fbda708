"""Layers stay on a GPU when their K/V do not fit there: K/V in pinned memory, copied to the device
ahead of the layer that reads them (csrc/shim). On a GPU that is not there
(tests/attention/fakegpu), whose streams are late by chance, answers are the CPU's to the bit:
whatever a device reads too early is wrong, or NaN, or ends the runner. What is decided of it:
test_paged_plan.py; requests beside each other, and tiers: test_paged_slots.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.patchset.finished import source_of
from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import computed, devices, offloaded
from tests.engine.attention.paged import (
    BOTH_LATE,
    COMPUTING_LATE,
    COPYING_LATE,
    answers,
    cpu_answers,
)
from tests.engine.harness import Server, Sidecar, assert_same, text

LAYERS = 8


SLOW = pytest.mark.slow  # what is left takes another way each


@pytest.mark.parametrize(
    "late",
    [
        pytest.param({}, marks=SLOW),
        BOTH_LATE,
        pytest.param(COMPUTING_LATE, marks=SLOW),
        pytest.param(COPYING_LATE, marks=SLOW),
    ],
    ids=str,
)
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
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "paged")
    log = tmp_path / "devices.log"
    env = paged.hot(2) | {"OLLAMA_PAGED_PREFETCH": prefetch}
    env |= devices(1024, LOG=str(log), **late)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = answers(server, eight, "paged")
        assert offloaded(server) == (LAYERS + 1, LAYERS + 1)
        kv = paged.kv_bytes(server)
    assert kv["Pinned"] == 3 * kv["CUDA0"]
    said = log.read_text(encoding="utf-8")
    assert computed(said.splitlines())[0] > 0
    assert ("graph of 2 nodes, 0 of attention, 2 write rows" in said) == (prefetch == "1")
    paged.assert_all_same(found, expected)


@pytest.mark.timeout(300)
def test_rows_that_are_copied_in_chunks_answer_as_the_cpu_does(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "paged")
    env = paged.hot(2) | {"OLLAMA_PAGED_CHUNK_SIZE": "100"} | devices(1024, **COMPUTING_LATE)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = answers(server, eight, "paged")
    paged.assert_all_same(found, expected)


@pytest.mark.parametrize(
    ("model", "cache", "hot"),
    [
        ("g2", "q8_0", 0),
        pytest.param("g2", "f16", 0, marks=SLOW),
        pytest.param("g5", "f16", 3, marks=SLOW),
        pytest.param("sliding", "f16", 0, marks=SLOW),
        ("sinks", "f16", 0),
        pytest.param("wide", "f16", 1, marks=SLOW),
        pytest.param("latent", "f16", 0, marks=SLOW),
        pytest.param("chunks", "f16", 0, marks=SLOW),
        pytest.param("olmo", "f16", 0, marks=SLOW),
    ],
)
@pytest.mark.timeout(300)
def test_paged_layers_of_other_models_answer_as_the_cpu_does(
    paged_binary: Path, models: Path, tmp_path: Path, model: str, cache: str, hot: int
) -> None:
    """Sinks, windows, chunks, a quantised cache, several caches, latent attention."""
    kind = {"OLLAMA_KV_CACHE_TYPE": cache}
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", model, "paged", **kind)
    env = kind | paged.hot(hot) | devices(1024, **COMPUTING_LATE)
    with Server(paged_binary, tmp_path / "gpu", models, env=env) as server:
        found = answers(server, model, "paged")
        layers, of = offloaded(server)
        assert layers == of
        assert paged.kv_bytes(server)["Pinned"] > 0
    paged.assert_all_same(found, expected, (model, cache))


@pytest.mark.timeout(300)
def test_where_k_and_v_lie_changes_no_bit_of_what_a_device_computes(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """Not with the exact attention either, which is the CPU's, for rows that a CPU computes."""
    found = []
    for hot in (LAYERS, 3, 0):
        env = {"OLLAMA_CPU_ATTENTION": "exact"} | paged.hot(hot) | devices(1024, **BOTH_LATE)
        with Server(paged_binary, tmp_path / str(hot), models, env=env) as server:
            found.append(answers(server, eight, "lies"))
    for other in found[1:]:
        paged.assert_all_same(other, found[0])


@pytest.mark.parametrize("hot", [2, pytest.param(0, marks=SLOW)])
@pytest.mark.timeout(300)
def test_a_context_shift_of_paged_layers_answers_as_on_the_cpu(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path, sidecar: Sidecar, hot: int
) -> None:
    """K is turned where it lies. With tiering: see shifts.py."""
    found = []
    for number, env in enumerate((paged.CPU, paged.hot(hot) | devices(1024, **COMPUTING_LATE))):
        folder = tmp_path / str(number)
        with Server(paged_binary, folder, models, socket=sidecar.socket, env=env) as server:
            found.append(server.generate(eight, text(480, "shift"), predict=60, num_ctx=512))
            assert "context limit hit - shifting" in server.log_text()
    assert len(found[0].tokens) == 60
    assert_same(found[1], found[0])


@pytest.mark.timeout(300)
def test_two_devices_with_paged_layers_answer_as_the_cpu_does(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path
) -> None:
    """Each reads only its own layers' K/V: anything else is a fault of the fake GPU."""
    expected = cpu_answers(paged_binary, models, tmp_path / "cpu", eight, "paged")
    log = tmp_path / "devices.log"
    env = devices(1024, 1024, LOG=str(log), **COMPUTING_LATE) | {"OLLAMA_SCHED_SPREAD": "1"}
    with Server(paged_binary, tmp_path / "gpu", models, env=paged.hot(0) | env) as server:
        found = answers(server, eight, "paged")
        assert offloaded(server) == (LAYERS + 1, LAYERS + 1)
        assert set(paged.kv_bytes(server)) == {"Pinned"}
    nodes = computed(log.read_text(encoding="utf-8").splitlines())
    assert nodes[0] > 0 < nodes[1]
    paged.assert_all_same(found, expected)


FAULTS = {
    "rows are not written again": (
        COMPUTING_LATE,
        ("attention.cpp", "part_of(graph, both, 2)", "part_of(graph, both, 1)"),
    ),
    "a slot is filled before it was read": (
        COMPUTING_LATE,
        (
            "attention.cpp",
            "if (copy.turn >= 2) copier_->iface.event_wait(copier_, slot.drained);",
            "",
        ),
    ),
    "a slot is read before it was filled": (
        COPYING_LATE,
        ("attention.cpp", "compute_->iface.event_wait(compute_, slot.filled);", ""),
    ),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if late is COPYING_LATE else SLOW)
        for fault, (late, _) in FAULTS.items()
    ],
)
@pytest.mark.timeout(300)
def test_without_one_of_its_rules_prefetching_gives_other_answers(
    binary: Path, gpu_binary: Path, models: Path, eight: str, tmp_path: Path, fault: str
) -> None:
    """Else the tests above would prove nothing of it. That copies wait for what was computed before
    their graph no answer can show: GGML's scheduler waits for it, too, before it copies a batch's
    inputs. That rule's fault is noticed by test_shim_library.py.
    """
    late, change = FAULTS[fault]
    wrong = paged.install(gpu_binary, source_of(binary), tmp_path / "wrong", change)
    expected = cpu_answers(wrong, models, tmp_path / "cpu", eight, "paged")
    with Server(
        wrong, tmp_path / "gpu", models, env=paged.hot(2) | devices(1024, **late)
    ) as server:
        try:
            found = answers(server, eight, "paged")
        except AssertionError:  # NaN can end a request
            return
    with pytest.raises(AssertionError):
        paged.assert_all_same(found, expected)
