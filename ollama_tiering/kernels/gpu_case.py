"""One case of `tiering kernel report`, in a process of its own.

    python -m ollama_tiering.kernels.gpu_case NAME      one line of JSON; exit code 1 when not ok

After an illegal access a CUDA context answers every call with that error, so nothing is measured in
the process of something else. Also what compute-sanitizer is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from ollama_tiering.errors import TieringError
from ollama_tiering.kernels import check, gpu_bench, nvrtc
from ollama_tiering.kernels.binding import PaError
from ollama_tiering.kernels.check_gpu import Gpu, alignment
from ollama_tiering.kernels.gpu import instance_of
from ollama_tiering.kernels.gpu_bench import BoundedRatio, Sizes
from ollama_tiering.kernels.gpu_device import GpuDevice
from ollama_tiering.kernels.samples import Problem, exact, make

Result = dict[str, Any]  # "ok" and whatever a case has to say, as JSON
Case = Callable[[GpuDevice], Result]

MACHINE: Final = "GPU"
FIRST: Final = "first contact"
FIRST_PROBLEM: Final = Problem(10, 2, 64, 64, 300, n_q=1)  # a decode block of five rows


def machine(device: GpuDevice) -> Result:
    return {
        "ok": True,
        "name": device.name,
        "compute_capability": device.arch / 10,
        "multiprocessors": device.attribute("multiprocessors"),
        "memory_bytes": device.memory_bytes,
        "memory_clock_khz": device.attribute("memory_clock_khz"),
        "memory_bus_bits": device.attribute("memory_bus_bits"),
        "driver": ".".join(map(str, device.driver_version)),
        "nvrtc": ".".join(map(str, nvrtc.compiler().version)),
        "sources": nvrtc.source_digest()[:12],
    }


def compared(problem: Problem, name: str) -> Case:
    def run(device: GpuDevice) -> Result:
        sample = make(problem)
        row = check.compare(Gpu(device), name, sample, exact(sample, range(problem.n_q)))
        instance = instance_of(problem.shape, alignment(problem))
        image = nvrtc.image(instance, device.arch)
        spilled = [r for r in image.resources() if r.spill_store_bytes or r.spill_load_bytes]
        return {
            "ok": row.ok and not spilled,
            **row.as_json(),
            "registers": {r.kernel: r.registers for r in image.resources()},
            "spilled": [r.kernel for r in spilled],
        }

    return run


def measured(measure: Callable[[GpuDevice, Sizes], list[BoundedRatio]]) -> Case:
    def run(device: GpuDevice) -> Result:
        ratios = measure(device, gpu_bench.fitting(device, Sizes()))
        return {
            "ok": all(ratio.holds for ratio in ratios),
            "ratios": [asdict(ratio) for ratio in ratios],
        }

    return run


def rates(device: GpuDevice) -> Result:
    """No ratios: what the others are compared with."""
    sizes = gpu_bench.fitting(device, Sizes())
    return {
        "ok": True,
        "read_bytes_per_s": gpu_bench.read_bytes_per_s(device, sizes),
        "pinned_bytes_per_s": gpu_bench.pinned_bytes_per_s(device, sizes),
    }


def hot(group: int, n_cells: int, **how: bool) -> Case:
    return measured(lambda d, s: [gpu_bench.hot_decode(d, s, group, n_cells, **how)])


def exactness() -> dict[str, Case]:
    first = {MACHINE: machine, FIRST: compared(FIRST_PROBLEM, FIRST)}
    return first | {name: compared(problem, name) for name, problem in check.PROBLEMS.items()}


def bandwidths() -> dict[str, Case]:
    """The bounds of docs/attention/kernels-cuda.md."""
    cases: dict[str, Case] = {"rates": rates}
    for group in (1, 4, 5, 8):
        for n_cells in (8192, 32768, 131072):
            cases[f"VRAM decode, G={group}, {n_cells} keys"] = hot(group, n_cells)
    cases["VRAM decode, G=5, 32768 keys, positions"] = hot(5, 32768, masked=True)
    for group in (4, 5, 8):
        name = f"VRAM decode, G={group}, 32768 keys, tensor cores"
        cases[name] = hot(group, 32768, tensor_cores=True)
    cases["cold decode"] = measured(lambda d, s: gpu_bench.cold_decode(d, s, 5, 16384))
    cases["cold prefill"] = measured(lambda d, s: [gpu_bench.cold_prefill(d, s, 5, 16384)])
    return cases


def run(name: str) -> Result:
    """The case's result; one that fails says why."""
    try:
        with GpuDevice() as device:
            return {"case": name, **(exactness() | bandwidths())[name](device)}
    except TieringError as error:
        status = error.status.name if isinstance(error, PaError) else type(error).__name__
        failed = f"{error.message}{f' ({error.hint})' if error.hint else ''}"
        return {"case": name, "ok": False, "failed": failed, "status": status}


if __name__ == "__main__":
    result = run(sys.argv[1])
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)
