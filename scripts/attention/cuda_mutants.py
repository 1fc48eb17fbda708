#!/usr/bin/env python3
"""Maintainer: mistakes made on purpose in the CUDA kernels, each to be noticed by the emulation.
(Barriers, waits and shuffles left out: `cuda_emulate --mutants`.)

    scripts/attention/cuda_mutants.py [NAME...]   half a minute each; exit code 1 when one is missed

Each is compiled in a copy of csrc with a few instances and cases that reach the place.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ("-std=c++17", "-O1", "-I.", "-Iinclude", "-DPA_EMULATE", "-U_FORTIFY_SOURCE", "-w")

INSTANCES = """
#include "tests/cuda/emulated.h"
namespace paged_attn::gpu::test {
namespace {
// queries, heads, K/V heads, cells, of a page, mask, soft-cap, sinks, peaked, splits, chunks, sink
const CaseSpec kCausal = {2, 5, 1, 333, 64, MaskKind::causal, 0, true, false, 4, 1};
const CaseSpec kWindow = {4, 4, 2, 290, 16, MaskKind::window, 0, false, false, 2, 1};
const CaseSpec kSequences = {3, 4, 2, 150, 50, MaskKind::sequences, 0, false, false, 1, 1};
const CaseSpec kSolid = {3, 4, 1, 345, 64, MaskKind::solid};
const CaseSpec kSolidWindow = {2, 4, 1, 450, 128, MaskKind::solid_window};
const CaseSpec kSolidSequences = {1, 4, 1, 300, 100, MaskKind::solid_sequences};
const CaseSpec kAll = {1, 4, 1, 200, 256, MaskKind::none, 0, false, false, 1, 1};
const CaseSpec kChunks = {3, 4, 1, 260, 32, MaskKind::causal, 0, true, false, 1, 3};
const CaseSpec kSink = {1, 4, 1, 1200, 320, MaskKind::none, 0, false, false, 1, 1, 18.0f};
const bool added[] = {
    Add::instance<Instance<64, 64, kF16, kF16, 5, 16, 80>>(
        "f16", Kernel::decode,
        {kCausal, kWindow, kSequences, kAll, kSolid, kSolidWindow, kSolidSequences}),
    Add::instance<Instance<64, 64, kF16, kF16, 5, 16, 80>>(
        "f16", Kernel::narrow, {kCausal, kWindow, kSequences, kAll, kChunks, kSink}),
    Add::instance<Instance<64, 64, kQ8, kQ8, 4, 4, 75>>("q8_0", Kernel::narrow,
                                                        {kCausal, kWindow, kChunks}),
    Add::instance<Instance<64, 64, kQ8, kQ8, 4, 4, 75>>("q8_0", Kernel::decode, {kCausal, kAll}),
    Add::instance<Instance<128, 128, kF16, kF16, 4, 16, 80>>("f16", Kernel::decode,
                                                             {kSolidSequences}),
};
} // namespace
} // namespace paged_attn::gpu::test
"""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # of csrc/cuda
    right: str  # once in the file
    wrong: str


MUTANTS = (
    Mutant(
        "wrong stage",
        "decode.cuh",
        "range.end, shared, (stage + 2) % T::kStages)",
        "range.end, shared, (stage + 1) % T::kStages)",
    ),
    Mutant("split border", "visible.cuh", "+ each + (split < more ? 1 : 0)", "+ each"),
    Mutant("own cell unseen", "visible.cuh", "pos <= at.pos", "pos < at.pos"),
    Mutant("window too long", "visible.cuh", "at.pos - pos < mask", "at.pos - pos <= mask"),
    Mutant("tile skipped", "visible.cuh", "c.low_pos > q.high_pos", "c.high_pos > q.high_pos"),
    Mutant("tile taken whole", "visible.cuh", "c.high_pos > q.low_pos", "c.low_pos > q.low_pos"),
    Mutant(
        "window taken whole",
        "visible.cuh",
        "q.high_pos - c.low_pos >= mask.window",
        "q.low_pos - c.high_pos >= mask.window",
    ),
    Mutant("sequences mixed", "visible.cuh", "c.low_seq != c.high_seq || ", "false || "),
    Mutant(
        "keys' fragment swapped",
        "tile_mma.cuh",
        "cell_values(buffer, cell, k * 16 + lane / 8 % 2 * 8)",
        "cell_values(buffer, cell, k * 16 + (1 - lane / 8 % 2) * 8)",
    ),
    Mutant(
        "values' fragment swapped",
        "tile_mma.cuh",
        "const int cell = first + lane / 8 % 2 * 8 + lane % 8;",
        "const int cell = first + (1 - lane / 8 % 2) * 8 + lane % 8;",
    ),
    Mutant("no headroom", "tile_mma.cuh", "? 8.0f : 15.0f", "? 0.0f : 0.0f"),
    Mutant(
        "state before not rescaled",
        "tile_mma.cuh",
        "o[n][2 * half + i] * by.a + before * by.b",
        "o[n][2 * half + i] * by.a + before",
    ),
    Mutant("scale of another block", "tile_mma.cuh", "buffer, step / 2, cell", "buffer, 0, cell"),
    Mutant("V of empty cells", "decode.cuh", "if (masked && any == 0.0f) continue;", ";"),
    Mutant(
        "cells past the end",
        "decode.cuh",
        "within >= T::kTile || tile + within >= end ||",
        "within >= T::kTile ||",
    ),
    Mutant(
        "pages taken for whole",
        "rows.cuh",
        "page_cells.n % kSplitCells == 0",
        "page_cells.n % 16 == 0",
    ),
    Mutant("V past the end", "tile_fill.cuh", "&& cell < block.end && (KEYS", "&& (KEYS"),
    Mutant(
        "V of an empty cell in a product",
        "tile_fill.cuh",
        "(KEYS || holds_values(block.p.mask, cell))",
        "true",
    ),
    Mutant(
        "combined without weights",
        "combine.cuh",
        "merge_weights(m, load_global(m_of + at)).b",
        "1.0f",
    ),
)


def built(csrc: Path, folder: Path) -> Path:
    (folder / "few.cpp").write_text(INSTANCES)
    program = folder / "emulate"
    command = ["c++", *FLAGS, str(folder / "few.cpp"), "tests/cuda/emulate_main.cpp"]
    subprocess.run([*command, "-o", str(program)], cwd=csrc, check=True)
    return program


def passes(csrc: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run([built(csrc, Path(folder))], capture_output=True, check=False)
    return ran.returncode == 0


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.name in names]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "csrc")
        shutil.copytree(CSRC, copy)
        if not passes(copy):
            raise SystemExit("error: the sources as they are do not pass")
        for mutant in chosen:
            file = copy / "cuda" / mutant.file
            text = file.read_text()
            if text.count(mutant.right) != 1:
                raise SystemExit(f"error: {mutant.name}: {mutant.right!r} is not there once")
            file.write_text(text.replace(mutant.right, mutant.wrong))
            noticed = not passes(copy)
            file.write_text(text)
            print(f"{'caught' if noticed else 'MISSED'}  {mutant.name}", flush=True)
            missed += [] if noticed else [mutant.name]
    print(f"{len(chosen)} mutants, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
