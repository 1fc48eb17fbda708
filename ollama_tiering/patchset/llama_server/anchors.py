"""Lines placed beside a line that is there exactly once. Pure.

llama.cpp changes every day, and Ollama pins another of its commits every other week. A diff fails
with each change around it. An anchor fails only if its own line changed: then it is missing, or
there more than once, and nothing is placed at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ollama_tiering.config import count
from ollama_tiering.errors import PatchConflict


class Spot(Enum):
    """Where lines go, seen from their anchor."""

    BEFORE = "before"
    AFTER = "after"
    END = "at the end"  # of the file; the anchor must be there all the same


@dataclass(frozen=True, slots=True)
class Anchored:
    """`pattern` is that of a whole line; `lines` may name its groups, as in `\\g<indent>`."""

    path: str
    name: str  # of what the lines do, for messages
    pattern: str
    spot: Spot
    lines: str


@dataclass(frozen=True, slots=True)
class NeededText:
    """What the placed code uses: `pattern` must be found in the file."""

    path: str
    name: str
    pattern: str


def missing_texts(files: Mapping[str, str | None], needed: Sequence[NeededText]) -> list[str]:
    """Why the code would not work here; empty if it would."""
    return [
        f"{one.path}: no {one.name}"
        for one in needed
        if (text := files.get(one.path)) is None or not re.search(one.pattern, text, re.MULTILINE)
    ]


def place(files: Mapping[str, str | None], anchored: Sequence[Anchored]) -> dict[str, str]:
    """The new text of each file; empty if everything is in place already. PatchConflict lists every
    anchor that does not fit, or says that some of the lines are there and some are not.
    """
    reasons: list[str] = []
    texts: dict[str, str] = {}
    there: list[str] = []
    for one in anchored:
        text = texts.get(one.path, files.get(one.path))
        if text is None:
            reasons.append(f"{one.path}: no such file")
            continue
        found = list(re.finditer(f"^{one.pattern}$", text, re.MULTILINE))
        if len(found) != 1:
            times = count(len(found), "time") if found else "not there"
            reasons.append(f"{one.path}: the anchor of {one.name} is {times}")
            continue
        lines = found[0].expand(one.lines) + "\n"
        if f"\n{lines}" in text:
            there.append(one.name)
            continue
        at = {
            Spot.BEFORE: found[0].start(),
            Spot.AFTER: found[0].end() + 1,
            Spot.END: len(text),
        }[one.spot]
        before = text[:at] if text[:at].endswith("\n") or not at else text[:at] + "\n"
        texts[one.path] = before + lines + text[at:]
    if reasons:
        raise PatchConflict("; ".join(reasons), hint="this source is not one that can be patched")
    if there and len(there) < len(anchored):
        raise PatchConflict(
            f"some lines are placed already ({', '.join(there)}), and others are not",
            hint="begin with a fresh copy of the source",
        )
    return texts
