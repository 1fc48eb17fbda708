"""Values that programs put into prompts and that are another one each time. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_MONTHS: Final = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS: Final = "mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun"
# The first that fits counts, so the more particular ones come first.
_KINDS: Final[Sequence[tuple[str, re.Pattern[str]]]] = [
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("a uuid", r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        (
            "a date and a time",
            r"\d{4}-\d\d-\d\d[T ]\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
            rf"|(?:{_MONTHS})[a-z]* \d+,? (?:\d{{4}},? )?(?:at )?\d+:\d\d(?::\d\d)?"
            rf"|\d+ (?:{_MONTHS})[a-z]* \d{{4}},? \d+:\d\d(?::\d\d)?",
        ),
        (
            "a date",
            r"\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[/.]\d\d?[/.]\d{2,4}"
            rf"|(?:{_MONTHS})[a-z]*\.? \d+(?:st|nd|rd|th)?(?:,? \d{{4}})?"
            rf"|\d+\.? (?:{_MONTHS})[a-z]*\.?(?: \d{{4}})?|\b(?:{_DAYS})(?:day)?\b",
        ),
        ("a time", r"\b\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?(?: ?[ap]m\b)?"),
        ("a path", r"(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+ -]*\w){2,}|~[/\\][\w.@+-]+"),
        ("an id", r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{4,}\b"),
        ("an id", r"\b(?=\w*\d)(?=\w*[A-Za-z])[\w-]{12,}\b"),
        ("a counter", r"[+-]?\d[\d.,]*"),
    )
]


def changed_value(asked: str, stored: str, asked_at: range, stored_at: range) -> str:
    """What kind of value it is that differs: one that covers all that differs on both sides, or
    several in a row. Empty if it is no such value. The ranges are where the two texts differ.
    """
    for kind, pattern in _KINDS:
        if _within(pattern, asked, asked_at) and _within(pattern, stored, stored_at):
            return kind
    mine, other = _several(asked, asked_at), _several(stored, stored_at)
    if not (mine and other):
        return ""
    return mine if mine == other else "a value"


def _within(pattern: re.Pattern[str], text: str, at: range) -> bool:
    """Whether all of the range is within one value."""
    return any(
        found.start() <= at.start and at.stop <= found.end() for found in pattern.finditer(text)
    )


def _several(text: str, at: range) -> str:
    """The kinds of values that the range ends in and begins with, if little but these is in it."""
    left = list(text)
    kinds = []
    for kind, pattern in _KINDS:
        for found in pattern.finditer("".join(left)):
            if found.start() < max(at.stop, at.start + 1) and found.end() > at.start:
                kinds.append((found.start(), kind))
                left[found.start() : found.end()] = "\0" * (found.end() - found.start())
    rest = "".join(left[at.start : at.stop]).replace("\0", "")
    words = re.findall(r"[^\W\d_]+", rest)
    if not kinds or len(words) > 2 * len(kinds):
        return ""
    return " and ".join(dict.fromkeys(kind for _, kind in sorted(kinds)))
