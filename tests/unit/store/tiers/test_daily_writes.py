"""The day's writes: they survive restarts and kills, and clocks that jump."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ollama_tiering.store.tiers.daily_writes import DailyWrites
from ollama_tiering.store.tiers.names import WRITTEN_NAME

MB = 1 << 20
DAY = 86400.0


class Clocks:
    def __init__(self) -> None:
        self.wall = 20_000 * DAY + 1000
        self.monotonic = 5.0

    def tick(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def open(self, path: Path | None, limit: int = 100 * MB) -> DailyWrites:
        return DailyWrites(path, limit, clock=lambda: self.monotonic, wall_clock=lambda: self.wall)


def test_the_limit_holds_to_the_byte() -> None:
    writes = Clocks().open(None)
    assert writes.charge(60 * MB)
    assert not writes.charge(41 * MB)
    assert writes.charge(40 * MB)
    assert writes.exhausted
    writes.refund(10 * MB)
    assert not writes.exhausted
    assert writes.written_bytes == 90 * MB


def test_no_limit_is_counted_all_the_same() -> None:
    writes = Clocks().open(None, 0)
    assert writes.charge(1 << 50)
    assert writes.written_bytes == 1 << 50
    assert not writes.exhausted


def test_a_clean_restart_knows_the_exact_count(tmp_path: Path) -> None:
    clocks = Clocks()
    writes = clocks.open(tmp_path / WRITTEN_NAME)
    writes.charge(30 * MB)
    writes.close()
    assert clocks.open(tmp_path / WRITTEN_NAME).written_bytes == 30 * MB


def test_a_kill_costs_some_of_the_day_and_never_gives_any(tmp_path: Path) -> None:
    clocks = Clocks()
    writes = clocks.open(tmp_path / WRITTEN_NAME, 1000 * MB)
    for _ in range(30):
        writes.charge(7 * MB)
    killed = clocks.open(tmp_path / WRITTEN_NAME, 1000 * MB)
    assert 210 * MB <= killed.written_bytes <= (210 + 1000 // 64 + 1) * MB


def test_a_kill_never_makes_the_count_larger_than_the_limit(tmp_path: Path) -> None:
    clocks = Clocks()
    clocks.open(tmp_path / WRITTEN_NAME, 1000).charge(999)
    assert clocks.open(tmp_path / WRITTEN_NAME, 1000).written_bytes <= 1000


def test_a_new_day_starts_at_zero() -> None:
    clocks = Clocks()
    writes = clocks.open(None)
    writes.charge(100 * MB)
    clocks.tick(DAY)
    assert writes.written_bytes == 0
    assert writes.charge(1)


def test_a_clock_that_goes_back_does_not_end_the_day(tmp_path: Path) -> None:
    clocks = Clocks()
    writes = clocks.open(tmp_path / WRITTEN_NAME)
    writes.charge(100 * MB)
    clocks.wall -= 3 * DAY
    assert writes.exhausted
    writes.close()
    again = clocks.open(tmp_path / WRITTEN_NAME)
    assert again.exhausted
    clocks.tick(DAY)
    assert not again.exhausted


def test_a_clock_set_to_the_far_future_and_back_stops_nobody_for_ever(tmp_path: Path) -> None:
    clocks = Clocks()
    clocks.wall += 30_000 * DAY
    writes = clocks.open(tmp_path / WRITTEN_NAME)
    writes.charge(100 * MB)
    writes.close()
    clocks.wall -= 30_000 * DAY
    again = clocks.open(tmp_path / WRITTEN_NAME)
    assert again.exhausted
    clocks.tick(DAY)
    assert not again.exhausted


def test_a_clock_that_jumps_on_and_on_gives_two_days_at_most() -> None:
    clocks = Clocks()
    writes = clocks.open(None)
    written = 0
    for _ in range(50):
        while writes.charge(10 * MB):
            written += 10 * MB
        clocks.wall += DAY
    assert written == 200 * MB


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"day": "x", "written_bytes": 1}', '{"day": 1', "\0" * 100]
)
def test_a_count_that_cannot_be_read_starts_again(tmp_path: Path, content: str) -> None:
    (tmp_path / WRITTEN_NAME).write_text(content)
    writes = Clocks().open(tmp_path / WRITTEN_NAME)
    assert writes.written_bytes == 0
    assert writes.charge(MB)
    assert json.loads((tmp_path / WRITTEN_NAME).read_text())["written_bytes"] >= MB


@pytest.mark.parametrize("planted", [-5, 1 << 70])
def test_an_absurd_count_is_cut(tmp_path: Path, planted: int) -> None:
    document = {"day": 20_000, "written_bytes": planted}
    (tmp_path / WRITTEN_NAME).write_text(json.dumps(document))
    assert 0 <= Clocks().open(tmp_path / WRITTEN_NAME).written_bytes <= 1 << 60


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / WRITTEN_NAME).symlink_to(target)
    writes = Clocks().open(tmp_path / WRITTEN_NAME)
    writes.charge(MB)
    assert target.read_text() == "mine"
    assert not (tmp_path / WRITTEN_NAME).is_symlink()
