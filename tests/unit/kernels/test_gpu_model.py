"""The model of what decode reaches: occupancy by the vendor's rules, splits by the launcher's."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

import pytest

from ollama_tiering.kernels import gpu_model
from ollama_tiering.kernels.gpu_model import GPUS, LIMITS, Block, GpuType, decode
from scripts import cuda_model_page

CSRC = Path(__file__).resolve().parents[3] / "csrc"
AMPERE = LIMITS[86]


@pytest.mark.parametrize(
    ("block", "blocks"),
    [
        (Block(128, 32, 0), 12),  # 48 warps, four a block
        (Block(128, 128, 0), 4),  # 65536 registers, 128 x 128 a block
        (Block(128, 129, 0), 3),  # given out by 256 a warp: 136 a thread
        (Block(128, 255, 0), 2),
        (Block(32, 16, 0), 16),  # no more blocks than that
        (Block(128, 32, 49 << 10), 2),  # 50 KiB each with what is reserved
        (Block(128, 32, (49 << 10) + 1), 1),
        (Block(128, 32, 100 << 10), 0),
    ],
)
def test_occupancy_on_8_6(block: Block, blocks: int) -> None:
    assert gpu_model.blocks_per_multiprocessor(AMPERE, block) == blocks


def test_nothing_is_reserved_before_8_0() -> None:
    assert gpu_model.blocks_per_multiprocessor(LIMITS[61], Block(128, 32, 48 << 10)) == 2


def test_the_rule_of_splits_is_the_launchers() -> None:
    assert gpu_model.best_splits(128, 8, 82) == 10
    assert gpu_model.best_splits(0, 8, 82) == 1
    text = (CSRC / "cuda/host/splits.h").read_text()
    costs = [float(x) for x in re.findall(r"double \w+ = ([0-9.]+);", text)]
    assert costs == [gpu_model.BLOCK_COST, gpu_model.STATE_COST]


SPLITS = """
#include "cuda/host/splits.h"
extern "C" int best(int n_units, int blocks, int at_once, int most) {
    return paged_attn::gpu::best_splits({n_units, blocks, at_once, 1, most});
}
"""


@pytest.mark.slow
def test_the_rule_of_splits_gives_what_the_launchers_gives(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "splits.cpp").write_text(SPLITS)
    library = tmp_path / "splits.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-I", CSRC, tmp_path / "splits.cpp"]
    subprocess.run([*command, "-o", library], check=True)
    best = ctypes.CDLL(str(library)).best
    for n_units in (0, 1, 3, 16, 128, 511, 2048):
        for blocks in (1, 2, 8, 24):
            for at_once in (15, 82, 92, 264):
                mine = gpu_model.best_splits(n_units, blocks, at_once)
                assert mine == best(n_units, blocks, at_once, gpu_model.MOST_SPLITS)


SMALL = Block(128, 128, 30 << 10)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_shares_are_shares_and_grow_with_the_context(gpu: GpuType) -> None:
    for group in (1, 5, 8):
        shares = [decode(gpu, SMALL, group=group, n_cells=n).share for n in (1024, 8192, 131072)]
        assert 0.0 < shares[0] < shares[1] < shares[2] <= 1.0


def test_more_arithmetic_is_never_faster() -> None:
    for gpu in GPUS:
        for n_cells in (8192, 131072):
            seconds = [
                decode(gpu, SMALL, group=group, n_cells=n_cells).seconds for group in (1, 4, 8)
            ]
            assert seconds == sorted(seconds)


def test_a_gpu_without_multipliers_waits_for_instructions() -> None:
    slow = GpuType("slow", 86, 28, 0.2, 360)
    assert decode(slow, SMALL, group=5, n_cells=32768).bound == "instructions"
    fast = GpuType("fast", 86, 28, 2.0, 360)
    assert decode(fast, SMALL, group=5, n_cells=32768).bound == "memory"


def test_a_block_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="does not fit a multiprocessor of RTX 3060"):
        decode(GPUS[3], Block(128, 64, 101 << 10), group=1, n_cells=64)


def test_no_block_of_the_table_spills_and_two_fit_every_multiprocessor() -> None:
    blocks = json.loads(cuda_model_page.BLOCKS.read_text())["blocks"]
    assert {(b["arch"], b["group"]) for b in blocks} == {
        (arch, group) for arch in LIMITS for group in cuda_model_page.GROUPS
    }
    for b in blocks:
        assert b["spilled_bytes"] == 0
        block = Block(b["threads"], b["registers"], b["shared_bytes"])
        assert gpu_model.blocks_per_multiprocessor(LIMITS[b["arch"]], block) >= 2


def test_the_table_says_what_the_model_says() -> None:
    table = cuda_model_page.table()
    assert len(table.splitlines()) == 5 + len(GPUS) * len(cuda_model_page.GROUPS)
    assert all(gpu.name in table for gpu in GPUS)
