"""Hooks and sources into a tree of llama.cpp: all of it, or nothing and the reason.

Everything is checked before the first byte is written. A tree that has it all, from the same
sources, is left as it is.
"""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.errors import PatchConflict, UsageError
from ollama_tiering.patchset.llama_server.anchors import missing_texts, place
from ollama_tiering.patchset.llama_server.hooks import CMAKE, HOOKS, INCLUDED, NEEDED, OURS

# llama.cpp's own headers are for our files alone: common/ has some of the same names.
_INCLUDED = """\
set(KVT_SOURCES
    {sources}
)
target_sources(server-context PRIVATE ${{KVT_SOURCES}})
target_include_directories(server-context PRIVATE ${{CMAKE_CURRENT_LIST_DIR}})
set_source_files_properties(${{KVT_SOURCES}} PROPERTIES
    INCLUDE_DIRECTORIES ${{CMAKE_CURRENT_LIST_DIR}}/../../../src)
"""


def patch_tree(tree: Path, sources: Path) -> bool:
    """Whether anything was written. `sources`: our `llama_server/src`.

    PatchConflict where it does not fit, UsageError for no tree or no sources.
    """
    paths = {one.path for one in HOOKS} | {one.path for one in NEEDED}
    files = {path: _read(tree / path) for path in paths}
    if files[CMAKE] is None:
        raise UsageError(
            f"{tree} is no source of llama.cpp: it has no {CMAKE}",
            hint="name the folder of an unpacked source of llama.cpp",
        )
    lacking = missing_texts(files, NEEDED)
    if lacking:
        raise PatchConflict(
            f"this llama.cpp lacks what the tiering uses: {'; '.join(lacking)}",
            hint="docs/llama-server.md lists the versions that are tested",
        )
    changed = place(files, HOOKS)
    ours = _ours(sources)
    _check_folder(tree / OURS, ours, patched=not changed)
    if not changed:
        return False
    (tree / OURS).mkdir()
    for name, text in ours.items():
        (tree / OURS / name).write_text(text, encoding="utf-8")
    for path, text in changed.items():
        (tree / path).write_text(text, encoding="utf-8")
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _ours(sources: Path) -> dict[str, str]:
    """Every file that goes into the folder of ours, by its name there."""
    found = sorted(
        path
        for folder in (sources, sources / "llama")
        for path in folder.glob("*")
        if path.is_file()
    )
    files = {path.name: path.read_text(encoding="utf-8") for path in found}
    compiled = [f"${{CMAKE_CURRENT_LIST_DIR}}/{name}" for name in files if name.endswith(".cpp")]
    if not compiled:
        raise UsageError(f"{sources} has no sources", hint="install the package again")
    return {**files, INCLUDED: _INCLUDED.format(sources="\n    ".join(compiled))}


def _check_folder(folder: Path, ours: dict[str, str], *, patched: bool) -> None:
    if not patched:
        if folder.exists():
            raise PatchConflict(
                f"{folder} exists already", hint="begin with a fresh copy of the source"
            )
        return
    different = [name for name, text in ours.items() if _read(folder / name) != text]
    if different:
        raise PatchConflict(
            f"the tree is patched with other sources: {', '.join(different)}",
            hint="begin with a fresh copy of the source",
        )
