"""A strict reader of one hook file: header, trailers, and a unified diff whose line counts add up.
Pure.

A hook only adds call sites to files that upstream has: no new, deleted, renamed or binary files,
and no mode changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ollama_tiering.errors import PatchConflict

TRAILERS = ("Reason", "Upstream", "Removes-When")
REASONS = ("temporary", "build", "incompatible")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_FORBIDDEN = (
    "new file",
    "deleted file",
    "rename ",
    "copy ",
    "old mode",
    "new mode",
    "GIT binary",
    "Binary files",
)


@dataclass(frozen=True, slots=True)
class Diff:
    subject: str
    body: str
    trailers: dict[str, str]
    touched: tuple[str, ...]
    added_lines: int


def parse(name: str, text: str) -> Diff:
    """The hook called `name` (for messages). PatchConflict says which line is wrong."""
    lines = text.splitlines()
    start = next(
        (i for i, line in enumerate(lines) if line.startswith(("diff --git ", "--- "))), len(lines)
    )
    subject, body, trailers = _header(lines[:start])
    touched: list[str] = []
    added = 0
    i = start
    while i < len(lines):
        line = lines[i]
        if line.startswith(_FORBIDDEN):
            raise _wrong(name, i, f"a hook only changes text of existing files, not `{line}`")
        if line.startswith("--- "):
            old, new = line[4:], lines[i + 1][4:] if i + 1 < len(lines) else ""
            if not old.startswith("a/") or not new.startswith("b/") or old[2:] != new[2:]:
                raise _wrong(
                    name, i, f"expected `--- a/PATH` and `+++ b/PATH`, found `{old}` and `{new}`"
                )
            touched.append(new[2:])
            i += 2
            if i >= len(lines) or not _HUNK.match(lines[i]):
                raise _wrong(name, i, "no hunk after the file names")
            while i < len(lines) and (hunk := _HUNK.match(lines[i])):
                plus, i = _hunk(name, lines, i, int(hunk[2] or 1), int(hunk[4] or 1))
                added += plus
        elif (
            line.startswith(("diff --git ", "index "))
            or line in ("", "-- ")
            or _is_signature(lines, i)
        ):
            i += 1
        else:
            raise _wrong(name, i, f"neither a file nor a hunk: `{line}`")
    if not touched:
        raise _wrong(name, max(0, len(lines) - 1), "no diff in it")
    return Diff(subject, body, trailers, tuple(dict.fromkeys(touched)), added)


def _header(lines: list[str]) -> tuple[str, str, dict[str, str]]:
    subject = next((line for line in lines if line.strip()), "")
    subject = re.sub(r"^Subject:\s*(\[PATCH[^\]]*\]\s*)?", "", subject)
    trailers: dict[str, str] = {}
    body: list[str] = []
    for line in (
        lines[lines.index(next(iter(x for x in lines if x.strip()))) + 1 :] if subject else []
    ):
        match = re.match(r"([A-Z][A-Za-z-]+):\s*(.*)", line)
        if match and match[1] in TRAILERS:
            trailers[match[1]] = match[2].strip()
        else:
            body.append(line)
    return subject.strip(), "\n".join(body).strip(), trailers


def _hunk(name: str, lines: list[str], at: int, old: int, new: int) -> tuple[int, int]:
    """Added lines of the hunk whose header is at `at`, and the index after it."""
    i, plus = at + 1, 0
    while old > 0 or new > 0:
        mark = lines[i][:1] if i < len(lines) else None
        if mark == "+":
            new, plus = new - 1, plus + 1
        elif mark == "-":
            old -= 1
        elif mark in (" ", ""):
            old, new = old - 1, new - 1
        elif mark != "\\":
            raise _wrong(name, i, f"the hunk of line {at + 1} ends early")
        i += 1
    if old or new:
        raise _wrong(name, at, "the counts of the hunk do not fit its lines")
    while i < len(lines) and lines[i].startswith("\\"):
        i += 1
    return plus, i


def _is_signature(lines: list[str], i: int) -> bool:
    return i > 0 and lines[i - 1] == "-- " and i >= len(lines) - 2


def _wrong(name: str, index: int, what: str) -> PatchConflict:
    return PatchConflict(
        f"{name}:{index + 1}: {what}", hint="make the diff again, see patches/README.md"
    )
