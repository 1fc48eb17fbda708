"""Check, apply, revert and status of the patch set on a plain tree (no commits, no git repository needed).

What patched files shall contain is rendered elsewhere first and then moved in, so a conflict leaves the tree untouched
and unchanged files keep their modification times. `TREE/.tiering/` holds the record and upstream's own bytes of every
changed file: applying again starts from those, `revert` puts them back. An apply that was killed is undone by the next
command. Two processes must not work on one tree at once; the build holds a lock per tree.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ollama_tiering.errors import (
    BuildError,
    PatchConflict,
    TieringError,
    UnsupportedUpstream,
    UsageError,
)
from ollama_tiering.patchset import gittree, gomod, overlay
from ollama_tiering.patchset.manifest import Hook, Patchset, TagPin
from ollama_tiering.patchset.run import run
from ollama_tiering.patchset.upstream import SourceCache

RECORD_DIR = ".tiering"
RECORD_FORMAT = 1
ReadFile = Callable[[str], bytes | None]


@dataclass
class Record:
    """What an apply did to a tree. `files` maps each path to the SHA-256 of what we wrote there."""

    tag: str
    digest: str
    done: bool
    changed: dict[str, str] = field(
        default_factory=dict
    )  # upstream files, original kept in pristine/
    added: dict[str, str] = field(default_factory=dict)  # overlay files
    folders: list[str] = field(default_factory=list)  # folders that did not exist before
    format: int = RECORD_FORMAT


@dataclass(frozen=True)
class Status:
    """`state`: pristine, patched, outdated (patched by another patch set), edited, interrupted, unknown."""

    state: str
    tree: str
    tag: str | None = None
    hooks: tuple[str, ...] = ()
    overlay_files: int = 0
    edited: tuple[str, ...] = ()
    detail: str = ""


# --- rendering: what the patched files contain ----------------------------------------------------------------------


def render(
    patchset: Patchset, read: ReadFile, kind: overlay.Kind, go: str | Path | None
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """(changed upstream files, added files). Without `go` the module files are left out."""
    changed = render_hooks(patchset.hooks, read)
    if go is not None and patchset.go_requires:
        go_mod, go_sum = read(gomod.GO_MOD), read(gomod.GO_SUM)
        if go_mod is None or go_sum is None:
            raise UnsupportedUpstream(
                "no go.mod and go.sum in the tree", hint="is it a source tree of Ollama?"
            )
        changed |= gomod.render(go_mod, go_sum, patchset.go_requires, go)
    return changed, overlay.render(patchset, kind)


def render_hooks(hooks: tuple[Hook, ...], read: ReadFile) -> dict[str, bytes]:
    """Every hooked file after all hooks. PatchConflict names the first hook that does not apply, and where."""
    if not hooks:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        touched = dict.fromkeys(path for hook in hooks for path in hook.diff.touched)
        for path in touched:
            content = read(path)
            if content is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content)
        # git must not find a repository around the scratch folder: there `apply` skips files silently
        alone = {"GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C"}
        exact = ("git", "-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no", "apply")
        for hook in hooks:
            done = run(*exact, hook.path, cwd=root, env=alone)
            if done.returncode:
                why = next(
                    (line for line in done.tail if line.startswith("error: ")), "git apply failed"
                )
                raise PatchConflict(
                    f"{hook.name} does not apply: {why.removeprefix('error: ')}",
                    hint="cut the hook again for this version, see patches/README.md",
                )
        return {path: (root / path).read_bytes() for path in touched}


def check_tag(
    patchset: Patchset, cache: SourceCache, tag: str, go: str | Path | None = None
) -> None:
    """Does the patch set fit a cached tag? Reads objects only; writes no tree."""
    pin = patchset.require_pin(tag)
    cache.verify(tag, pin)
    files = frozenset(cache.files(tag))
    render(patchset, lambda path: cache.read(tag, path), overlay.kind_in_listing(files), go)


# --- trees ----------------------------------------------------------------------------------------------------------


class Tree:
    """A plain source tree and what we did to it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.record_dir = self.root / RECORD_DIR
        if not self.root.is_dir():
            raise UsageError(
                f"{root}: no such directory", hint="name a source tree of Ollama with --tree"
            )

    def record(self) -> Record | None:
        path = self.record_dir / "record.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            raise PatchConflict(
                f"{path}: damaged", hint=f"delete {self.root} and make the tree anew"
            ) from None
        if data.get("format") != RECORD_FORMAT:
            raise PatchConflict(f"{path}: made by another version", hint=f"delete {self.root}")
        return Record(**data)

    def identify(self, patchset: Patchset, wanted: str | None) -> tuple[TagPin | None, list[str]]:
        """The accepted tag this tree is, looking past our own changes; else None and the places that differ.

        A tag fits when every folder the patch set touches has the pinned name: what lies elsewhere does not matter.
        Of several the wanted one is taken, else the one that fits in most other places too.
        """
        record = self.record()
        without = frozenset((record.added if record else {}) | {})
        instead = {p: self.record_dir / "pristine" / p for p in record.changed} if record else {}
        seen: dict[str, str | None] = {}

        def differing(pins: dict[str, str]) -> list[str]:
            for place in pins.keys() - seen.keys():
                seen[place] = self._oid(place, without, instead)
            return [place for place, oid in pins.items() if seen[place] != oid]

        candidates = [patchset.require_pin(wanted)] if wanted else list(patchset.pins.values())
        fits: list[tuple[int, TagPin]] = []
        nearest: tuple[int, list[str]] | None = None
        for pin in candidates:
            wrong = differing(patchset.touched_pins(pin))
            if not wrong:
                fits.append((len(differing(pin.folders | pin.files)), pin))
            elif nearest is None or len(wrong) < nearest[0]:
                nearest = (len(wrong), wrong)
        if fits:
            return min(fits, key=lambda item: item[0])[1], []
        return None, nearest[1] if nearest else []

    def _oid(self, place: str, without: frozenset[str], instead: dict[str, Path]) -> str | None:
        path = instead.get(place, self.root / place)
        if path.is_file():
            return gittree.file_oid(path)
        return gittree.folder_oid(self.root, place, without=without, instead=instead)

    def edited(self, record: Record) -> list[str]:
        """Files of ours that somebody changed after we wrote them."""
        ours = record.changed | record.added
        return sorted(path for path, digest in ours.items() if _sha256(self.root / path) != digest)

    def upstream_read(self, record: Record | None) -> ReadFile:
        """Reads upstream's own content, whatever we did to the file."""

        def read(path: str) -> bytes | None:
            kept = self.record_dir / "pristine" / path
            place = kept if record and path in record.changed else self.root / path
            return place.read_bytes() if place.is_file() else None

        return read


