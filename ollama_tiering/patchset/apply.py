"""Checks, applies and reverts the patch set on a plain source tree, and says its state. No commits,
no repository.

The new content of patched files is made elsewhere first and then moved in. So a conflict leaves the
tree untouched, and unchanged files keep their modification times. Applying again starts from
upstream's own bytes. If an apply or revert is killed, the next command undoes it.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ollama_tiering.errors import PatchConflict, UnsupportedUpstream
from ollama_tiering.patchset import gittree, gomod, overlay
from ollama_tiering.patchset.manifest import Hook, Patchset
from ollama_tiering.patchset.run import run
from ollama_tiering.patchset.tree import ReadFile, Tree, TreeRecord
from ollama_tiering.patchset.upstream import SourceCache


@dataclass(frozen=True)
class Status:
    """`state`: pristine, stock (built unpatched), patched, outdated (patched by another patch set),
    edited, interrupted, unknown.
    """

    state: str
    tree: str
    tag: str | None = None
    hooks: tuple[str, ...] = ()
    overlay_files: int = 0
    edited: tuple[str, ...] = ()
    detail: str = ""


# --- rendering: what the patched files contain ----------------------------------------------------


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
    """Every hooked file with all hooks applied. PatchConflict names the first hook that does not
    apply, and where.
    """
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
        # git must not find a repository around the scratch folder: there `apply` skips files
        # silently
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
                    hint="make the hook's diff again for this version, see patches/README.md",
                )
        return {path: (root / path).read_bytes() for path in touched}


def check_tag(
    patchset: Patchset, cache: SourceCache, tag: str, go: str | Path | None = None
) -> None:
    """PatchConflict if the patch set does not fit a cached tag. Reads git objects only, and writes
    no tree.
    """
    pin = patchset.require_pin(tag)
    cache.verify(tag, pin)
    files = frozenset(cache.files(tag))
    render(patchset, lambda path: cache.read(tag, path), overlay.kind_in_listing(files), go)


# --- trees ----------------------------------------------------------------------------------------


def check(
    patchset: Patchset,
    root: Path,
    *,
    tag: str | None,
    allow_untested: bool,
    cache: SourceCache | None = None,
    go: str | Path | None = None,
) -> str:
    """The tag that the tree is; raises what `apply` would raise. Changes nothing."""
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
    """Makes the tree carry exactly this patch set, all or nothing. Returns the paths that were
    written or removed.
    """
    tree = Tree(root)
    tree.undo_interrupted()
    old = tree.record()
    if old:
        tree.refuse_edited(old)
    if old and old.digest == patchset.digest and tag in (None, old.tag):
        return []
    known, changed, added = _plan(patchset, tree, old, tag, allow_untested, cache, go)
    return tree.write(old, TreeRecord(known, patchset.digest, done=False), changed, added)


def revert(root: Path) -> list[str]:
    """Puts upstream's bytes back and removes our files and our record. Returns the paths restored
    or removed; nothing if the tree is not patched.
    """
    tree = Tree(root)
    tree.undo_interrupted()
    record = tree.record()
    if record is None:
        return []
    tree.refuse_edited(record)
    return tree.restore(record)


def status(patchset: Patchset, root: Path) -> Status:
    """The state of this tree. Changes nothing."""
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
    if record.digest == patchset.emptied().digest:
        return Status("stock", where, record.tag, detail="nothing applied, for comparison")
    if record.digest != patchset.digest:
        detail = "patched by another state of patches/; apply again"
        return Status("outdated", where, record.tag, (), len(record.added), detail=detail)
    return Status("patched", where, record.tag, hooks, len(record.added))


# --- steps ----------------------------------------------------------------------------------------


def _plan(
    patchset: Patchset,
    tree: Tree,
    old: TreeRecord | None,
    tag: str | None,
    allow_untested: bool,
    cache: SourceCache | None,
    go: str | Path | None,
) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    pinned = tag if tag is None or not allow_untested or tag in patchset.pins else None
    pin, wrong = tree.identify(patchset, pinned)
    if pin is None and not allow_untested:
        why = _differences(tree, old, tag, wrong, cache)
        raise UnsupportedUpstream(
            f"{tree.root} is not {tag or 'a supported version of Ollama'}: {why}",
            hint="use an unchanged tree (`tiering patch` makes one), or try with --allow-untested",
        )
    known = tag or (pin.tag if pin else "untested")
    ours = frozenset(old.added) if old else frozenset[str]()
    changed, added = render(
        patchset, tree.upstream_read(old), overlay.kind_in_tree(tree.root, ours), go
    )
    return known, changed, added


def _differences(
    tree: Tree, old: TreeRecord | None, tag: str | None, wrong: list[str], cache: SourceCache | None
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


def as_json(found: Status) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(found).items()
    }
