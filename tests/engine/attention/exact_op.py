"""Attention of a few layers through the shim on the fake GPU
(tests/attention/fakegpu/driver/op.cpp), and its answer in f64.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.patchset import shim
from ollama_tiering.patchset.finished import source_of
from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import devices

F32, F64 = NDArray[np.float32], NDArray[np.float64]
GGML_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
FAILED = 3  # exit code: the graph failed
PROMISED = 1e-4  # relative error against f64, with K/V in f16
MOST = PROMISED / 10  # the largest that was seen is 2.3e-6
LATE = {
    "the stock stream is late": {"FAKEGPU_DELAY_US": "20000,0,0"},
    "our stream is late": {"FAKEGPU_DELAY_US": "0,20000,0"},
    "the copies are late": {"FAKEGPU_DELAY_US": "0,0,20000"},
    "all are": {"FAKEGPU_DELAY_US": "9000"},
}


@dataclass(frozen=True)
class Case:
    """`kind`: of K and V, or of K, a slash, and of V. `new`: rows that the graph itself writes, the
    last ones, or from cell `new_at` on. `sink_nats` > 0: the logit of cell 0 is that much above the
    others, whose values are what the answer is made of.
    """

    n_q: int = 1
    heads: int = 4
    kv_heads: int = 2
    cells: int = 256
    new: int = 1
    new_at: int | None = None
    d: int = 64
    d_v: int = 0  # 0: as long as K's
    kind: str = "f16"
    softcap: float = 0.0
    sinks: bool = False
    causal: bool = True
    sink_nats: float = 0.0

    @property
    def scale(self) -> float:
        return float(np.float32(self.d**-0.5))

    @property
    def kinds(self) -> tuple[str, str]:
        k, _, v = self.kind.partition("/")
        return k, v or k

    @property
    def v_dim(self) -> int:
        return self.d_v or self.d

    def inputs(self, seed: int = 1) -> Inputs:
        random = np.random.default_rng(seed)

        def normal(*shape: int, mean: float = 0.0) -> F32:
            return (mean + random.standard_normal(shape)).astype(np.float32)

        q = normal(self.n_q, self.heads, self.d)
        k = normal(self.cells, self.kv_heads, self.d)
        v = normal(self.cells, self.kv_heads, self.v_dim, mean=0.3)
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

    def answer(self, stored_k: F32 | None = None, stored_v: F32 | None = None) -> F64:
        """Over these K and V; if there are none, over K and V as f16 holds them."""
        case = self.case
        group = case.heads // case.kv_heads
        k, v = (
            np.repeat(given.astype(np.float16) if stored is None else stored, group, axis=1).astype(
                float
            )
            for given, stored in ((self.k, stored_k), (self.v, stored_v))
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
    layers: F32  # [layers][n_q][heads][d_v]; empty where the graph failed
    k: F32  # [cells][kv_heads][d], as it is stored
    v: F32
    said: str
    log: str  # of the fake GPU

    @property
    def launches(self) -> int:
        return self.log.count(": kernel pa_")

    @property
    def attended(self) -> int:
        """Operations that were computed by kernels, each in any number of launches."""
        return self.log.count(": kernel pa_combine ")

    @property
    def grids(self) -> list[tuple[str, int]]:
        """Of each attention: its kernel, and the splits of its cells."""
        found = re.findall(r": kernel (pa_\w+) of (\d+) x", self.log)
        return [(name, int(splits)) for name, splits in found if name != "pa_combine"]


def run(
    binary: Path,
    folder: Path,
    inputs: Inputs,
    places: str = "p",
    *,
    reserved: int = 0,
    runs: int = 1,
    **env: object,
) -> Ran:
    """`places`: a letter for each layer, p paged or h on the device, a capital for K and V in f16
    whatever the case says, u paged with writes that say nothing. `reserved`: queries of a batch
    that memory is taken for before. `runs`: how often the graph is computed. `env`:
    OLLAMA_PAGED_ENGINE is exact if it does not say otherwise.
    """
    case = inputs.case
    lib = binary.parents[1] / "lib/ollama/cuda_fake"
    heads = (case.heads, case.kv_heads, case.d, case.v_dim)
    words = [
        case.n_q,
        *heads,
        case.cells,
        case.new,
        *(GGML_TYPES[kind] for kind in case.kinds),
        case.scale,
        case.softcap,
        int(case.causal),
        int(case.sinks),
        reserved,
        runs,
        case.cells - case.new if case.new_at is None else case.new_at,
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
    layers = len(places) if not done.returncode else 0
    cells = case.cells if layers else 0
    parts = []
    output = np.frombuffer(done.stdout, np.float32)
    for shape in (
        (layers, case.n_q, case.heads, case.v_dim),
        (cells, case.kv_heads, case.d),
        (cells, case.kv_heads, case.v_dim),
    ):
        part, output = np.split(output, [int(np.prod(shape))])
        parts.append(part.reshape(shape))
    assert not len(output)
    return Ran(done.returncode, *parts, said, log.read_text(encoding="utf-8"))


def error(found: F32, wanted: F64) -> float:
    """Relative L2 error; NaN where something is."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def nmse(found: F32, other: F32) -> float:
    """Mean square of the difference, as a share of `other`'s."""
    a, b = found.astype(float), other.astype(float)
    return float(((a - b) ** 2).mean() / (b**2).mean())


def changed_binary(
    exact_binary: Path, binary: Path, folder: Path, *changes: tuple[str, str, str]
) -> Path:
    """The installed program with another shim."""
    shutil.copytree(exact_binary.parents[1], folder / "changed", symlinks=True)
    lib = folder / "changed/lib/ollama/cuda_fake"
    paged.compile_changed(source_of(binary), lib, folder / "src", *changes)
    return folder / "changed/bin/ollama"
