"""Which files of tests/turns.py a change touches: `python -m tests.touched` prints them, a line
each, and on stderr what it compared with. Exit code 1, with the reason, if git cannot say it.

The change is what the tree has, committed or not, and the commit did not have in which it left
origin/main. On main itself it is what the last commit or merge brought: `make nightly` runs all.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.turns import ONE_CASE, SCRIPTS, TURNS

ROOT = Path(__file__).resolve().parents[1]
MAINS = ("origin/main", "main")  # a clone has the first, a repository without a remote the second


class Unknown(Exception):
    """What the change is."""


def base(root: Path) -> str:
    """The commit to compare with."""
    head = _git(root, "rev-parse", "HEAD")
    for main in MAINS:
        try:
            fork = _git(root, "merge-base", main, "HEAD")
        except Unknown:
            continue  # no such branch, or a clone of its last commits
        if fork != head:
            return fork
        break
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "HEAD^1")
    except Unknown:
        raise Unknown("the last commit has none before it, or this is a shallow clone") from None


def changed(root: Path, since: str) -> list[str]:
    """The paths that are not as they were, deleted ones too; of a renamed file both."""
    different = _git(root, "diff", "--name-only", "--no-renames", "-z", since)
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    return [path for path in (different + "\0" + new).split("\0") if path]


def touched(root: Path, paths: Iterable[str]) -> list[str]:
    """Those of the files of turns.py that test one of `paths`."""
    paths = list(paths)
    found = []
    for file, covered in {**TURNS, **ONE_CASE}.items():
        exact = support(root, file)
        if any(path in exact or path.startswith(covered) for path in paths):
            found.append(file)
    for script, covered in SCRIPTS.items():
        if any(path == script or path.startswith(covered) for path in paths):
            found.append(script)
    return sorted(found)


def support(root: Path, file: str) -> set[str]:
    """The file, each conftest.py in its folder and above, what these import from `tests`, and so
    on.
    """
    seen: set[str] = set()
    todo = [file, *(str(folder / "conftest.py") for folder in PurePosixPath(file).parents)]
    while todo:
        path = todo.pop()
        if path not in seen and (root / path).is_file():
            seen.add(path)
            todo += _imported((root / path).read_text(encoding="utf-8"))
    return seen | {file}


def _imported(source: str) -> Iterable[str]:
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.startswith("tests.") and not name.startswith("tests.turns"):
                yield name.replace(".", "/") + ".py"


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", root, *words], capture_output=True, encoding="utf-8", check=False
        )
    except OSError as error:
        raise Unknown(f"git: {error.strerror}") from None
    if done.returncode:
        raise Unknown((done.stderr.strip() or f"git {words[0]} failed").splitlines()[0])
    return done.stdout.strip("\n")


def main() -> int:
    try:
        since = base(ROOT)
        files = touched(ROOT, changed(ROOT, since))
    except Unknown as why:
        print(f"what the change touches is not known: {why}", file=sys.stderr)
        return 1
    said = f"{len(files)} files of tests/turns.py test what changed since {since[:12]}"
    print(said, file=sys.stderr)
    print(*files, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
