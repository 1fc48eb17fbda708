"""This machine's kernels against the f64 reference, over the shapes of real models and odd ones.

A device is an instruction set of the CPU or a GPU; it computes a sample and says how long it took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.errors import TieringError
from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.cpu import CpuAttention
from ollama_tiering.kernels.samples import SHARP, Problem, Sample, exact, make, relative_error
from ollama_tiering.kernels.shape import Dtype

CPU_BOUND: Final = 1e-5
CPU_ISAS: Final = ("avx512", "avx2", "neon", "scalar")
_REPEATS: Final = 3

F16, BF16, Q8_0, Q4_0 = Dtype.F16, Dtype.BF16, Dtype.Q8_0, Dtype.Q4_0

PROBLEMS: Final = {
    "qwen3-0.6b, decode": Problem(16, 8, 128, 128, 4096),
    "qwen3-0.6b, prefill": Problem(16, 8, 128, 128, 1024, n_q=64, batch=48),
    "qwen3-14b, decode": Problem(40, 8, 128, 128, 4096),
    "qwen3-14b, prefill": Problem(40, 8, 128, 128, 700, n_q=33),
    "qwen3-14b, sharp": Problem(40, 8, 128, 128, 2000, n_q=5, query_deviation=SHARP),
    "gemma3, window": Problem(8, 4, 256, 256, 3000, n_q=17, window=1024),
    "gpt-oss, sinks, window": Problem(64, 8, 64, 64, 1000, n_q=9, window=128, sinks=True),
    "gemma2, soft-cap": Problem(16, 8, 256, 256, 500, n_q=20, softcap=50.0),
    "phi3, d 96": Problem(32, 32, 96, 96, 513, n_q=3),
    "d 80": Problem(32, 32, 80, 80, 257, n_q=16),
    "d 112": Problem(14, 2, 112, 112, 300, n_q=8),
    "d 192, V 128": Problem(16, 16, 192, 128, 400, n_q=6),
    "MLA 576/512": Problem(16, 1, 576, 512, 1024, n_q=2),
    "bf16": Problem(12, 4, 128, 128, 2048, n_q=4, k_type=BF16, v_type=BF16),
    "q8_0, decode": Problem(40, 8, 128, 128, 4096, k_type=Q8_0, v_type=Q8_0),
    "q4_0, decode": Problem(40, 8, 128, 128, 4096, k_type=Q4_0, v_type=Q4_0),
    "q8_0, prefill": Problem(16, 8, 128, 128, 1000, n_q=64, k_type=Q8_0, v_type=Q8_0),
    "K q8_0, V q4_0": Problem(24, 4, 128, 128, 999, n_q=7, k_type=Q8_0, v_type=Q4_0),
    "pages of 64, shuffled": Problem(16, 2, 128, 128, 1000, n_q=13, page_cells=64),
    "one key": Problem(12, 1, 64, 64, 1),
}


class Device(Protocol):
    """`bound`: the largest relative L2 error that is right."""

    @property
    def name(self) -> str: ...
    @property
    def bound(self) -> float: ...

    def compute(self, sample: Sample) -> tuple[NDArray[np.float32], float]:
        """The output, and the best seconds of a few runs. PaError where it does not serve it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One shape on one device. `error` None: it does not serve the shape, `why` says why, or it
    `failed` to compute it."""

    device: str
    shape: str
    bound: float
    error: float | None = None
    seconds: float | None = None
    why: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """A shape that no kernel serves is said, not wrong: the caller falls back."""
        if self.failed:
            return False
        return self.error is None or self.error <= self.bound  # not so for nan

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


@dataclass(frozen=True, slots=True)
class Cpu:
    isa: str
    threads: int
    bound: float = CPU_BOUND

    @property
    def name(self) -> str:
        return f"CPU, {self.isa}"

    def compute(self, sample: Sample) -> tuple[NDArray[np.float32], float]:
        problem = sample.problem
        axes = (problem.n_q, problem.n_head, problem.d_v)
        out = np.full(axes, np.nan, np.float32)
        seconds = []
        with CpuAttention(problem.shape, self.threads, self.isa) as plan:
            for _ in range(_REPEATS):
                start = time.perf_counter()
                for queries, n_cells in problem.batches():
                    plan.run(
                        sample.q[queries],
                        sample.k,
                        sample.v,
                        n_cells=n_cells,
                        mask=sample.mask(queries, n_cells),
                        sinks=sample.sinks,
                        out=out[queries],
                    )
                seconds.append(time.perf_counter() - start)
        return out, min(seconds)


def cpu_devices(threads: int) -> list[Cpu]:
    """One for each instruction set that this machine runs."""
    smallest = Problem(1, 1, 64, 64, 1).shape
    found = []
    for isa in CPU_ISAS:
        try:
            CpuAttention(smallest, 1, isa).close()
        except PaError as error:
            if error.status is not PaStatus.UNSUPPORTED:
                raise
        else:
            found.append(Cpu(isa, threads))
    return found


def check(devices: Sequence[Device]) -> Iterator[Row]:
    """Every shape on every device, against one reference for each shape, each row as it is there. A
    device that has failed is not asked again: after a fault a GPU answers every call with it."""
    broken: set[str] = set()
    for shape, problem in PROBLEMS.items():
        sample = make(problem)
        right = exact(sample, range(sample.problem.n_q))
        for device in devices:
            if device.name in broken:
                failed = "not run: the device failed before"
                yield Row(device.name, shape, device.bound, failed=failed)
                continue
            row = compare(device, shape, sample, right)
            if row.failed:
                broken.add(device.name)
            yield row


def compare(device: Device, shape: str, sample: Sample, right: NDArray[np.float64]) -> Row:
    try:
        out, seconds = device.compute(sample)
    except TieringError as error:
        if isinstance(error, PaError) and error.status is PaStatus.UNSUPPORTED:
            return Row(device.name, shape, device.bound, why=error.message)
        return Row(device.name, shape, device.bound, failed=error.message)
    return Row(device.name, shape, device.bound, relative_error(out, right), seconds)
