"""The two sides that are compared: ours, and ggml's with and without flash attention.

Both run the same problem on the same q, K and V. A turn returns the seconds of each repetition.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.errors import TieringError
from ollama_tiering.kernels.cpu import CpuAttention
from ollama_tiering.kernels.mask import Mask
from ollama_tiering.kernels.samples import Sample
from ollama_tiering.patchset.run import run


class Ours:
    """A plan of the CPU library and the problem it runs. `out` is the last turn's output."""

    def __init__(self, sample: Sample, threads: int, isa: str, repeats: int) -> None:
        problem = sample.problem
        self._sample, self._repeats = sample, repeats
        self._plan = CpuAttention(problem.shape, threads, isa)
        self._batches = [
            (queries, n_cells, sample.mask(queries, n_cells))
            for queries, n_cells in problem.batches()
        ]
        self.isa = self._plan.isa
        self.out: NDArray[np.float32] = np.zeros(
            (problem.n_q, problem.n_head, problem.d_v), np.float32
        )

    def turn(self) -> Sequence[float]:
        """The last batch runs once before, without being measured."""
        self._run(*self._batches[-1])
        return [sum(self._run(*batch) for batch in self._batches) for _ in range(self._repeats)]

    def _run(self, queries: slice, n_cells: int, mask: Mask | None) -> float:
        sample = self._sample
        q, out = sample.q[queries], self.out[queries]
        start = time.perf_counter()
        self._plan.run(
            q, sample.k, sample.v, n_cells=n_cells, mask=mask, sinks=sample.sinks, out=out
        )
        return time.perf_counter() - start

    def close(self) -> None:
        self._plan.close()


class Ggml:
    """csrc/bench/ggml on a sample that is written to a file once. Each turn is a process."""

    def __init__(self, program: Path, sample: Sample, threads: int, file: Path) -> None:
        self._program, self._sample, self._threads, self._file = program, sample, threads, file
        problem = sample.problem
        cells = problem.n_cells
        with file.open("wb") as sink:
            for part in (sample.q, sample.k.cells(cells), sample.v.cells(cells)):
                sink.write(np.ascontiguousarray(part).data)
            self._out_offset = sink.tell()
            sink.truncate(self._out_offset + 4 * problem.n_q * problem.n_head * problem.d_v)

    def turn(self, *, flash: bool, repeats: int) -> Sequence[float]:
        problem = self._sample.problem
        options = {
            "heads": problem.n_head,
            "kv_heads": problem.n_kv_head,
            "d_k": problem.d_k,
            "d_v": problem.d_v,
            "cells": problem.n_cells,
            "queries": problem.n_q,
            "batch": problem.batch,
            "repeats": repeats,
            "threads": self._threads,
            "k_type": problem.k_type.name.lower(),
            "v_type": problem.v_type.name.lower(),
            "flash": int(flash),
        }
        pairs = [f"{name}={value}" for name, value in options.items()]
        done = run(self._program, self._file, *pairs)
        if done.returncode:
            why = done.tail[-1] if done.tail else f"exit code {done.returncode}"
            raise TieringError(f"{self._program.name} failed: {why}")
        return [float(line) for line in done.stdout.split()]

    @property
    def out(self) -> NDArray[np.float32]:
        """The output of the last turn."""
        problem = self._sample.problem
        values = np.fromfile(self._file, np.float32, offset=self._out_offset)
        return values.reshape(problem.n_q, problem.n_head, problem.d_v)


@contextlib.contextmanager
def ggml(program: Path, sample: Sample, threads: int) -> Iterator[Ggml]:
    """The file lies on tmpfs if there is one, and is removed at the end."""
    memory = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(
        prefix="ggml-attention-", dir=memory if memory.is_dir() else None
    ) as file:
        yield Ggml(program, sample, threads, Path(file.name))
