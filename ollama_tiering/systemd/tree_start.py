"""`python -m ollama_tiering.systemd.tree_start PREFIX shared|own [CACHE [due]]` names the tree of
links that is started: that in a service's prefix, or one that was made in CACHE after an update of
Ollama. The server's unit asks this before each start.

Exit code 0: the last line of stdout is its `ollama`. SAID_WHY: there is none, and one line on
stderr, which is the journal, says why and what to do. The unit takes any other end, and a program
that hangs, for a no as well: Ollama then starts as stock. Nothing is written.

With `due`, exit code 0 says that a tree should be made, and nothing is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.patchset.llama_server import installation, link_tree
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import RECORD, LinkTree
from ollama_tiering.systemd.manifest import Installed
from ollama_tiering.systemd.trust import foreign

TREE: Final = Path("tree")  # in the prefix
SHARED: Final = "shared"  # with other users of this machine: what they may write to is not started
OWN: Final = "own"  # a service of a user's own manager
SAID_WHY: Final = 3
DUE: Final = "due"
MAKER: Final = "ollama-tiering-patch"  # the unit that makes a tree after an update
_AGAIN: Final = "run `tiering systemd install` again"


@dataclass(frozen=True, slots=True)
class WhyStock:
    """Why no tree is started, and what to do. `is_due`: a tree that is made now would be."""

    reason: str
    cure: str
    is_due: bool = False


def why_stock(
    place: Path,
    users: Collection[int] | None,
    cache: Path | None = None,
    root: Path | None = None,
) -> WhyStock | None:
    """Returns None if a tree may be started: see `startable`."""
    found = startable(place, users, cache, root)
    return found if isinstance(found, WhyStock) else None


def startable(
    place: Path,
    users: Collection[int] | None,
    cache: Path | None = None,
    root: Path | None = None,
) -> Path | WhyStock:
    """The `ollama` of the tree in the prefix `place`, or of one in `cache`. `users`: uids of those
    who may write to what is started; None: of everybody. `root`: that directory is treated as `/`.

    It must be made for the files that are installed now; and that in the prefix must be as install
    wrote it.
    """
    folder = place / TREE
    installed = Installed(place, root)
    manifest, tree = installed.load(), link_tree.read(installed.at(folder))
    if manifest is None or tree is None or str(folder / RECORD) not in manifest.files:
        return WhyStock(f"there is no whole tree in {folder}", _AGAIN)
    found = installation.at(Path(tree.program))
    if why := tree.why_stock(found):
        made = _made_since(installed.at(cache), found) if cache and found else None
        if made is None:
            cure = _cure(installed.at(cache) if cache else None)
            return WhyStock(why, cure, is_due=True)
        tree = made
    else:
        own = {p: one for p, one in manifest.files.items() if Path(p).is_relative_to(folder)}
        for path, digest in own.items():
            if (state := installed.state(path, digest)) != "same":
                return WhyStock(f"{path} is {state}, and not as it was installed", _AGAIN)
    assert found is not None
    started = (tree.folder, Path(tree.program), found.program, found.lib)
    for part in started if users is not None else ():
        if step := foreign(part, users or ()):
            return WhyStock(
                f"another user than the service's may change {step}",
                f"chown root {step}; chmod go-w {step}",
            )
    if not os.access(tree.binary, os.X_OK):
        return WhyStock(f"{tree.binary} cannot be executed", "mount its file system with exec")
    return tree.binary


def _made_since(cache: Path, found: InstalledOllama) -> LinkTree | None:
    """The latest tree in a cache that is for what is installed now. Of which program a tree says
    that it is, its maker decides; so the installed one is that of the tree in the prefix.
    """
    every = link_tree.below(cache / link_tree.CACHED)
    return next((tree for tree in every if tree.is_of(found) and tree.fits(found)), None)


def _cure(cache: Path | None) -> str:
    if cache is None:
        return "run `tiering patch`, then `tiering systemd install` again"
    if cache.exists() and not os.access(cache, os.R_OK | os.X_OK):
        return f"or tiered, if one was made since: only its user and root may look into {cache}"
    return (
        f"{MAKER}.service makes a tree for it, for the next start: "
        f"`journalctl -u {MAKER}` says how far it is"
    )


def main(arguments: Sequence[str]) -> int:
    """Runs it. Units that an older version wrote give no cache, and want no line on stdout."""
    place, mode, *more = arguments
    try:
        users = (0, os.geteuid()) if mode == SHARED else None
        found = startable(Path(place), users, Path(more[0]) if more else None)
    except Exception as error:  # whatever it is, Ollama must start
        found = WhyStock(f"the tree cannot be checked: {type(error).__name__}: {error}", _AGAIN)
    if DUE in more[1:]:
        return 0 if isinstance(found, WhyStock) and found.is_due else SAID_WHY
    if isinstance(found, WhyStock):
        print(f"tiering: Ollama starts as stock: {found.reason}; {found.cure}", file=sys.stderr)
        return SAID_WHY
    if more:
        sys.stdout.buffer.write(os.fsencode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