def check(
    patchset: Patchset,
    root: Path,
    *,
    tag: str | None,
    allow_untested: bool,
    cache: SourceCache | None = None,
    go: str | Path | None = None,
) -> str:
    """Would apply succeed? Returns the tag the tree is. Changes nothing."""
    tree = Tree(root)
    return _plan(patchset, tree, tree.record(), tag, allow_untested, cache, go)[0]


def apply(
    patchset: Patchset,
    root: Path,
    *,
    tag: str | None,
    allow_untested: bool,
    go: str | Path | None,
    cache: SourceCache | None = None,
) -> list[str]:
    """Make the tree carry exactly this patch set; all or nothing. Returns the paths written or removed."""
    tree = Tree(root)
    _undo_interrupted(tree)
    old = tree.record()
    if old and (edited := tree.edited(old)):
        raise _was_edited(tree, edited)
    if old and old.digest == patchset.digest and tag in (None, old.tag):
        return []
    known, changed, added = _plan(patchset, tree, old, tag, allow_untested, cache, go)
    return _write(tree, old, Record(known, patchset.digest, done=False), changed, added)


def revert(root: Path) -> list[str]:
    """Upstream's bytes back, our files and our record gone. Returns the paths restored or removed; a no-op if unpatched."""
    tree = Tree(root)
    _undo_interrupted(tree)
    record = tree.record()
    if record is None:
        return []
    if edited := tree.edited(record):
        raise _was_edited(tree, edited)
    touched = _restore(tree, record)
    shutil.rmtree(tree.record_dir)
    return touched


