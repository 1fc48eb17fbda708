"""The real patch set against the real tags that the product's own source cache holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.patchset import apply, manifest
from ollama_tiering.patchset.upstream import SourceCache

PATCHSET = manifest.load()
CACHE = SourceCache()
CACHED = [tag for tag in PATCHSET.pins if CACHE.has(tag)]
WHY = f"no supported version in the source cache {CACHE.root}; `tiering fetch --all-tags` fills it"

pytestmark = [pytest.mark.upstream, pytest.mark.skipif(not CACHED, reason=WHY)]


@pytest.mark.parametrize("tag", PATCHSET.pins)
def test_the_patch_set_applies(tag: str) -> None:
    if tag not in CACHED:
        pytest.skip(f"{tag} is not in the source cache; `tiering fetch --all-tags` fills it")
    apply.check_tag(PATCHSET, CACHE, tag, shutil.which("go"))


@pytest.mark.parametrize("name", PATCHSET.conditions)
def test_a_condition_tells_versions_apart(name: str) -> None:
    """One that no version meets, or every one, names a file that never was where it says."""
    first, *_, last = PATCHSET.pins
    if not {first, last} <= set(CACHED):
        pytest.skip(f"not both of {first} and {last} are in the source cache")
    path = PATCHSET.conditions[name].path
    there = [CACHE.tree(tag, path) is not None for tag in (first, last)]
    assert sorted(there) == [False, True], f"overlay/{name}: {path}"


@pytest.mark.slow
@pytest.mark.parametrize("tag", dict.fromkeys([CACHED[0], CACHED[-1]]) if CACHED else [])
def test_apply_is_idempotent_and_revert_restores_every_byte(tag: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    CACHE.extract(tag, tree)
    before = {p: (p.read_bytes(), p.stat().st_mode) for p in tree.rglob("*") if p.is_file()}
    go = shutil.which("go")
    assert apply.apply(PATCHSET, tree, tag=tag, allow_untested=False, go=go, cache=CACHE)
    assert apply.status(PATCHSET, tree).state == "patched"
    assert not apply.apply(PATCHSET, tree, tag=tag, allow_untested=False, go=go, cache=CACHE)
    apply.revert(tree)
    after = {p: (p.read_bytes(), p.stat().st_mode) for p in tree.rglob("*") if p.is_file()}
    assert after == before
    assert apply.status(PATCHSET, tree).tag is not None


def test_a_tree_changed_by_hand_is_refused(tmp_path: Path) -> None:
    from ollama_tiering.errors import UnsupportedUpstream

    tag = config.DEFAULT_TAG if config.DEFAULT_TAG in CACHED else CACHED[0]
    tree = tmp_path / "tree"
    CACHE.extract(tag, tree)
    with (tree / "kvcache/causal.go").open("a") as file:
        file.write("// mine\n")
    with pytest.raises(UnsupportedUpstream, match=r"1 changed, 0 missing, 0 unknown"):
        apply.check(PATCHSET, tree, tag=tag, allow_untested=False, cache=CACHE)
