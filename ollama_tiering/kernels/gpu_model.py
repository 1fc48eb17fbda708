"""What decode should reach on a GPU, before anybody has run it: a model to compare a run with.

From what the assembler reports (registers) and the image says (threads, shared memory): how many
blocks a multiprocessor holds; from the rule of csrc/cuda/host/splits.h: in how many turns the grid
runs; from the instructions of a tile and the bytes it reads: which of the two a turn waits for.
Left out: clocks that fall under load, caches, bank conflicts. ± 0.1 is what to expect of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

UNIT_CELLS: Final = 64  # kSplitCells of csrc/cuda/problem.h
BLOCK_COST, STATE_COST = 1.0, 0.05  # SplitCosts of csrc/cuda/host/splits.h
MOST_SPLITS: Final = 512

READ_SHARE: Final = 0.92  # of the nominal bandwidth that reading alone gets
ISSUE_SHARE: Final = 0.7  # of one instruction a cycle and scheduler
SCHEDULERS: Final = 4  # of a multiprocessor, since Maxwell
OVERHEAD: Final = (
    1.35  # instructions of loops, addresses and conversions that are not counted below
)
LAUNCH_S: Final = 2e-6  # of a kernel of a graph, its first reads and its last writes


@dataclass(frozen=True)
class Limits:
    """Limits of one multiprocessor, by compute capability (CUDA C++ Programming Guide)."""

    shared_bytes: int
    blocks: int
    warps: int
    reserved_bytes: int  # of shared memory, for each block
    registers: int = 65536


LIMITS: Final = {
    52: Limits(96 << 10, 32, 64, 0),
    60: Limits(64 << 10, 32, 64, 0),
    61: Limits(96 << 10, 32, 64, 0),
    70: Limits(96 << 10, 32, 64, 0),
    75: Limits(64 << 10, 16, 32, 0),
    80: Limits(164 << 10, 32, 64, 1024),
    86: Limits(100 << 10, 16, 48, 1024),
    89: Limits(100 << 10, 24, 48, 1024),
    90: Limits(228 << 10, 32, 64, 1024),
    100: Limits(228 << 10, 32, 64, 1024),
    120: Limits(100 << 10, 24, 48, 1024),
}


@dataclass(frozen=True)
class GpuType:
    """A card as its maker describes it: boost clock, nominal memory bandwidth."""

    name: str
    arch: int  # compute capability x 10
    multiprocessors: int
    clock_ghz: float
    bandwidth_gb_s: float


GPUS: Final = (
    GpuType("Quadro M6000", 52, 24, 1.114, 317),
    GpuType("GTX 1070", 61, 15, 1.683, 256),
    GpuType("RTX 2080", 75, 46, 1.710, 448),
    GpuType("RTX 3060", 86, 28, 1.777, 360),
    GpuType("RTX 3090", 86, 82, 1.695, 936),
    GpuType("RTX 4070", 89, 46, 2.475, 504),
    GpuType("RTX 4090", 89, 128, 2.520, 1008),
    GpuType("RTX 5090", 120, 170, 2.407, 1792),
    GpuType("H100 SXM", 90, 132, 1.830, 3350),
    GpuType("P100 SXM2", 60, 56, 1.480, 732),
    GpuType("V100 SXM2", 70, 80, 1.530, 900),
    GpuType("A100 SXM4 40 GB", 80, 108, 1.410, 1555),
    GpuType("B200", 100, 148, 1.965, 8000),
)


@dataclass(frozen=True)
class ThreadBlock:
    """What a thread block of a kernel needs."""

    threads: int
    registers: int  # of a thread
    shared_bytes: int


def blocks_per_multiprocessor(limits: Limits, block: ThreadBlock) -> int:
    """How many blocks are resident at once; 0: not one. Registers are given out to warps in units
    of 256."""
    warps = -(-block.threads // 32)
    registers = -(-block.registers * 32 // 256) * 256 * warps
    shared = block.shared_bytes + limits.reserved_bytes
    return min(
        limits.blocks,
        limits.warps // warps,
        limits.registers // max(registers, 1),
        limits.shared_bytes // shared if shared else limits.blocks,
    )


def split_time(n_units: int, blocks_per_split: int, at_once: int, n_splits: int) -> float:
    """As csrc/cuda/host/splits.h: in units of the time that a block takes for a unit of cells."""
    turns = -(-n_splits * blocks_per_split // at_once)
    return turns * (-(-n_units // n_splits) + BLOCK_COST) + STATE_COST * n_splits


def best_splits(n_units: int, blocks_per_split: int, at_once: int) -> int:
    """The number of splits with the least split_time; if several are equal, the smallest."""
    return min(
        range(1, max(1, min(MOST_SPLITS, n_units)) + 1),
        key=lambda n: split_time(n_units, blocks_per_split, at_once, n),
    )


def decode_tile(arch: int, d: int) -> int:
    """Cells of a tile of pa_decode (DecodeTile of csrc/cuda/traits.h), heads of 64, 128, 256."""
    if arch >= 80:
        return 64 if d <= 64 else 32 if d <= 128 else 16
    return 64 if d <= 128 else 32


def decode_instructions(d: int, rows: int, tile_cells: int) -> float:
    """Of a thread of pa_decode for UNIT_CELLS cells of f16: `rows` queries x heads, 128 threads."""
    values = tile_cells * d / 128  # of K, and as many of V, a thread and tile
    cells = max(1.0, tile_cells / 16)  # that share a read of the query, at 8 lanes a cell
    keys = values * (1 + rows + rows * 2 / (8 * cells) + 10 / 8)
    sums = values * (1 + rows + (rows / 4 + rows) / 8 + 10 / 8)
    across = rows * 4 * (cells + 1)
    weights = math.ceil(rows / 4) * 45
    rescale = rows * 9
    return (keys + sums + across + weights + rescale) * OVERHEAD * UNIT_CELLS / tile_cells


@dataclass(frozen=True)
class Prediction:
    """A prediction of decode over VRAM. `share`: K/V bytes per second ÷ what reading alone gets."""

    blocks: int  # a multiprocessor holds
    n_splits: int
    turns: int
    bound: str  # what a unit waits for: "memory" or "instructions"
    seconds: float
    share: float


def decode(
    gpu: GpuType,
    block: ThreadBlock,
    *,
    group: int,
    n_cells: int,
    n_kv_head: int = 8,
    d: int = 128,
) -> Prediction:
    """One query of `group` heads per K/V head, f16, pages in VRAM. ValueError
    if it does not fit.
    """
    resident = blocks_per_multiprocessor(LIMITS[gpu.arch], block)
    if resident < 1:
        raise ValueError(f"{block} does not fit a multiprocessor of {gpu.name}")
    row_tiles = -(-group // 8)
    per_split = n_kv_head * row_tiles
    n_units = -(-n_cells // UNIT_CELLS)
    at_once = gpu.multiprocessors * resident
    n_splits = best_splits(n_units, per_split, at_once)
    turns = -(-n_splits * per_split // at_once)
    # blocks of one turn that share a multiprocessor; the last turn may be thinner
    sharing = min(resident, -(-n_splits * per_split // gpu.multiprocessors))
    read_rate = gpu.bandwidth_gb_s * 1e9 * READ_SHARE
    unit_bytes = UNIT_CELLS * 4 * d
    busy = min(gpu.multiprocessors, n_splits * per_split)
    memory_s = unit_bytes * sharing * busy / read_rate
    warps = block.threads / 32
    rows = -(-group // row_tiles)
    issued = decode_instructions(d, rows, decode_tile(gpu.arch, d)) * warps * sharing / SCHEDULERS
    issue_s = issued / (gpu.clock_ghz * 1e9 * ISSUE_SHARE)
    unit_s = max(memory_s, issue_s)
    longest = -(-n_units // n_splits)
    states_bytes = 2 * n_splits * n_kv_head * group * (d + 2) * 4
    seconds = turns * longest * unit_s + 2 * LAUNCH_S + states_bytes / read_rate
    ideal = n_cells * n_kv_head * 4 * d / read_rate
    bound = "memory" if memory_s >= issue_s else "instructions"
    return Prediction(resident, n_splits, turns, bound, seconds, ideal / seconds)
