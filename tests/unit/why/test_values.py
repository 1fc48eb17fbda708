"""Which kind of value changed, out of the two texts around it."""

from __future__ import annotations

import pytest

from ollama_tiering.why.values import changed_value


@pytest.mark.parametrize(
    ("stored", "asked", "kind"),
    [
        ("at 20:37:19.", "at 20:37:20.", "a time"),
        ("at 9:05 pm.", "at 11:05 am.", "a time"),
        ("on 2026-11-26.", "on 2026-12-01.", "a date"),
        ("on 26.11.2026.", "on 27.11.2026.", "a date"),
        ("on Friday.", "on Saturday.", "a date"),
        ("on Nov 26, 2026.", "on Dec 1, 2026.", "a date"),
        ("on 3 March 2026.", "on 14 May 2026.", "a date"),
        ("at 2026-11-26T20:37:19Z.", "at 2026-11-27T21:00:01Z.", "a date and a time"),
        ("it is Thursday, 2026-11-26.", "it is Friday, 2026-11-27.", "a date"),
        (
            "session 1b4e28ba-2fa1-11d2-883f-0016d3cca427;",
            "session 6fa459ea-ee8a-3ca4-894e-db77e160355e;",
            "a uuid",
        ),
        ("cch=36ee5;", "cch=0aaa9;", "an id"),
        ("id req_01HZXK5T9Q8;", "id req_01HZXK7M2B4;", "an id"),
        ("turn 9 of many", "turn 10 of many", "a counter"),
        ("used 1,085 of", "used 1,102 of", "a counter"),
        ("in /home/me/shop now", "in /home/you/garden now", "a path"),
        ("in ~/shop now", "in ~/garden now", "a path"),
        (r"in C:\work\shop now", r"in C:\work\site now", "a path"),
        ("at 20:37 on 2026-11-26.", "at 08:12 on 2026-12-01.", "a time and a date"),
        ("room blue, at 7", "room green, at 7", ""),
        ("the moon is red.", "dogs can talk.", ""),
        ("has 3 daughters", "has no daughters", ""),
        ("", "", ""),
    ],
)
def test_what_changed_is_named(stored: str, asked: str, kind: str) -> None:
    begin = 0
    while begin < min(len(stored), len(asked)) and stored[begin] == asked[begin]:
        begin += 1
    end = 0
    most = min(len(stored), len(asked)) - begin
    while end < most and stored[-1 - end] == asked[-1 - end]:
        end += 1
    sides = range(begin, len(asked) - end), range(begin, len(stored) - end)
    assert changed_value(f"So {asked} It is.", f"So {stored} It is.", *map(_moved, sides)) == kind


def _moved(at: range) -> range:
    return range(at.start + 3, at.stop + 3)
