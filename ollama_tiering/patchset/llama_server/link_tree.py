"""A tree of links and its record: what it was made from, and whether that is still installed.

The record is `tree.json` beside `bin` and `lib`. A tree in the cache has one, and so has a copy of
it in a service's prefix.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from ollama_tiering.patchset.llama_server import exact_processor, guard, links, parts
from ollama_tiering.patchset.llama_server.installation import FileState, InstalledOllama
from ollama_tiering.patchset.llama_server.outcome import SelfTestOutcome
from ollama_tiering.patchset.llama_server.parts import Parts
from ollama_tiering.system.durable_file import bounded_content
from ollama_tiering.system.files import without_links

FORMAT: Final = 4
# Trees of older formats serve on where none can be made. They lack what the self-test found, or
# what is known of exact attention.
_UNTOLD: Final[dict[int, dict[str, Any]]] = {
    2: {
        "is_tested": True,
        "checks": 1,
        "refused": {},
        "exact": "",
        "not_exact": "",
        "processor": "",
    },
    3: {"exact": "", "not_exact": "", "processor": ""},
}
RECORD: Final = "tree.json"
CACHED: Final = "llama-server"  # the folder of trees in a cache
_MOST_BYTES: Final = 16 << 20
_PLAIN: Final = re.compile(r"[\w.+-]+", re.ASCII)  # they come into a script


@dataclass(frozen=True, slots=True)
class LinkTree:
    """What is known of a tree. `program` is the installed `ollama`, by a name that stays right
    where an update changes what a link leads to; `state` that of all its files when the tree was
    made, `ours` a digest of our part, `parts` what lies in the tree (a service has a manifest
    instead). `is_tested`: this llama.cpp is on the list (pins.toml). `checks` of the self-test
    passed, `refused` says which kinds did not, and why. `exact`: the kernels of its exact
    attention; empty where it has none, and `not_exact` says why; `processor`: the flags of the one
    on which the tree was made.
    """

    folder: Path
    program: str
    version: str
    pin: str
    state: FileState
    ours: str
    is_tested: bool = True
    checks: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    exact: str = ""
    not_exact: str = ""
    processor: str = ""
    parts: Parts = field(default_factory=list)

    @property
    def binary(self) -> Path:
        return self.folder / links.PROGRAM

    @property
    def lib(self) -> Path:
        return self.folder / links.LIB

    @property
    def engine(self) -> str:
        """What it runs, and how far that is tested, in words."""
        what = f"llama-server of llama.cpp {self.pin}"
        if self.is_tested and not self.refused:
            return what
        listed = "" if self.is_tested else ", not on the list of tested ones"
        return f"{what}{listed}: {SelfTestOutcome(self.checks, self.refused)}"

    @property
    def runs_exact(self) -> bool:
        """Whether its exact attention is for this processor."""
        return bool(self.exact) and exact_processor.has_all(self.processor)

    @property
    def attention_here(self) -> str:
        """How it computes attention on this machine's CPU, in words."""
        if not self.exact:
            return f"stock ({self.not_exact})" if self.not_exact else "stock"
        if self.runs_exact:
            return f"exact ({self.exact})"
        return "stock (the exact one is for another processor: tiering patch)"

    def is_of(self, installation: InstalledOllama) -> bool:
        """Whether its program is that one now."""
        return os.path.realpath(self.program) == str(installation.program)

    def fits(self, installation: InstalledOllama) -> bool:
        """Whether every installed file is the one that the tree was made for."""
        return self.state == installation.state()

    def why_stock(self, installation: InstalledOllama | None) -> str:
        """Why this must not be started, now that `installation` is what `program` is; empty where
        it may be. Our library was compiled for the files that were there.
        """
        if installation is None:
            return f"{self.program}, for which the tree was made, is not there any more"
        if not self.fits(installation):
            return f"{self.program} was updated or changed since it was patched as {self.version}"
        return ""


def read(folder: Path) -> LinkTree | None:
    """None where the record is of another format, damaged or not there, or something of the tree is
    not as it was.
    """
    try:
        values: dict[str, Any] = json.loads(bounded_content(folder / RECORD, _MOST_BYTES))
        names = {field.name for field in fields(LinkTree)} - {"folder"}
        found = values.pop("format")
        values = {**_UNTOLD.get(found, {}), **values}
        if found not in (FORMAT, *_UNTOLD) or set(values) != names:
            return None
        plain = (values["version"], values["pin"], *values["refused"])
        if not all(_PLAIN.fullmatch(word) for word in plain):
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    tree = LinkTree(folder=folder, **values)
    return tree if tree.binary.is_file() and parts.are_there(folder, tree.parts) else None


def records(folder: Path) -> list[Path]:
    """Those in a folder of trees; not of a tree that is unfinished, or being removed."""
    every = folder.glob(f"*/{RECORD}")
    return sorted(path for path in every if not path.parent.name.startswith("."))


def below(folder: Path) -> list[LinkTree]:
    """All trees in it, the latest first."""
    found: list[tuple[int, LinkTree]] = []
    for path in records(folder):
        with contextlib.suppress(OSError):  # it was just removed
            if tree := read(path.parent):
                found.append((path.stat().st_mtime_ns, tree))
    return [tree for _, tree in sorted(found, key=lambda one: -one[0])]


def text_of(tree: LinkTree) -> str:
    """The content of its record."""
    values = {name: value for name, value in asdict(tree).items() if name != "folder"}
    return json.dumps({"format": FORMAT, **values}) + "\n"


def of_server(program: Path) -> LinkTree | None:
    """The tree whose copy of llama-server this is."""
    if program.name != guard.COPY:
        return None
    tree = read(program.parent.parent.parent)
    return tree if tree and tree.lib == program.parent else None


def of_binary(binary: Path) -> LinkTree | None:
    """The tree whose `ollama` this is."""
    program = without_links(binary)
    tree = read(program.parent.parent)
    return tree if tree and tree.binary == program else None
