#!/usr/bin/env python3
"""Maintainer: compiles the CUDA kernels for every compute capability and writes what they use.

Writes docs/measurements/cuda-resources.md from the assembler's own report (`ptxas -v`); exit 1 when
a kernel spills registers. Needs NVRTC, no GPU. Images come from and go to the cache directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.nvrtc import Instance, Resources

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "measurements" / "cuda-resources.md"

# Every head size and data type, the largest decode blocks: what is likeliest to spill.
INSTANCES = (
    Instance(128, 128, "f16", "f16", 8, 16),
    Instance(128, 128, "q8_0", "q4_0", 8, 4),
    Instance(256, 256, "f16", "f16", 8, 16),
    Instance(96, 96, "q8_0", "q8_0", 8, 2),
    Instance(80, 80, "f16", "f16", 5, 16),
    Instance(192, 128, "bf16", "bf16", 8, 16),
    Instance(576, 512, "f16", "f16", 8, 16),
    Instance(112, 112, "bf16", "f16", 7, 16),
    Instance(64, 64, "q4_0", "q8_0", 8, 4),
)


KERNELS = ("pa_wide", "pa_narrow", "pa_bounds", "pa_combine", "pa_decode")


def row(instance: Instance, arch: int, kernels: Sequence[Resources]) -> str:
    of = {used.kernel: cell(used) for used in kernels}
    return f"| {arch / 10:.1f} | {instance} | {' | '.join(of.get(k, '') for k in KERNELS)} |"


def cell(used: Resources) -> str:
    """Registers; behind them what should not be."""
    bad = {"spilled": spilled(used), "stack": used.stack_bytes}
    return ", ".join([str(used.registers), *(f"{name} {n}" for name, n in bad.items() if n)])


def spilled(used: Resources) -> int:
    return used.spill_store_bytes + used.spill_load_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append", help="only this one, e.g. 86")
    parser.add_argument("--instances", type=int, default=len(INSTANCES), help="only the first N")
    arguments = parser.parse_args()
    began = begin()
    lines = [
        f"Nothing here ran on a GPU. Sources `{nvrtc.source_digest()[:12]}`."
        " Registers (255 at most) of a thread; behind them the bytes that are spilled or lie on"
        " a stack, where there are any. `pa_narrow` is empty where"
        " tensor cores do not serve the shape. Shared memory is asked for at launch"
        " (csrc/cuda/traits.h) and checked against each GPU's limit when the image is compiled.",
        "",
        f"| CC | K/V head sizes, types | {' | '.join(KERNELS)} |",
        "|---|---|" + "---|" * len(KERNELS),
    ]
    spilling: list[str] = []
    for instance in INSTANCES[: arguments.instances]:
        for arch in arguments.arch or nvrtc.ARCHS:
            print(f"{instance}, sm_{arch}", flush=True)
            kernels = nvrtc.image(instance, arch).resources()
            lines.append(row(instance, arch, kernels))
            if any(map(spilled, kernels)):
                spilling.append(lines[-1])
    if not arguments.arch:
        version = "NVRTC " + ".".join(map(str, nvrtc.compiler().version))
        command = "- Command: `scripts/attention/cuda_resources.py`"
        origin = [*this_machine(began).lines(version), command, ""]
        lines = ["# What the CUDA kernels use", "", *origin, *lines]
        TARGET.write_text("\n".join(lines) + "\n")
    print("\n".join(["kernels that spill:", *spilling] if spilling else ["no kernel spills"]))
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
