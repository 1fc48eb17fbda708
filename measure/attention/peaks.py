"""What this machine can do without attention: multiply-adds in registers, bytes
read, bytes copied.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FMA_REPEATS: Final = 20  # of 2 ms each: one of them finds the cores undisturbed

_DOUBLE, _INT, _SIZE, _ADDRESS = ctypes.c_double, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p


class Peaks:
    """csrc/bench/machine_peaks.cpp with `threads` threads. Rates per second, the best of
    several runs (`repeats`, of those that read memory)."""

    def __init__(
        self, library: Path, threads: int, *, repeats: int = 3, memory_bytes: int = 512 << 20
    ) -> None:
        """`memory_bytes` are read; they must be far more than a last-level cache holds."""
        self.threads, self.repeats, self._memory_bytes = threads, repeats, memory_bytes
        loaded = ctypes.CDLL(str(library))
        self._fma = loaded.pab_fma_flops
        self._read = loaded.pab_read_rate
        self._copy = loaded.pab_copy_rate
        self._fma.argtypes = [ctypes.c_char_p, _INT, _INT]
        self._read.argtypes = [_ADDRESS, _SIZE, _INT, _INT]
        self._copy.argtypes = [_ADDRESS, _ADDRESS, _SIZE, _INT, _INT]
        for function in (self._fma, self._read, self._copy):
            function.restype = _DOUBLE

    def fma_flops(self, isa: str) -> float:
        """f32 operations per second; a multiply-add counts as two. 0 if this machine lacks the
        `isa`, and for `scalar`, which has no peak of its own.
        """
        return float(self._fma(isa.encode(), self.threads, _FMA_REPEATS))

    def read_bytes(self) -> float:
        data = self._memory
        return float(self._read(data.ctypes.data, data.nbytes, self.threads, self.repeats))

    @cached_property
    def _memory(self) -> NDArray[np.uint8]:
        """Memory whose pages are resident."""
        return np.ones(self._memory_bytes, np.uint8)

    def copy_bytes(self) -> float:
        """Bytes per second from one half of the memory to the other; each byte counts once."""
        half = self._memory.nbytes // 2
        start = self._memory.ctypes.data
        return float(self._copy(start + half, start, half, self.threads, self.repeats))
