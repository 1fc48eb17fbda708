#!/usr/bin/env python3
"""Maintainer: what decode needs on each GPU, for the table of docs/kernels.md.

    scripts/cuda_model_page.py      compiles pa_decode and writes docs/measurements/cuda-blocks.json
    make docs                       makes the table of it, by ollama_tiering/kernels/gpu_model.py

Needs NVRTC, no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ollama_tiering.kernels import gpu_model, nvrtc
from ollama_tiering.kernels.gpu_model import ThreadBlock
from ollama_tiering.kernels.nvrtc import Instance

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = ROOT / "docs" / "measurements" / "cuda-blocks.json"
GROUPS = (1, 5, 8)  # query heads of a K/V head
CELLS = (8192, 32768, 131072)


def collect() -> None:
    blocks = []
    for arch in sorted(gpu_model.LIMITS):
        for group in GROUPS:
            print(f"sm_{arch}, {group} rows", flush=True)
            instance = Instance(128, 128, "f16", "f16", group, 16)
            image = nvrtc.image(instance, arch)
            used = next(r for r in image.resources() if r.kernel == "pa_decode")
            launch = image.launches(instance, arch)["pa_decode"]
            blocks.append(
                {
                    "arch": arch,
                    "group": group,
                    "threads": launch.threads,
                    "registers": used.registers,
                    "spilled_bytes": used.spill_store_bytes + used.spill_load_bytes,
                    "shared_bytes": launch.shared_bytes + used.shared_bytes,
                }
            )
    version = ".".join(map(str, nvrtc.compiler().version))
    head = {"nvrtc": version, "sources": nvrtc.source_digest()[:12], "instance": "128/128 f16/f16"}
    rows = ",\n".join(map(json.dumps, blocks))
    BLOCKS.write_text(f'{json.dumps(head)[:-1]}, "blocks": [\n{rows}\n]}}\n')


def table() -> str:
    """The model's table over the GPUs of its list."""
    document = json.loads(BLOCKS.read_text(encoding="utf-8"))
    of = {
        (b["arch"], b["group"]): ThreadBlock(b["threads"], b["registers"], b["shared_bytes"])
        for b in document["blocks"]
    }
    cells = " | ".join(f"{n // 1024}K" for n in CELLS)
    lines = [
        f"Registers and shared memory by the assembler (NVRTC {document['nvrtc']}, sources"
        f" `{document['sources']}`),",
        "the rest predicted by `ollama_tiering/kernels/gpu_model.py`.",
        "",
        "| GPU | CC | heads per K/V head | registers | shared KiB | blocks per multiprocessor |"
        f" waits for | share of reading: {cells} cells |",
        "|---|---|---|---|---|---|---|" + "---|" * len(CELLS),
    ]
    for gpu in gpu_model.GPUS:
        for group in GROUPS:
            block = of[gpu.arch, group]
            made = [gpu_model.decode(gpu, block, group=group, n_cells=n) for n in CELLS]
            shares = " | ".join(f"{p.share:.2f}" for p in made)
            needs = f"{block.registers} | {block.shared_bytes / 1024:.1f} | {made[0].blocks}"
            lines.append(
                f"| {gpu.name} | {gpu.arch / 10:.1f} | {group} | {needs} | {made[-1].bound} |"
                f" {shares} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    collect()
    sys.exit(0)
