"""The pages for users: their fenced blocks, their inline code, their links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
# What was measured once is not rewritten: a record keeps the command of its day.
PAGES = sorted(
    [
        *(
            ROOT / name
            for name in (
                "README.md",
                "measure/README.md",
                "patches/README.md",
                "docs/measurements/README.md",
            )
        ),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/attention").glob("*.md"),
    ]
)
_FENCE = re.compile(r"^ *```(\S*)\s*$")
_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Line:
    """Some text of a page. `str()` says where."""

    page: Path
    number: int  # from 1
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def fenced(page: Path, languages: tuple[str, ...] = ("", "sh", "bash", "console")) -> list[Line]:
    """Lines of the fenced blocks that may hold shell commands. What a `\\` or `&&` at its end goes
    on with is one line.
    """
    found: list[Line] = []
    goes_on = False
    for line, language in _with_language(page):
        if language not in languages or language is None:
            continue
        text = line.text.strip()
        if language == "console":  # commands behind a prompt, and what they print
            if not text.startswith("$ "):
                continue
            text = text.removeprefix("$ ")
            line = Line(page, line.number, text)
        if goes_on:
            last = found.pop()
            line = Line(page, last.number, f"{last.text.removesuffix(chr(92))} {text}")
        found.append(line)
        goes_on = text.endswith(("\\", "&&", "||", "|"))
    return found


def prose(page: Path) -> list[Line]:
    """Lines outside of fenced blocks."""
    return [line for line, language in _with_language(page) if language is None]


def spans(page: Path) -> list[Line]:
    """Inline code. `\\|`, as a table needs it, is a bar."""
    return [
        Line(page, line.number, match[2].strip().replace("\\|", "|"))
        for line in prose(page)
        for match in _SPAN.finditer(line.text)
    ]


def links(page: Path) -> list[Line]:
    """Targets of links."""
    return [
        Line(page, line.number, match[1])
        for line in prose(page)
        for match in _LINK.finditer(_SPAN.sub("", line.text))
    ]


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them of headings."""
    found = set()
    for line in prose(page):
        if heading := re.match(r"#+ +(.*)", line.text):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower().replace("`", "")
            found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def _with_language(page: Path) -> Iterator[tuple[Line, str | None]]:
    """Each line with the language of the block it is in; None outside, fences left out."""
    language: str | None = None
    for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if fence := _FENCE.match(text):
            language = fence[1] if language is None else None
        else:
            yield Line(page, number, text), language
    assert language is None, f"{page}: a fenced block without an end"
