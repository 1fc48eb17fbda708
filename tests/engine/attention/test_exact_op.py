"""Engine 2 (csrc/shim/exact.cpp): attention by csrc's own kernels through the shim, operation by
operation, on a fake GPU that runs the device code itself (tests/attention/fakegpu/driver).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ollama_tiering.kernels import images
from ollama_tiering.patchset.finished import source_of
from tests.engine.attention import exact_op, paged
from tests.engine.attention.exact_op import (
    LATE,
    MOST,
    PROMISED,
    Case,
    changed_binary,
    error,
    nmse,
    run,
)

CASES = {
    "decode": Case(),
    "decode of a group of five": Case(heads=10, cells=300),
    "decode without groups": Case(heads=4, kv_heads=4, cells=512),
    "decode of what fills no tile": Case(cells=37),
    "decode with sinks": Case(sinks=True, cells=200),
    "decode with a soft-cap": Case(softcap=20.0),
    "decode of all cells": Case(causal=False, cells=1024),
    "a few queries": Case(n_q=6, new=6),
    "prefill": Case(n_q=70, new=70),
    "prefill after others": Case(n_q=40, new=40, cells=600, sinks=True),
    "prefill of a group of five": Case(n_q=33, new=33, heads=10, cells=320),
    "a sink and a diffuse tail": Case(cells=4096, sink_nats=18.0),
    "prefill of a sink and a diffuse tail": Case(n_q=40, new=40, cells=2048, sink_nats=18.0),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact_wherever_k_and_v_lie(exact_binary: Path, tmp_path: Path, name: str) -> None:
    inputs = CASES[name].inputs()
    ran = run(exact_binary, tmp_path, inputs, "ph")
    assert ran.code == 0, ran.said
    assert "engine: exact." in ran.said
    assert ran.attended == 2
    assert ran.layers[0].tobytes() == ran.layers[1].tobytes(), "where K/V lie changes bits"
    found = error(ran.layers[0], inputs.answer())
    print(f"{name}: error {found:.2e}")
    assert found <= MOST < PROMISED


LONG = {  # heads of more than 128 values
    "256, decode": Case(d=256),
    "256, decode of a sink and a diffuse tail": Case(d=256, cells=4096, sink_nats=18.0),
    "256, a few queries": Case(d=256, n_q=6, new=6, sinks=True),
    "256, prefill": Case(d=256, n_q=40, new=40, cells=320),
    "256, prefill with a soft-cap": Case(d=256, n_q=33, new=33, softcap=20.0),
    "256 in q8_0": Case(d=256, kind="q8_0", cells=300),
    "256 in q8_0, prefill": Case(d=256, kind="q8_0", n_q=40, new=40, cells=100),
    "192/128": Case(d=192, d_v=128, heads=2),
    "192/128, prefill": Case(d=192, d_v=128, heads=2, n_q=40, new=40),
}


@pytest.mark.parametrize("name", LONG)
def test_it_is_exact_for_heads_of_more_than_128_values(
    exact_binary: Path, tmp_path: Path, name: str
) -> None:
    inputs = LONG[name].inputs()
    ran = run(exact_binary, tmp_path, inputs, "ph")
    assert ran.code == 0, ran.said
    assert ran.attended == 2
    assert ran.layers[0].tobytes() == ran.layers[1].tobytes(), "where K/V lie changes bits"
    found = error(ran.layers[0], inputs.answer(ran.k, ran.v))
    print(f"{name}: error {found:.2e}")
    assert found <= MOST


BLOCKS = {  # K and V in blocks of 32 values
    "q8_0": Case(kind="q8_0"),
    "q8_0 with sinks": Case(kind="q8_0", sinks=True, cells=200, n_q=2, new=2),
    "q8_0, a prefill": Case(kind="q8_0", n_q=40, new=40, cells=600),
    "q8_0, rows of 2-byte alignment": Case(kind="q8_0", d=96, heads=6, kv_heads=3, cells=150),
    "q8_0, a prefill of these": Case(kind="q8_0", d=96, heads=6, kv_heads=3, n_q=33, new=33),
    "q8_0 and q4_0": Case(kind="q8_0/q4_0"),
    "q8_0 and q4_0, a prefill": Case(kind="q8_0/q4_0", n_q=20, new=20),
}
# Relative to a block's largest value: half a step (q4_0 ends a whole one below it), and the f16 of
# the scale.
STEPS = {"q8_0": 0.5 / 127 + 2**-11, "q4_0": 1 / 8 + 2**-11}


@pytest.mark.parametrize("name", BLOCKS)
def test_it_is_exact_over_rows_in_blocks_as_they_are_stored(
    exact_binary: Path, tmp_path: Path, name: str
) -> None:
    inputs = BLOCKS[name].inputs()
    ran = run(exact_binary, tmp_path, inputs, "ph")
    assert ran.code == 0, ran.said
    assert "the stock library computes" not in ran.said
    assert ran.attended == 2
    assert ran.layers[0].tobytes() == ran.layers[1].tobytes(), "where K/V lie changes bits"
    found = error(ran.layers[0], inputs.answer(ran.k, ran.v))
    print(f"{name}: error {found:.2e}")
    assert found <= MOST
    for kind, given, stored in zip(
        inputs.case.kinds, (inputs.k, inputs.v), (ran.k, ran.v), strict=True
    ):
        blocks, kept = given.reshape(-1, 32), stored.reshape(-1, 32)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        assert (np.abs(blocks - kept) <= STEPS[kind] * largest).all(), "the rows are others"
        assert (blocks != kept).any()


def test_layers_with_k_and_v_of_other_types_have_kernels_of_their_own(
    exact_binary: Path, tmp_path: Path
) -> None:
    inputs, plain = Case(kind="q8_0").inputs(), Case().inputs()
    ran = run(exact_binary, tmp_path, inputs, "PpHh")
    assert ran.code == 0, ran.said
    of_q8_0 = run(exact_binary, tmp_path, inputs, "h").layers[0].tobytes()
    of_f16 = run(exact_binary, tmp_path, plain, "h").layers[0].tobytes()
    assert [x.tobytes() for x in ran.layers] == [of_f16, of_q8_0] * 2
    assert of_f16 != of_q8_0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [Case(), Case(d=256, heads=2, kv_heads=1)], ids=["64", "256"])
def test_it_is_exact_over_a_sink_and_a_diffuse_tail_of_131072_cells(
    exact_binary: Path, tmp_path: Path, case: Case
) -> None:
    for sink_nats in (0.0, 18.0):
        inputs = replace(case, cells=1 << 17, sink_nats=sink_nats).inputs()
        ran = run(exact_binary, tmp_path, inputs)
        found = error(ran.layers[0], inputs.answer())
        print(f"sink of {sink_nats} nats: error {found:.2e}")
        assert found <= PROMISED


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_engine_1_where_that_sums_in_f32(
    exact_binary: Path, tmp_path: Path, name: str
) -> None:
    """The fake GPU's stock kernel is GGML's for CPUs, which sums so where it is told to."""
    inputs = CASES[name].inputs()
    mine = run(exact_binary, tmp_path, inputs)
    stock = {"OLLAMA_PAGED_ENGINE": "stock", "OLLAMA_CPU_ATTENTION": "exact"}
    theirs = run(exact_binary, tmp_path, inputs, **stock)
    assert theirs.launches == 0
    found = nmse(mine.layers[0], theirs.layers[0])
    print(f"{name}: NMSE {found:.2e}")
    assert found <= 1e-6


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("prefetch", ["0", "1"])
def test_no_stream_reads_what_another_has_yet_to_write(
    exact_binary: Path, tmp_path: Path, late: str, prefetch: str
) -> None:
    """Rows before our kernels, and what these give before the next operation. Memory that nobody
    has written is NaN, and each layer's queries come from the layer before.
    """
    inputs = Case(n_q=3, new=3, cells=64).inputs()
    expected = run(exact_binary, tmp_path, inputs, "h").layers[0].tobytes()
    env = LATE[late] | {"FAKEGPU_SEED": "5", "OLLAMA_PAGED_PREFETCH": prefetch}
    ran = run(exact_binary, tmp_path, inputs, "pphpp", **env)
    assert [layer.tobytes() == expected for layer in ran.layers] == [True] * 5


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_launch_that_fails_fails_the_graph_and_is_said(
    exact_binary: Path, tmp_path: Path, failing: int
) -> None:
    ran = run(exact_binary, tmp_path, Case().inputs(), "ph", FAKEGPU_FAIL_LAUNCH=failing)
    assert ran.code == exact_op.FAILED
    assert "failed on CUDA0: cuLaunchKernel: unspecified launch failure (719)" in ran.said


def test_without_memory_for_its_states_the_graph_fails_and_that_is_said(
    exact_binary: Path, tmp_path: Path
) -> None:
    inputs = Case().inputs()
    log = run(exact_binary, tmp_path, inputs).log
    lines = [line for line in log.splitlines() if ": allocation " in line]
    (states,) = (i for i, line in enumerate(lines, 1) if f" of {4 * 66 * 4 * 1024} bytes" in line)
    ran = run(exact_binary, tmp_path, inputs, FAKEGPU_FAIL_ALLOC=states)
    assert ran.code == exact_op.FAILED
    assert "failed on CUDA0: cuMemAlloc_v2: out of memory" in ran.said


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(kind="q4_0"), "no kernels for its heads: sm_89-64x64-q4_0-q4_0-rows2-align4.cubin"),
        (Case(heads=6), "no kernels for its heads: sm_89-64x64-f16-f16-rows3-align16.cubin"),
        (Case(d=40), "heads of another size than a multiple of 16"),
        (Case(d=192), "no kernels for its heads: sm_89-192x192-f16-f16-rows2-align16.cubin"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_its_kernels_do_not_serve_is_engine_1s_and_that_is_said_once(
    exact_binary: Path, tmp_path: Path, case: Case, why: str
) -> None:
    inputs = case.inputs()
    ran = run(exact_binary, tmp_path, inputs, "pph")
    assert ran.said.count("which the stock library computes") == 1
    assert ran.said.count(f"which the stock library computes: {why}\n") == 1
    assert ran.launches == 0
    stock = run(exact_binary, tmp_path, inputs, "pph", OLLAMA_PAGED_ENGINE="stock")
    assert ran.layers.tobytes() == stock.layers.tobytes()


@pytest.mark.parametrize("word", ["", "stock", "Exact", "1"])
def test_any_other_word_is_the_stock_engine(exact_binary: Path, tmp_path: Path, word: str) -> None:
    ran = run(exact_binary, tmp_path, Case().inputs(), "ph", OLLAMA_PAGED_ENGINE=word)
    assert "engine: \n" in ran.said
    assert ran.launches == 0
    assert ("neither stock nor exact" in ran.said) == (word not in ("", "stock"))


def test_where_there_are_no_kernels_for_the_gpu_it_is_the_stock_engine_and_that_is_said(
    exact_binary: Path, tmp_path: Path
) -> None:
    shutil.copytree(exact_binary.parents[1], tmp_path / "bare", symlinks=True)
    shutil.rmtree(tmp_path / "bare/lib/ollama" / images.FOLDER)
    ran = run(tmp_path / "bare/bin/ollama", tmp_path, Case().inputs())
    assert "engine: \n" in ran.said
    assert ran.said.count("there are no kernels for CUDA0, sm_89, in ") == 1
    assert ran.launches == 0


def test_its_name_follows_from_its_kernels_and_its_source(
    exact_binary: Path, binary: Path, tmp_path: Path
) -> None:
    """What is computed by others must not be found under it."""

    def name(installed: Path) -> str:
        said = run(installed, tmp_path, Case().inputs()).said
        return said.partition("engine: ")[2].partition("\n")[0]

    def changed(folder: str) -> Path:
        shutil.copytree(exact_binary.parents[1], tmp_path / folder, symlinks=True)
        return tmp_path / folder / "bin/ollama"

    names = {name(exact_binary), name(changed("same"))}
    assert len(names) == 1
    other = changed("other")
    (one, *_) = (other.parents[1] / "lib/ollama" / images.FOLDER).glob("*rows5*")
    one.write_bytes(one.read_bytes() + b"# of another compiler\n")
    names.add(name(other))
    one.unlink()
    names.add(name(other))
    lib = other.parents[1] / "lib/ollama/cuda_fake"
    paged.compile_changed(
        source_of(binary), lib, tmp_path / "src", ("exact.h", "kStates = 2", "kStates = 3")
    )
    names.add(name(other))
    assert len(names) == 4


MUTANTS = {
    "our stream does not wait for what was computed before": (
        "exact.cpp",
        "return PA_CALL(gpu_->driver, cuStreamWaitEvent, stream_, before_->context, 0);",
        "return PA_OK;",
        "the stock stream is late",
    ),
    "the stock stream does not wait for ours": (
        "exact.cpp",
        "compute_->iface.event_wait(compute_, after_);",
        "",
        "our stream is late",
    ),
    "the stock stream waits for what ours did before": (
        "exact.cpp",
        "PA_TRY(PA_CALL(gpu_->driver, cuEventRecord, after_->context, stream_));",
        "",
        "our stream is late",
    ),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_without_one_of_its_events_it_reads_what_is_not_there(
    exact_binary: Path, binary: Path, tmp_path: Path, fault: str
) -> None:
    """Else the tests of late streams would prove nothing of it."""
    name, old, new, late = MUTANTS[fault]
    inputs = Case(n_q=3, new=3, cells=64).inputs()
    expected = run(exact_binary, tmp_path, inputs, "h").layers[0].tobytes()
    wrong = changed_binary(exact_binary, binary, tmp_path, (name, old, new))
    env = LATE[late] | {"FAKEGPU_SEED": "5"}
    found = []
    for places in ("pphpp", "h"):
        found += [
            x.tobytes() == expected for x in run(wrong, tmp_path, inputs, places, **env).layers
        ]
    assert not all(found), f"nobody noticed: {fault}"


@pytest.mark.parametrize("places", ["p", "h"])
def test_a_mask_that_hides_all_cells_gives_zeros(
    exact_binary: Path, tmp_path: Path, places: str
) -> None:
    inputs = Case().inputs()
    inputs.mask[:] = -np.inf
    ran = run(exact_binary, tmp_path, inputs, places)
    assert not ran.layers.any()
