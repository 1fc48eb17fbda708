from __future__ import annotations

import logging

import pytest

from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger("seldom-test")


class Said:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        self.seldom = QuietLog(log, clock=lambda: self.now)
        self._caplog = caplog

    def lines(self) -> list[str]:
        found = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    return Said(caplog)


def test_ten_thousand_lines_of_one_kind_are_one(said: Said) -> None:
    for number in range(10_000):
        said.seldom.warning("a", "refused: number=%d", number)
    assert said.lines() == ["refused: number=0"]


def test_the_next_line_after_a_minute_says_how_many_were_left_out(said: Said) -> None:
    for number in range(5):
        said.seldom.warning("a", "refused: %d %%", number)
    said.now += 60
    said.seldom.warning("a", "refused: %d %%", 5)
    said.now += 60
    said.seldom.warning("a", "refused: %d %%", 6)
    assert said.lines() == [
        "refused: 0 %",
        "refused: 5 % (and 4 more since the last such line)",
        "refused: 6 %",
    ]


def test_kinds_do_not_hide_each_other(said: Said) -> None:
    said.seldom.warning("a", "one")
    said.seldom.warning("b", "other")
    assert said.lines() == ["one", "other"]


def test_only_so_many_kinds_are_remembered(said: Said) -> None:
    for number in range(10_000):
        said.seldom.warning(f"made up {number}", "x")
    assert len(said.seldom._kinds) <= 256
