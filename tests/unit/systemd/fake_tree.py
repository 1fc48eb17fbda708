"""An installed Ollama whose program only says how it was started, and a tree of links for it."""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.patchset.llama_server import link_tree, links, parts
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import RECORD, LinkTree
from tests.unit.patchset import fake_installed as fake

SEEN = "SEEN"  # names the file that a started program writes
PROGRAM = f"""#!/bin/sh
[ "$1" = serve ] || exit 64
{{ echo "$0"; echo $$; env; }} > "${SEEN}"
"""


def installed(folder: Path) -> InstalledOllama:
    fake.installed(folder)
    fake.script(folder / "bin/ollama", PROGRAM)
    return fake.at(folder)


def patched(
    cache: Path,
    installation: InstalledOllama,
    name: str = "v0.32.15-1",
    *,
    listed: bool = False,
    exact: str = "",
) -> LinkTree:
    """As `tiering patch` leaves it in the cache; `listed`: with what lies there in its record;
    `exact`: the kernels of its exact attention.
    """
    folder, library = cache / "llama-server" / name, cache / "library"
    cache.mkdir(parents=True, exist_ok=True)
    library.write_text(f"our library of {name}")
    (cache / "exact").write_text("our exact attention")
    state = installation.state()
    own = cache / "exact" if exact else None
    links.lay(folder, links.entries(installation, state, fake.VERSION, library, exact=own))
    library.unlink()
    (cache / "exact").unlink()
    there = parts.of(folder, installation) if listed else []
    program = str(installation.program)
    known = {"exact": exact, "processor": "avx2 fma"}
    tree = LinkTree(folder, program, fake.VERSION, fake.PIN, state, "ours", parts=there, **known)
    (folder / RECORD).write_text(link_tree.text_of(tree))
    return tree
