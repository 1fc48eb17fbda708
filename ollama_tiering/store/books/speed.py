"""How fast a tier really reads and writes, and this machine decodes: moving averages.

Reads count only when the bytes were not in the page cache before (or the tier is volatile): what
is promised to a client must also hold when the block comes from the disk. Until something was
measured, the tier's first guess stands in, and the meter says 0 to whoever asks what was measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from ollama_tiering.store.tiers.contract import OpenBlock, Tier

_WEIGHT: Final = 0.3
_MIN_SAMPLE_BYTES: Final = 64 << 10


class BusyMeter:
    """Times work of which several pieces go on at once: what a client that asks for several blocks
    gets. The share of the wall time that a piece counts itself is told to `add`, with the bytes,
    whenever nothing goes on any more; a time in which a piece failed says nothing. Thread-safe.
    """

    def __init__(self, add: Callable[[int, float], None]) -> None:
        self._add = add
        self._lock = threading.Lock()
        self._active = 0
        self._since = self._counted = self._rest = 0.0
        self._moved_bytes = 0
        self._spoilt = False

    def begin(self) -> None:
        with self._lock:
            if not self._active:
                self._since, self._counted, self._rest = time.perf_counter(), 0.0, 0.0
                self._moved_bytes, self._spoilt = 0, False
            self._active += 1

    def end(self, moved_bytes: int, counted_seconds: float, other_seconds: float) -> None:
        """A piece is done, or with 0 bytes is not."""
        with self._lock:
            self._active -= 1
            self._moved_bytes += moved_bytes
            self._counted += counted_seconds
            self._rest += other_seconds
            self._spoilt = self._spoilt or not moved_bytes
            busy = self._counted + self._rest
            if self._active or self._spoilt or not busy:
                return
            wall = time.perf_counter() - self._since
            self._add(self._moved_bytes, wall * self._counted / busy)


class SpeedMeter:
    """Thread-safe. `read` and `write` are bytes per second, 0 when never measured; `busy` adds to
    `read`.
    """

    def __init__(self, tier: Tier) -> None:
        self._guess = tier.first_guess
        self._always_counts = tier.is_volatile
        self.busy = BusyMeter(self.add_read)
        self._lock = threading.Lock()
        self.read = 0.0
        self.write = 0.0

    def add_read(self, read_bytes: int, seconds: float) -> None:
        with self._lock:
            self.read = _moved(self.read, read_bytes, seconds)

    def add_write(self, written_bytes: int, seconds: float) -> None:
        with self._lock:
            self.write = _moved(self.write, written_bytes, seconds)

    def expectation(self) -> tuple[float, float]:
        """(seconds per block, seconds per byte) to have a block of this tier in host memory."""
        return self._guess.seconds_per_block, 1.0 / (self.read or self._guess.bytes_per_second)

    def counts(self, block: OpenBlock) -> bool:
        """Ask before reading: whether the time it takes will say something about the tier."""
        return self._always_counts or block.resident() is False


class DecodeMeter:
    """Decoded bytes per second while anything is decoded, however many blocks at a time, reading
    taken out: what decoding adds for a client that asks for several. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = BusyMeter(self.add)
        self.bytes_per_second = 0.0  # moving average; 0 when never measured

    def begin(self) -> None:
        self._busy.begin()

    def end(self, decoded_bytes: int, reading_seconds: float, other_seconds: float) -> None:
        """A block is there, or with 0 bytes is not: then this time says nothing."""
        self._busy.end(decoded_bytes, other_seconds, reading_seconds)

    def add(self, decoded_bytes: int, seconds: float) -> None:
        """One sample by itself."""
        with self._lock:
            self.bytes_per_second = _moved(self.bytes_per_second, decoded_bytes, seconds)


def _moved(average: float, moved_bytes: int, seconds: float) -> float:
    if moved_bytes < _MIN_SAMPLE_BYTES or seconds <= 0:
        return average
    sample = moved_bytes / seconds
    return sample if not average else average + _WEIGHT * (sample - average)
