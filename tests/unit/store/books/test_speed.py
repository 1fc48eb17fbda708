"""How fast a tier is taken to be."""

from __future__ import annotations

from ollama_tiering.store.books.speed import SpeedMeter
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier


def test_speeds_move_with_samples_and_ignore_tiny_ones() -> None:
    meter = SpeedMeter(MemoryTier(TierKind.LOCAL))
    per_block, per_byte = meter.expectation()
    assert meter.read == 0  # not measured: a default stands in, but nobody is told it is a figure
    assert per_block > 0
    assert per_byte > 0
    meter.add_read(100, 1.0)
    assert meter.read == 0
    meter.add_read(1_000_000, 1.0)
    assert meter.read == 1e6
    meter.add_read(2_000_000, 1.0)
    assert 1e6 < meter.read < 2e6
    assert meter.expectation()[1] == 1 / meter.read
    meter.add_read(1_000_000, 0.0)
    assert 1e6 < meter.read < 2e6


class FakeBlock:
    file_bytes = 1 << 20

    def __init__(self, resident: bool | None) -> None:
        self._resident = resident

    def read_at(self, offset: int, length: int) -> bytes:
        return bytes(length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = bytes(buffer.nbytes)

    def resident(self) -> bool | None:
        return self._resident


def test_reads_from_the_page_cache_say_nothing_about_a_disk() -> None:
    disk, ram = SpeedMeter(MemoryTier(TierKind.LOCAL)), SpeedMeter(MemoryTier(TierKind.RAM))
    assert [disk.counts(FakeBlock(state)) for state in (True, None, False)] == [False, False, True]
    assert ram.counts(FakeBlock(True))
