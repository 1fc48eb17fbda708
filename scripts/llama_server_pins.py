"""Maintainer: on which sources of llama.cpp the lines of llama-server's tiering can be placed.

    .venv/bin/python -m scripts.llama_server_pins [ARCHIVE ...] [--cache DIR] [--page]
    .venv/bin/python -m scripts.llama_server_pins --newest [--cache DIR]

For each source: are the lines placed, and in the right functions, or what is missing; those of
exact attention, too; and do our files and the server they are placed in pass a compiler's check of
syntax and types. ARCHIVE is an
sdist of llama-cpp-python, or a folder with llama.cpp. Without any, the versions of PINS are taken:
from DIR, where pip puts those that are missing (75 MB each). --only-place does without a compiler.
--page writes the table into docs/llama-server.md.

--newest is for CI: the versions of PINS that are in DIR, and the newest one, for which it looks at
most once a week. The compiler sees only what it has not seen before: what passed is noted in DIR.

Ends with 1 if a source of PINS does not do what PINS says of it or has a model about which
docs/models.md says nothing, or if any other one takes the lines and is wrong then. A source that
is refused by name is not: nobody gets it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ollama_tiering.errors import FetchError, TieringError, UnsupportedUpstream
from ollama_tiering.patchset.llama_server import exact_hooks, exact_library, no_page
from ollama_tiering.patchset.llama_server.compile import EMBED
from ollama_tiering.patchset.llama_server.hooks import SERVER
from ollama_tiering.patchset.llama_server.tree import patch_tree
from scripts import models_page
from scripts.llama_server_sdists import CACHE, newest, noted_newest, sdist, sdist_path
from scripts.llama_server_syntax import COMPILER, digest_of, misplaced, syntax_errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/llama-server.md"
BEGIN, END = "<!-- begin: made by scripts/llama_server_pins.py -->\n", "<!-- end -->\n"
INSIDE = "/vendor/llama.cpp/"
CHANGES = "/CHANGELOG.md"
ARCHITECTURES = "src/llama-arch.cpp"
PARTS = (
    "src/",
    "common/",
    "include/",
    "ggml/include/",
    f"{exact_hooks.BACKEND}/",
    "vendor/",
    f"{SERVER}/",
    "tools/mtmd/",
    "tools/ui/",
)
SUFFIXES = (".h", ".hpp", ".c", ".cpp", ".txt", ".inc", ".def", ".in")


@dataclass(frozen=True, slots=True)
class Pin:
    """An sdist of llama-cpp-python, by its version."""

    version: str
    month: str  # of its commit of llama.cpp
    fits: bool = True


PINS = (
    Pin("0.3.32", "an earlier day", fits=False),
    Pin("0.3.33", "July 2026"),
    Pin("0.3.34", "July 2026"),
    Pin("0.3.35", "August 2026"),
    Pin("0.3.36", "October 2026"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """`refused` and `errors` are empty where all went well."""

    source: str
    commit: str
    refused: str
    errors: str
    undecided: tuple[str, ...] = ()  # architectures about which docs/models.md says nothing

    def row(self) -> str:
        placed = "no" if self.refused else "yes"
        checked = "" if self.refused else ("no" if self.errors else "yes")
        why = (self.refused or self.errors).replace("|", "\\|")
        return f"| {self.source} | {self.commit} | {placed} | {checked} | {why} |"


def take(archive: Path, to: Path) -> str:
    """What the check needs of a source, and the commit as its list of changes names it."""
    if archive.is_dir():
        for part in PARTS:
            shutil.copytree(archive / part, to / part, dirs_exist_ok=True)
        return ""
    commit = ""
    with tarfile.open(archive) as opened:
        for member in opened:
            name = member.name.partition(INSIDE)[2]
            if name.startswith(PARTS) and name.endswith(SUFFIXES):
                member.name = name
                opened.extract(member, to, filter="data")
            elif member.name.endswith(CHANGES) and member.name.count("/") == 1:
                text = opened.extractfile(member)
                assert text is not None
                named = re.search(rb"ggml-org/llama\.cpp@([0-9a-f]+)", text.read())
                commit = named[1].decode() if named else ""
    return commit


def check(archive: Path, label: str, *, only_place: bool, noted: Path | None = None) -> Found:
    """Without the compiler if `noted` names what it passed, the same source with the same lines."""
    with tempfile.TemporaryDirectory() as made:
        tree = Path(made)
        commit = take(archive, tree)
        undecided = _undecided(tree / ARCHITECTURES)
        try:
            patch_tree(tree, ROOT / "llama_server" / "src")
            _require_page(tree)
        except TieringError as error:
            return Found(label, commit, error.message, "", undecided)
        wrong = misplaced(tree) or _without_exact(tree)
        if not wrong and not only_place:
            digest = digest_of(tree) if noted else ""
            if not noted or not noted.exists() or noted.read_text(encoding="utf-8") != digest:
                wrong = syntax_errors(tree)
                if noted and not wrong:
                    noted.write_text(digest, encoding="utf-8")
        return Found(label, commit, "", wrong, undecided)


def _without_exact(tree: Path) -> str:
    """Why exact attention does not fit; a source that is made up for a test has no backend."""
    if (tree / exact_hooks.GRAPH).is_file():
        try:
            exact_library.place_lines(tree)
        except (TieringError, exact_library.NotPossible) as error:
            return f"exact attention: {error}"
    return ""


def _undecided(source: Path) -> tuple[str, ...]:
    """None of a source without the file: what of it is missing is said elsewhere."""
    return models_page.undecided(source.read_text(encoding="utf-8")) if source.is_file() else ()


def _require_page(tree: Path) -> None:
    """UnsupportedUpstream if a user interface without a page cannot be made of the source."""
    if no_page.has_templates(tree):
        with tempfile.TemporaryDirectory() as folder:
            no_page.write(tree, Path(folder))
    elif not (tree / EMBED).is_file():
        raise UnsupportedUpstream(f"neither {EMBED} nor {' and '.join(no_page.TEMPLATES)}")


def page(text: str, rows: list[Found]) -> str:
    """The page with the table between its marks."""
    day = datetime.now(UTC).date().isoformat()
    table = "\n".join(
        [
            f"Checked on {day} with `scripts/llama_server_pins.py` (syntax and types only):",
            "",
            "| llama-cpp-python, with llama.cpp of | commit | placed | compiles | why not |",
            "|---|---|---|---|---|",
            *(row.row() for row in rows),
            "",
        ]
    )
    before, mark, rest = text.partition(BEGIN)
    if not mark or END not in rest:
        raise SystemExit(f"error: {PAGE} has no place for the table")
    return before + BEGIN + table + END + rest.partition(END)[2]


def for_ci(cache: Path) -> Iterator[tuple[Path, str]]:
    """Archive and version: the pins that are there, and the newest. Says what is left out."""
    former = latest = noted_newest(cache)
    try:
        latest = newest(cache)
        sdist(latest, cache)
    except FetchError as error:
        print(f"SKIPPED: the newest llama-cpp-python: {error.message}")
    pinned = [pin.version for pin in PINS]
    if former and former not in [*pinned, latest]:
        for path in (sdist_path(former, cache), note_path(former, cache)):
            path.unlink(missing_ok=True)
    absent = [version for version in pinned if not sdist_path(version, cache).exists()]
    if absent:
        print(f"SKIPPED: {', '.join(absent)}: not in {cache}, where `make pins` puts them")
    for version in dict.fromkeys([*pinned, *filter(None, [latest])]):
        if sdist_path(version, cache).exists():
            yield sdist_path(version, cache), version


def note_path(version: str, cache: Path) -> Path:
    return cache / f"{version}.checked"


def as_it_should(found: Found, pin: Pin | None) -> bool:
    if pin is None:
        return not found.errors
    return not found.undecided and pin.fits == (not found.refused and not found.errors)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archives", type=Path, nargs="*", metavar="ARCHIVE")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR")
    parser.add_argument("--newest", action="store_true", help="as CI does it")
    parser.add_argument("--only-place", action="store_true", help="no compiler")
    parser.add_argument("--page", action="store_true", help="write docs/llama-server.md")
    given = parser.parse_args()
    only_place, cache = given.only_place, given.cache
    if not only_place and shutil.which(COMPILER) is None:
        print(f"SKIPPED: no {COMPILER}: our files and llama-server's were not compiled")
        only_place = True
    sources: Iterator[tuple[Path, str]]
    if given.newest:
        sources = for_ci(cache)
    elif given.archives:
        sources = ((path, path.name) for path in given.archives)
    else:
        sources = ((sdist(pin.version, cache), pin.version) for pin in PINS)
    pins = {pin.version: pin for pin in PINS}
    rows: list[Found] = []
    wrong = []
    for archive, name in sources:
        pin = pins.get(name)
        label = f"{name}, {pin.month}" if pin else name
        noted = note_path(name, cache) if given.newest else None
        rows.append(check(archive, label, only_place=only_place, noted=noted))
        print(rows[-1].row(), flush=True)
        if rows[-1].undecided:
            print(f"{name}: patches/architectures.toml lacks {', '.join(rows[-1].undecided)}")
        if not as_it_should(rows[-1], pin):
            wrong.append(name)
    if given.page:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if wrong:
        print(f"not as it should be: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