def status(patchset: Patchset, root: Path) -> Status:
    """What this tree is. Changes nothing."""
    tree = Tree(root)
    where = str(tree.root)
    record = tree.record()
    if record is None:
        pin, wrong = tree.identify(patchset, None)
        if pin:
            return Status("pristine", where, pin.tag)
        return Status(
            "unknown", where, detail=f"no accepted version; differs in {', '.join(wrong[:6])}"
        )
    hooks = tuple(hook.name for hook in patchset.hooks)
    if not record.done:
        return Status(
            "interrupted",
            where,
            record.tag,
            detail="an apply was killed; the next one undoes it first",
        )
    if edited := tuple(tree.edited(record)):
        return Status("edited", where, record.tag, hooks, len(record.added), edited)
    if record.digest != patchset.digest:
        detail = "patched by another state of patches/; apply again"
        return Status("outdated", where, record.tag, (), len(record.added), detail=detail)
    return Status("patched", where, record.tag, hooks, len(record.added))


# --- steps ----------------------------------------------------------------------------------------------------------


def _plan(
    patchset: Patchset,
    tree: Tree,
    old: Record | None,
    tag: str | None,
    allow_untested: bool,
    cache: SourceCache | None,
    go: str | Path | None,
) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    pinned = tag if tag is None or not allow_untested or tag in patchset.pins else None
    pin, wrong = tree.identify(patchset, pinned)
    if pin is None and not allow_untested:
        raise UnsupportedUpstream(
            f"{tree.root} is not {tag or 'a supported version of Ollama'}: {_differences(tree, old, tag, wrong, cache)}",
            hint="use an unchanged tree (`tiering fetch`, `tiering patch`), or try with --allow-untested",
        )
    known = tag or (pin.tag if pin else "untested")
    ours = frozenset(old.added) if old else frozenset[str]()
    changed, added = render(
        patchset, tree.upstream_read(old), overlay.kind_in_tree(tree.root, ours), go
    )
    return known, changed, added


def _differences(
    tree: Tree, old: Record | None, tag: str | None, wrong: list[str], cache: SourceCache | None
) -> str:
    """A diffstat against the cached tag, or, without it, the places that differ."""
    if tag is None or cache is None or not cache.has(tag):
        return f"differs in {', '.join(wrong[:8]) or 'everything'}"
    ours = set(old.added) if old else set()
    read = tree.upstream_read(old)
    missing, changed = [], []
    files = {p: v for p, v in cache.files(tag).items() if _below(p, wrong)}
    for path, (mode, oid) in files.items():
        content = read(path)
        if content is None:
            missing.append(path)
        elif mode != "120000" and gittree.blob_oid(content) != oid:
            changed.append(path)
    present = {
        path.relative_to(tree.root).as_posix()
        for place in wrong
        for path in (tree.root / place).rglob("*")
        if path.is_file()
    }
    extra = sorted(present - files.keys() - ours)
    listed = (
        [f"M {path}" for path in changed]
        + [f"D {path}" for path in missing]
        + [f"A {path}" for path in extra]
    )
    more = f", and {len(listed) - 8} more" if len(listed) > 8 else ""
    counts = f"{len(changed)} changed, {len(missing)} missing, {len(extra)} unknown"
    return f"{counts} ({', '.join(listed[:8])}{more})"


def _below(path: str, places: list[str]) -> bool:
    return any(path == place or path.startswith(place + "/") for place in places)


