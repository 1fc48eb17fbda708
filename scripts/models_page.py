"""docs/models.md, from patches/architectures.toml. Imported by gen_docs.py."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "patches/architectures.toml"
ENGINES = {
    "go": "Ollama's Go engine",
    "llama.cpp": "The llama.cpp engine",
    "llama-server": "llama-server: Ollama from v0.30 on",
}
TIERED = ("yes", "part", "no")
FIRST = "v0.16.0"
_NAMES = re.compile(r"LLM_ARCH_NAMES = \{(.*?)\n\};", re.S)
_NAME = re.compile(r'\{\s*LLM_ARCH_(\w+),\s*"([^"]+)"')
_LEAST_NAMES = 100

_INTRODUCTION = """\
# Which models are tiered

Made by `make docs` from `patches/architectures.toml`. The tables list every architecture that an
accepted version of Ollama registers; `ollama show` names the architecture of a model. Up to v0.24
Ollama has two engines and chooses one by itself: the Go engine for the models that only that one
can run, the llama.cpp engine for all others and for models with a separate projector file. From
v0.30 on it runs llama-server for all of them: the third table, which names every architecture of
the newest llama.cpp that was tried.

A model is *tiered* if what it computes of a prompt is stored and restored. A *row* is the K or the
V of one token in one layer. The column "caches" says what a model keeps of its prompt. Most models
have one cache of rows. Some have a second one, whose layers see only a *window* of the last tokens.
Some have *states* in place of rows; such a model can resume only at a *checkpoint*, a position at
which Ollama copied its states aside.

The column "tiered" has one of three values:

- **yes**: every text conversation is stored and restored, on the CPU or a GPU, with flash attention
  or without, as Ollama chooses; with K/V in f16, and in q8_0 and q4_0 where stock allows it. With
  the Go engine and with llama-server this includes the text after an image, if the same image is
  sent again; its encoder then does not run. In the llama.cpp engine, and where the table says
  "only the text before an image", what follows the first image of a prompt is not stored.
- **part**: some conversations are, as the table says.
- **no**: the model runs as in stock; `tiering status` and the log give the reason.

"Shown by" names a test on the real engine. It compares tokens, log probabilities and the five most
likely tokens with those that stock gives when it finds the prompt in memory. "As NAME" means that
the same code serves this architecture as NAME, and that no test has a model of its own for it.
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


def undecided(source: str) -> tuple[str, ...]:
    """Architectures of llama.cpp's src/llama-arch.cpp about which the page says nothing."""
    table = _NAMES.search(source)
    known = {name for what, name in _NAME.findall(table[1] if table else "") if what != "UNKNOWN"}
    if len(known) < _LEAST_NAMES:
        raise ValueError("the list of architectures was not found in llama-arch.cpp")
    decided = {name for one in load() if one.engine == "llama-server" for name in one.names}
    return tuple(sorted(known - decided))


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
