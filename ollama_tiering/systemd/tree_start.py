"""`python -m ollama_tiering.systemd.tree_start PREFIX shared|own`: whether the tree in a service's
prefix may be started. The server's unit asks this before each start.

Exit code 0: it may. SAID_WHY: it may not, and one line on stderr, which is the journal, says why
and what to do. The unit takes any other end, and a program that hangs, for a no as well: Ollama
then starts as stock. Nothing is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.patchset.llama_server import installation, link_tree
from ollama_tiering.patchset.llama_server.link_tree import RECORD
from ollama_tiering.systemd.manifest import Installed
from ollama_tiering.systemd.trust import foreign

TREE: Final = Path("tree")  # in the prefix
SHARED: Final = "shared"  # with other users of this machine: what they may write to is not started
OWN: Final = "own"  # a service of a user's own manager
SAID_WHY: Final = 3
_AGAIN: Final = "run `tiering systemd install` again"


@dataclass(frozen=True, slots=True)
class WhyStock:
    """Why a tree is not started, and what to do."""

    reason: str
    cure: str


def why_stock(
    place: Path, users: Collection[int] | None, root: Path | None = None
) -> WhyStock | None:
    """Returns None if the tree in the prefix `place` may be started. `users`: uids of those who may
    write to what is started; None: of everybody. `root`: that directory is treated as `/`.

    It must be as install wrote it, and be made for the files that are installed now.
    """
    folder = place / TREE
    installed = Installed(place, root)
    manifest, tree = installed.load(), link_tree.read(installed.at(folder))
    if manifest is None or tree is None or str(folder / RECORD) not in manifest.files:
        return WhyStock(f"there is no whole tree in {folder}", _AGAIN)
    found = installation.at(Path(tree.program))
    if why := tree.why_stock(found):
        return WhyStock(why, "run `tiering patch`, then `tiering systemd install` again")
    own = {p: digest for p, digest in manifest.files.items() if Path(p).is_relative_to(folder)}
    for path, digest in own.items():
        if (state := installed.state(path, digest)) != "same":
            return WhyStock(f"{path} is {state}, and not as it was installed", _AGAIN)
    assert found is not None
    started = (installed.at(folder), Path(tree.program), found.program, found.lib)
    for part in started if users is not None else ():
        if step := foreign(part, users or ()):
            return WhyStock(
                f"another user than the service's may change {step}",
                f"chown root {step}; chmod go-w {step}",
            )
    if not os.access(tree.binary, os.X_OK):
        return WhyStock(f"{tree.binary} cannot be executed", "mount its file system with exec")
    return None


def main(arguments: Sequence[str]) -> int:
    try:
        place, mode = arguments
        users = (0, os.geteuid()) if mode == SHARED else None
        why = why_stock(Path(place), users)
    except Exception as error:  # whatever it is, Ollama must start
        why = WhyStock(f"the tree cannot be checked: {type(error).__name__}: {error}", _AGAIN)
    if why is None:
        return 0
    print(f"tiering: Ollama starts as stock: {why.reason}; {why.cure}", file=sys.stderr)
    return SAID_WHY


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
