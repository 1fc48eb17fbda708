"""Sides take turns; ggml gets the sample as its program expects it, and its output is read back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ollama_tiering.bench.attention.alternate import Series, alternate
from ollama_tiering.bench.attention.sides import Ours, ggml
from ollama_tiering.errors import TieringError
from ollama_tiering.kernels.samples import Problem, exact, make, relative_error
from ollama_tiering.kernels.shape import Dtype

SMALL = Problem(4, 2, 32, 32, 40, n_q=20, batch=8)

# Stands in for ggml-attention: f64 attention of the last query, from the file and options alone.
PROGRAM = """
import sys, numpy as np
o = dict(pair.split("=") for pair in sys.argv[2:])
if o["flash"] == "0" and o["v_type"] == "q8_0":
    sys.exit("ggml-attention: without flash attention V cannot be quantised")
h, g, d, c, n = (int(o[x]) for x in ("heads", "kv_heads", "d_k", "cells", "queries"))
data = np.fromfile(sys.argv[1], np.uint8)
q, rest = data[: 4 * n * h * d].view(np.float32).reshape(n, h, d), data[4 * n * h * d :]
size = 2 * c * g * d
k, v = (rest[i * size :][:size].view(np.float16).reshape(c, g, d).astype(float) for i in (0, 1))
rest = rest[2 * size :]
assert rest.size == 4 * n * h * d
out = np.zeros((n, h, d), np.float32)
for i in range(n):
    for head in range(h):
        seen = c - n + i + 1
        s = np.exp(k[:seen, head // (h // g)] @ q[i, head].astype(float) / d**0.5)
        out[i, head] = s @ v[:seen, head // (h // g)] / s.sum()
with open(sys.argv[1], "r+b") as file:
    file.seek(data.size - rest.size)
    file.write(out.tobytes())
for _ in range(int(o["repeats"])):
    print("0.250000000" if o["flash"] == "1" else "0.125000000")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "ggml-attention"
    path.write_text(f"#!{sys.executable}\n{PROGRAM}")
    path.chmod(0o755)
    return path


def test_sides_take_turns_and_all_repetitions_count() -> None:
    order: list[str] = []

    def turn(name: str, seconds: list[float]) -> list[float]:
        order.append(name)
        return seconds

    series = alternate(
        {"a": lambda: turn("a", [3.0, 1.0]), "b": lambda: turn("b", [5.0])}, rounds=2
    )
    assert order == ["a", "b", "a", "b"]
    assert series["a"] == Series((3.0, 1.0, 3.0, 1.0))
    assert (series["a"].best, series["a"].median) == (1.0, 2.0)


@pytest.mark.usefixtures("numpy_kernels")
def test_ours_runs_every_batch_and_fills_the_output() -> None:
    sample = make(SMALL)
    ours = Ours(sample, 1, "auto", repeats=2)
    seconds = ours.turn()
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert relative_error(ours.out, exact(sample, range(20))) < 1e-6


@pytest.mark.usefixtures("numpy_kernels")
def test_ggml_gets_the_same_data_and_its_output_is_read(program: Path) -> None:
    sample = make(SMALL)
    with ggml(program, sample, 1) as theirs:
        file = theirs._file
        assert theirs.turn(flash=True, repeats=3) == [0.25] * 3
        assert theirs.turn(flash=False, repeats=1) == [0.125]
        assert relative_error(theirs.out, exact(sample, range(20))) < 1e-6
        assert not np.shares_memory(theirs.out, sample.q)
    assert not file.exists()


def test_what_ggml_says_when_it_fails_is_the_error(program: Path) -> None:
    sample = make(Problem(4, 2, 32, 32, 40, k_type=Dtype.Q8_0, v_type=Dtype.Q8_0))
    with (
        ggml(program, sample, 1) as theirs,
        pytest.raises(TieringError, match="V cannot be quantised"),
    ):
        theirs.turn(flash=False, repeats=1)
