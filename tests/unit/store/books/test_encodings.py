"""What each tier writes, and what decoding is measured to take."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from ollama_tiering.store.books import encodings
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.speed import DecodeMeter
from ollama_tiering.store.upkeep.index import BlockIndex

MB = 1_000_000


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(encodings.time, "perf_counter", lambda: self.now)


def test_two_at_a_time_count_as_one_time_and_reading_is_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, meter = Clock(monkeypatch), DecodeMeter()
    meter.begin()
    meter.begin()
    clock.now += 1.0
    meter.end(10 * MB, 0.5, 0.5)
    assert meter.bytes_per_second == 0
    clock.now += 1.0
    meter.end(10 * MB, 1.5, 0.5)
    # 2 s of wall, of which a third was decoding and writing
    assert meter.bytes_per_second == pytest.approx(20 * MB / (2.0 / 3))


def test_a_time_with_a_failure_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = Clock(monkeypatch), DecodeMeter()
    meter.begin()
    meter.begin()
    clock.now += 1.0
    meter.end(0, 0.1, 0.1)
    meter.end(10 * MB, 0.5, 0.5)
    assert meter.bytes_per_second == 0
    meter.begin()
    clock.now += 1.0
    meter.end(10 * MB, 0.0, 1.0)
    assert meter.bytes_per_second == pytest.approx(10 * MB)


def test_samples_move_the_average_and_tiny_ones_do_not() -> None:
    meter = DecodeMeter()
    meter.add(10 * MB, 1.0)
    meter.add(20 * MB, 1.0)
    assert meter.bytes_per_second == pytest.approx(13 * MB)
    meter.add(100, 1e-9)
    meter.add(10 * MB, 0.0)
    assert meter.bytes_per_second == pytest.approx(13 * MB)


def test_an_estimate_is_there_before_anything_was_measured_and_after_a_probe() -> None:
    measured = TierEncodings()
    assert measured.decode_seconds(300 * MB) == pytest.approx(1.0)
    measured.measure()
    assert measured.decoding.bytes_per_second > 0
    assert measured.decode_seconds(MB) == pytest.approx(MB / measured.decoding.bytes_per_second)


@pytest.mark.parametrize("damaged", ["'fast'", "-1.0", "NULL", "x'00'"])
def test_a_speed_that_is_none_is_not_taken_from_the_index(tmp_path: Path, damaged: str) -> None:
    index = BlockIndex(tmp_path / "index.sqlite")
    index.save_speeds([(0, 1e9, 0.0), (2, 2e9, 1e9)])
    with contextlib.suppress(sqlite3.IntegrityError):  # the schema refuses NULL by itself
        index._connection.execute(f"UPDATE speeds SET read = {damaged} WHERE tier = 0")
        assert index.load_speeds() == {2: (2e9, 1e9)}
    index.close()
