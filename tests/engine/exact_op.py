"""Attention of a few layers through the shim on the fake GPU (tests/fakegpu/driver/op.cpp), and
its answer in f64.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.patchset import shim
from tests.engine import paged
from tests.engine.fake_gpu import devices

F32, F64 = NDArray[np.float32], NDArray[np.float64]
GGML_TYPES = {"f16": 1, "q8_0": 8}
FAILED = 3  # exit code: the graph failed


@dataclass(frozen=True)
class Case:
    """`new`: rows that the graph itself writes, the last ones. `sink_nats` > 0: the logit of cell 0
    is that much above the others, whose values are what the answer is made of.
    """

    n_q: int = 1
    heads: int = 4
    kv_heads: int = 2
    cells: int = 256
    new: int = 1
    d: int = 64
    kind: str = "f16"
    softcap: float = 0.0
    sinks: bool = False
    causal: bool = True
    sink_nats: float = 0.0

    @property
    def scale(self) -> float:
        return float(np.float32(self.d**-0.5))

    def inputs(self, seed: int = 1) -> Inputs:
        random = np.random.default_rng(seed)

        def normal(*shape: int, mean: float = 0.0) -> F32:
            return (mean + random.standard_normal(shape)).astype(np.float32)

        q = normal(self.n_q, self.heads, self.d)
        k = normal(self.cells, self.kv_heads, self.d)
        v = normal(self.cells, self.kv_heads, self.d, mean=0.3)
        if self.sink_nats:
            q[..., 0] = 8.0
            k[..., 0] = 0.0
            k[0] = 0.0
            k[0, :, 0] = self.sink_nats / self.scale / 8.0
            v[0] *= 0.05
        mask = np.zeros((self.n_q, self.cells), np.float32)
        if self.causal:  # the last cells are the queries' own
            for query in range(self.n_q):
                mask[query, self.cells - self.n_q + query + 1 :] = -np.inf
        return Inputs(self, q, k, v, mask, normal(self.heads))


@dataclass(frozen=True)
class Inputs:
    case: Case
    q: F32  # [n_q][heads][d]
    k: F32  # [cells][kv_heads][d]
    v: F32
    mask: F32  # [n_q][cells]
    sinks: F32  # [heads]

    def answer(self) -> F64:
        """Over K and V as f16 holds them."""
        case = self.case
        group = case.heads // case.kv_heads
        k, v = (
            np.repeat(x.astype(np.float16), group, axis=1).astype(float) for x in (self.k, self.v)
        )
        logits = case.scale * np.einsum("qhd,chd->qhc", self.q.astype(float), k, optimize=True)
        if case.softcap:
            logits = case.softcap * np.tanh(logits / case.softcap)
        logits += self.mask[:, None, :]
        most = logits.max(axis=2, keepdims=True)
        sinks = self.sinks.astype(float)[None, :, None]
        if case.sinks:
            most = np.maximum(most, sinks)
        weights = np.exp(logits - most)
        total = weights.sum(axis=2, keepdims=True)
        if case.sinks:
            total = total + np.exp(sinks - most)
        return np.asarray(np.einsum("qhc,chd->qhd", weights / total, v, optimize=True))


@dataclass(frozen=True)
class Ran:
    code: int
    layers: F32  # [layers][n_q][heads][d]; empty where the graph failed
    said: str
    log: str  # of the fake GPU

    @property
    def launches(self) -> int:
        return self.log.count(": kernel pa_")


def run(binary: Path, folder: Path, inputs: Inputs, places: str = "p", **env: object) -> Ran:
    """`places`: a letter for each layer, p paged or h on the device. `env`: OLLAMA_PAGED_ENGINE is
    exact if it does not say otherwise.
    """
    case = inputs.case
    lib = binary.parents[1] / "lib/ollama/cuda_fake"
    numbers = (case.n_q, case.heads, case.kv_heads, case.d, case.cells, case.new)
    words = [
        *numbers,
        GGML_TYPES[case.kind],
        case.scale,
        case.softcap,
        int(case.causal),
        int(case.sinks),
    ]
    log = folder / "devices.log"
    log.unlink(missing_ok=True)
    chosen = paged.ON | paged.EXACT | devices(1024, LOG=str(log))
    chosen |= {key: str(value) for key, value in env.items()}
    done = subprocess.run(
        [lib / "op", lib / shim.LIBRARY, places, *map(str, words)],
        input=b"".join(
            x.tobytes() for x in (inputs.q, inputs.k, inputs.v, inputs.mask, inputs.sinks)
        ),
        env=os.environ | chosen,
        capture_output=True,
        check=False,
    )
    said = done.stderr.decode()
    assert done.returncode in (0, FAILED), said
    shape = (len(places) if not done.returncode else 0, case.n_q, case.heads, case.d)
    layers = np.frombuffer(done.stdout, np.float32).reshape(shape)
    return Ran(done.returncode, layers, said, log.read_text(encoding="utf-8"))


def error(found: F32, wanted: F64) -> float:
    """Relative L2 error; NaN where something is."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def nmse(found: F32, other: F32) -> float:
    """Mean square of the difference, as a share of `other`'s."""
    a, b = found.astype(float), other.astype(float)
    return float(((a - b) ** 2).mean() / (b**2).mean())
