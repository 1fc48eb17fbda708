"""docs/models.md, from patches/architectures.toml. Imported by gen_docs.py."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "patches/architectures.toml"
ENGINES = {"go": "Ollama's Go engine", "llama.cpp": "The llama.cpp engine"}
TIERED = ("yes", "part", "no")
FIRST = "v0.16.0"

_INTRODUCTION = """\
# Which models are tiered

Made by `make docs` from `patches/architectures.toml`: every architecture that an accepted version
of Ollama registers. A model's is in `ollama show`, as "architecture". Stock chooses the engine: the
Go engine for what it must run there, the llama.cpp engine for the rest and for models with a
separate projector file.

**yes**: every text conversation, in f16, q8_0 and q4_0 where stock allows it. In the Go engine what
follows an image comes back for the same image, and its encoder does not run; where "text before an
image" is said, and in the llama.cpp engine, only what comes before the first of a prompt.
**part**: as said. **no**: runs as in stock; `tiering status` and the log give the reason. "Shown
by" is a test on the real engine, which compares tokens, log probabilities and top-5 with stock's
own in-memory hit; "as NAME" means that the same code serves it and no model of its own was made for
a test.
"""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Architectures of one engine that are treated alike."""

    engine: str
    names: tuple[str, ...]
    caches: str
    tiered: str
    why: str
    test: str  # file::name, of those that have one
    same_as: str
    since: str

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Architecture:
        known = {"engine", "names", "caches", "tiered", "why", "test", "as", "since"}
        if unknown := entry.keys() - known:
            raise ValueError(f"{SOURCE.name}: {entry.get('names')}: unknown {sorted(unknown)}")
        return cls(
            entry["engine"],
            tuple(entry["names"]),
            entry["caches"],
            entry["tiered"],
            entry.get("why", ""),
            entry.get("test", ""),
            entry.get("as", ""),
            entry.get("since", FIRST),
        )


def load() -> list[Architecture]:
    entries = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["architecture"]
    return [Architecture.of(entry) for entry in entries]


def page() -> str:
    found = load()
    parts = [_INTRODUCTION]
    for engine, title in ENGINES.items():
        parts.append(
            f"## {title}\n\n| architecture | caches | tiered | | shown by |\n" + "|---" * 5
        )
        parts[-1] += "|\n" + "".join(_row(one) for one in found if one.engine == engine)
    return "\n".join(parts)


def _row(one: Architecture) -> str:
    names = ", ".join(f"`{name}`" for name in one.names)
    if one.since != FIRST:
        names += f" (from {one.since})"
    shown = f"as `{one.same_as}`" if one.same_as else ""
    if one.test:
        shown = f"`{one.test.partition('::')[0].rpartition('/')[2]}`"
    return f"| {names} | {one.caches} | {one.tiered} | {one.why} | {shown} |\n"