def _write(
    tree: Tree, old: Record | None, new: Record, changed: dict[str, bytes], added: dict[str, bytes]
) -> list[str]:
    """Keep originals, note the intent, move the files in, note success. Undoes itself when it fails half-way."""
    read = tree.upstream_read(old)
    originals = {path: read(path) for path in {*changed, *(old.changed if old else ())}}
    contents = (
        {path: originals[path] or b"" for path in originals.keys() - changed.keys()}
        | changed
        | added
    )
    new.changed = {path: _digest(content) for path, content in changed.items()}
    new.added = {path: _digest(content) for path, content in added.items()}
    new.folders = sorted({*(old.folders if old else ()), *_new_folders(tree, added)})
    stale = sorted((old.added.keys() if old else set()) - added.keys())
    touched = []
    try:
        for path, original in originals.items():
            kept = tree.record_dir / "pristine" / path
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                _replace(kept, original or b"")
                shutil.copymode(tree.root / path, kept)
        intent = Record(new.tag, new.digest, False, dict.fromkeys(originals, ""), {}, new.folders)
        intent.added = dict.fromkeys([*added, *stale], "")
        _save(tree, intent)
        for path, content in contents.items():
            target = tree.root / path
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                _replace(target, content)
                touched.append(path)
        for path in stale:
            (tree.root / path).unlink(missing_ok=True)
            touched.append(path)
        _remove_empty(tree, new.folders)
        new.done = True
        _save(tree, new)
    except OSError as error:
        _undo_interrupted(tree)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(tree.root) from None
        raise TieringError(
            f"cannot write into {tree.root}: {error.strerror} ({error.filename})"
        ) from None
    return sorted(touched)


def disk_full(where: Path) -> BuildError:
    return BuildError(
        f"no space left on the disk of {where}",
        hint="free some (a build needs about 3 GB), or set OLLAMA_TIERING_CACHE to a folder on another disk",
    )


def _undo_interrupted(tree: Tree) -> None:
    record = tree.record()
    if record is not None and not record.done:
        _restore(tree, record)
        shutil.rmtree(tree.record_dir)
    elif record is None and tree.record_dir.is_dir():
        shutil.rmtree(
            tree.record_dir
        )  # killed before the intent was noted: nothing was changed yet


def _restore(tree: Tree, record: Record) -> list[str]:
    touched = []
    for path in record.changed:
        kept = tree.record_dir / "pristine" / path
        if kept.read_bytes() != (tree.root / path).read_bytes():
            _replace(tree.root / path, kept.read_bytes())
            touched.append(path)
        shutil.copymode(kept, tree.root / path)
    for path in record.added:
        (tree.root / path).unlink(missing_ok=True)
        touched.append(path)
    _remove_empty(tree, record.folders)
    return sorted(touched)


def _new_folders(tree: Tree, added: dict[str, bytes]) -> set[str]:
    parents = {str(parent) for path in added for parent in PurePosixPath(path).parents}
    return {parent for parent in parents if not (tree.root / parent).exists()}


def _remove_empty(tree: Tree, folders: list[str]) -> None:
    for folder in sorted(folders, key=len, reverse=True):
        place = tree.root / folder
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _replace(target: Path, content: bytes) -> None:
    """Write beside and rename over; the mode of an existing file stays."""
    scratch = target.with_name(f".{target.name}.tiering-new")
    try:
        scratch.write_bytes(content)
        if target.exists():
            shutil.copymode(target, scratch)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _save(tree: Tree, record: Record) -> None:
    tree.record_dir.mkdir(exist_ok=True)
    _replace(tree.record_dir / "record.json", json.dumps(asdict(record), indent=1).encode())


def _was_edited(tree: Tree, edited: list[str]) -> PatchConflict:
    more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
    return PatchConflict(
        f"{', '.join(edited[:3])}{more} in {tree.root} changed after patching",
        hint=f"carry the change over into patches/ and undo it there, or delete {tree.root}",
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return None


def as_json(found: Status) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(found).items()
    }
