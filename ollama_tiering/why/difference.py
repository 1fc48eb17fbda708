"""The text around the place where a prompt parts from what is stored, on both sides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ollama_tiering.models.gguf_words import Vocabulary
from ollama_tiering.why.turns import text

AROUND: Final = 40  # characters that are shown on either side of what differs
OPEN, CLOSE = "⟪", "⟫"
_CONTEXT_TOKENS: Final = 400  # before the place; a value may have begun there
_DIFFERS_TOKENS: Final = 2000  # read of what differs
_ELLIPSIS: Final = "…"


@dataclass(frozen=True, slots=True)
class Side:
    """`whole` is the text around the place, `differs` where it is not the other's."""

    whole: str
    differs: range

    def marked(self, most: int = AROUND) -> str:
        """`…me is ⟪20:37⟫. You are…`, on one line, nothing in it that a terminal obeys."""
        before = self.whole[: self.differs.start]
        inside = self.whole[self.differs.start : self.differs.stop]
        behind = self.whole[self.differs.stop :]
        if len(inside) > 2 * most:
            inside = inside[: 2 * most - 1] + _ELLIPSIS
            behind = ""
        lead = _ELLIPSIS if len(before) > most else ""
        trail = _ELLIPSIS if len(behind) > most else ""
        parts = lead + before[-most:], inside, behind[:most] + trail
        return f"{_plain(parts[0])}{OPEN}{_plain(parts[1])}{CLOSE}{_plain(parts[2])}"


@dataclass(frozen=True, slots=True)
class Difference:
    """`prompt` and `stored`: both sides. `resumes`: whether they are the same again behind it."""

    prompt: Side
    stored: Side
    resumes: bool


def difference(
    vocabulary: Vocabulary,
    before: Sequence[int],
    asked: Sequence[int],
    stored: Sequence[int],
    skipped: tuple[int, int] | None,
) -> Difference:
    """`skipped`: tokens of either side up to where both are the same again; None: nowhere."""
    lead = text(vocabulary, before[-_CONTEXT_TOKENS:])
    ends = skipped or (len(asked), len(stored))
    texts = [
        (
            text(vocabulary, side[: min(end, _DIFFERS_TOKENS)]),
            text(vocabulary, side[end : end + _CONTEXT_TOKENS]) if skipped else "",
        )
        for side, end in zip((asked, stored), ends, strict=True)
    ]
    (mine, mine_behind), (other, other_behind) = texts
    begin = _common(mine, other)  # tokens may differ and begin with the same characters
    most = min(len(mine), len(other)) - begin
    end = _common(mine[::-1], other[::-1], most) if skipped else 0
    sides = [
        Side(lead + inside + behind, range(len(lead) + begin, len(lead) + len(inside) - end))
        for inside, behind in ((mine, mine_behind), (other, other_behind))
    ]
    return Difference(sides[0], sides[1], skipped is not None)


def _common(a: str, b: str, most: int | None = None) -> int:
    """Leading characters that both have."""
    count = 0
    for one, other in zip(a[:most], b[:most], strict=False):
        if one != other:
            break
        count += 1
    return count


def _plain(words: str) -> str:
    """A line break is shown as one; all else that is not printable is a blank."""
    shown = (c if c.isprintable() else "⏎" if c == "\n" else " " for c in words)
    return "".join(shown)
