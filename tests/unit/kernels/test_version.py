"""The version of the exact attention is part of every namespace: its bits are its version.

A fixed set of cases runs through the library, and the digest of the results is recorded for the
version that csrc/include/paged_attn/order.h states. Another digest means other bits: raise
kExactVersion there and Version in patches/overlay/exactattn/exactattn.go, then record the
digest that the failing test prints. A change of the sources that changes no bit needs neither.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ollama_tiering.kernels import (
    CpuAttention,
    DenseMask,
    Dtype,
    PaError,
    PositionMask,
    Rows,
    Shape,
)
from ollama_tiering.patchset import kernels, manifest

# Version -> digest of the results of avx512, avx2 and neon, which agree (docs/attention/exact.md).
RECORDED = {2: "a368c3192ba83c1898f521cc97e97b02a364f3ca6ee4a1752a42db11455cda6f"}

N_CELLS = 900  # beyond one chunk


def _bytes(name: str, count: int) -> NDArray[np.uint8]:
    """The same bytes with every version of every library."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(count), np.uint8)


def _numbers(name: str, axes: tuple[int, ...], largest: float) -> NDArray[np.float32]:
    """Evenly spread over [-largest, largest)."""
    words = _bytes(name, 2 * int(np.prod(axes))).view("<u2").astype(np.float32)
    return ((words - 32768.0) * np.float32(largest / 32768.0)).reshape(axes)


def _rows(name: str, dtype: Dtype, d: int, n_head: int) -> Rows:
    """Random bits; of floats and scales the exponent is one that sums of a few hundred bear."""
    data = _bytes(name, N_CELLS * n_head * dtype.row_bytes(d)).copy()
    data = data.reshape(1, N_CELLS, n_head, dtype.row_bytes(d))
    if dtype is Dtype.F32:
        return Rows.of_values(_numbers(name, (N_CELLS, n_head, d), 2.0), dtype)
    if dtype is Dtype.F16:
        data[..., 1::2] = data[..., 1::2] & 0x83 | 0x38
    elif dtype is Dtype.BF16:
        data[..., 1::2] = data[..., 1::2] & 0x80 | 0x3F
    else:
        data[..., 1 :: dtype.block_bytes] = 0x24 if dtype is Dtype.Q8_0 else 0x34
    return Rows(data, dtype)


def _results(isa: str) -> Iterator[NDArray[np.float32]]:
    for dtype in Dtype:
        for d, n_head, n_q, softcap in (
            (64, 4, 1, 0.0),
            (96, 10, 3, 30.0),
            (128, 2, 40, 0.0),
            (256, 6, 2, 0.0),
        ):
            name = f"{dtype.name} {d} {n_head} {n_q}"
            k, v = _rows("K " + name, dtype, d, 2), _rows("V " + name, dtype, d, 2)
            q = _numbers("q " + name, (n_q, n_head, d), 40.0 if n_q == 2 else 2.0)
            order = np.argsort(_numbers("order " + name, (N_CELLS,), 1.0), kind="stable")
            seen = _bytes("seen " + name, n_q * N_CELLS).reshape(n_q, N_CELLS) < 200
            masks = (
                PositionMask.causal(n_q, N_CELLS, window=0 if n_q == 1 else 500),
                DenseMask(DenseMask.of(seen).values, order.astype(np.int32)),
            )
            shape = Shape(n_head, 2, d, d, n_q, N_CELLS, dtype, dtype, softcap=softcap)
            with CpuAttention(shape, threads=2, isa=isa) as attention:
                for mask in masks:
                    yield attention.run(q, k, v, mask=mask)
                yield attention.run(q, k, v, sinks=_numbers("sink " + name, (n_head,), 9.0))


def _digest(isa: str) -> str:
    state = hashlib.sha256()
    for result in _results(isa):
        assert np.isfinite(result).all()
        state.update(result.astype("<f4").tobytes())
    return state.hexdigest()


def _stated() -> int:
    root = manifest.default_root()
    header = (kernels.default_include(root) / "paged_attn/order.h").read_text(encoding="utf-8")
    version = re.search(r"constexpr int kExactVersion = (\d+);", header)
    assert version
    return int(version[1])


@pytest.mark.parametrize("isa", ["avx512", "avx2", "neon"])
def test_other_bits_are_another_version(isa: str) -> None:
    try:
        found = _digest(isa)
    except PaError as missing:
        pytest.skip(str(missing))
    assert found == RECORDED.get(_stated())


def test_the_namespace_has_the_version_of_the_kernels() -> None:
    go = (manifest.default_root() / "overlay/exactattn/exactattn.go").read_text(encoding="utf-8")
    version = re.search(r"(?m)^const Version = (\d+)", go)
    assert version
    assert int(version[1]) == _stated()
