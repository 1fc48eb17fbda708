"""The overlay: new files at their upstream path; those with a condition (condition.py) only if it
holds.

Refuses to overwrite a file of upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ollama_tiering.errors import PatchConflict
from ollama_tiering.patchset.manifest import Patchset

Kind = Callable[[str], str | None]  # path -> "file", "dir", or None if upstream has nothing


def render(patchset: Patchset, upstream_kind: Kind) -> dict[str, bytes]:
    """The content of every overlay file for this version. PatchConflict names the first file that
    upstream has, too.
    """
    left_out = {
        path
        for path, one in patchset.conditions.items()
        if (upstream_kind(one.path) == "file") != one.present
    }
    chosen = {path: text for path, text in patchset.overlay.items() if path not in left_out}
    for path in chosen:
        _refuse_collision(path, upstream_kind)
    return chosen


def _refuse_collision(path: str, upstream_kind: Kind) -> None:
    if upstream_kind(path) is not None:
        raise PatchConflict(
            f"overlay file {path} exists upstream",
            hint="an overlay only adds files; rename it, or change upstream's file by a hook",
        )
    for parent in PurePosixPath(path).parents:
        if upstream_kind(str(parent)) == "file":
            raise PatchConflict(
                f"overlay file {path}: {parent} is a file upstream", hint="move the overlay file"
            )


def kind_in_tree(root: Path, ours: frozenset[str]) -> Kind:
    """`Kind` of a plain tree, without the files that an earlier apply put there."""

    def kind(path: str) -> str | None:
        place = root / path
        if path in ours or not (place.exists() or place.is_symlink()):
            return None
        return "dir" if place.is_dir() and not place.is_symlink() else "file"

    return kind


def kind_in_listing(files: frozenset[str]) -> Kind:
    """`Kind` of a list of all files of a tag."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    return lambda path: "file" if path in files else "dir" if path in folders else None
