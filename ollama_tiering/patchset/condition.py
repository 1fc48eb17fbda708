"""Conditions: for an overlay file that fits only some of the accepted versions.

Its first line says where it is copied, and a blank line comes after it:

    // Only where upstream has kvcache/recurrent.go.
    // Only where upstream lacks kvcache/recurrent.go.

Nothing else is a condition, and what looks like one is refused: a file without its condition would
be copied everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from ollama_tiering.errors import PatchConflict

_FORM = re.compile(r"// Only where upstream (has|lacks) (\S+)\.")
_WORDS = {"only", "where", "upstream"}
_COMMENT = ("//", "/*", "*", "# ")
_HINT = (
    "the first line is exactly `// Only where upstream has PATH.` or `// Only where upstream "
    "lacks PATH.`, the second is blank"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """`path`: a file of upstream's, from its root. `present`: whether it must exist."""

    path: str
    present: bool


def parse(name: str, content: bytes) -> Condition | None:
    """The condition of the overlay file `name`; None if it has none. PatchConflict names file and
    line of a condition that is misspelt, is not in the first line, has no blank line after it, or
    does not name a plain path.
    """
    lines = content.decode(errors="replace").split("\n")
    found = _FORM.fullmatch(lines[0])
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith(_COMMENT):
            break
        if not (found and number == 1) and _looks_like_one(text):
            raise PatchConflict(
                f"overlay/{name}:{number}: {text!r} is not a condition as it stands", hint=_HINT
            )
    if found is None:
        return None
    path = found[2]
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or str(plain) != path:
        raise PatchConflict(
            f"overlay/{name}:1: {path!r} is not the plain path of a file",
            hint="write it from upstream's root, as in kvcache/causal.go",
        )
    if lines[1:2] != [""]:
        raise PatchConflict(f"overlay/{name}:2: no blank line after the condition", hint=_HINT)
    return Condition(path, found[1] == "has")


def body(content: bytes) -> bytes:
    """What follows the condition and its blank line; the whole text if there is no condition."""
    first, _, rest = content.partition(b"\n")
    return rest.lstrip(b"\n") if _FORM.fullmatch(first.decode(errors="replace")) else content


def _looks_like_one(text: str) -> bool:
    return len(_WORDS & set(re.findall(r"[a-z]+", text.lower()))) >= 2
