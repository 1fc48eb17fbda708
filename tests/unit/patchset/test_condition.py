"""An overlay file with a condition is copied where it holds, whichever way the patch set goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.errors import PatchConflict, UnsupportedUpstream
from ollama_tiering.patchset import apply, condition, manifest, overlay
from ollama_tiering.patchset.condition import Condition
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import git, snapshot, write_files, write_pins

HAS = "// Only where upstream has kvcache/recurrent.go.\n\n"
LACKS = "// Only where upstream lacks kvcache/recurrent.go.\n\n"
WITH, WITHOUT = "kvcache/tier_recurrent.go", "kvcache/tier_no_recurrent.go"


def parse(text: str) -> Condition | None:
    return condition.parse("kvcache/x.go", text.encode())


@pytest.fixture
def both(patches: Path, upstream_repo: Path) -> Path:
    """A pair of files of which each version gets one: v0.17.1 is the first with recurrent.go."""
    write_files(upstream_repo, {"kvcache/recurrent.go": "package kvcache\n"})
    git("checkout", "-q", "v0.17.0", "--", "kvcache/causal.go", cwd=upstream_repo)
    git("add", "-A", cwd=upstream_repo)
    git("commit", "-q", "-m", "states", cwd=upstream_repo)
    git("tag", "-a", "-m", "v0.17.1", "v0.17.1", cwd=upstream_repo)
    write_pins(patches, upstream_repo, ["v0.16.0", "v0.17.0", "v0.17.1"])
    write_files(
        patches,
        {
            f"overlay/{WITH}": HAS + "package kvcache\n",
            f"overlay/{WITHOUT}": LACKS + "package kvcache\n",
        },
    )
    return patches


@pytest.fixture
def sources(both: Path, upstream_repo: Path, report: Report) -> SourceCache:
    cache = SourceCache()
    tags = ["v0.16.0", "v0.17.0", "v0.17.1"]
    cache.fetch(tags, str(upstream_repo), manifest.load(both), report)
    return cache


def test_the_two_forms_are_read() -> None:
    path = "kvcache/recurrent.go"
    assert parse(HAS + "package kvcache\n") == Condition(path, present=True)
    assert parse(LACKS + "//go:build linux\n\npackage kvcache\n") == Condition(path, present=False)


@pytest.mark.parametrize(
    "text",
    [
        "package kvcache\n\n// Only where upstream has a.go.\n",
        "// Package kvcache keeps what only a cache can keep.\npackage kvcache\n",
        "#pragma once\n// The only place where they meet.\nint a;\n",
        "//go:build !linux\n\npackage kvcache\n",
        "",
    ],
)
def test_other_files_have_none(text: str) -> None:
    assert parse(text) is None
    assert condition.body(text.encode()) == text.encode()


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("// only where upstream has a.go.\n\n", 1),
        ("//Only where upstream has a.go.\n\n", 1),
        ("// Only where upstream has a.go\n\n", 1),
        ("// Only where upstream has a.go. \n\n", 1),
        ("// Only where upstream has a.go.\r\n\r\n", 1),
        ("// Only where upstraem has a.go.\n\n", 1),
        ("// Only where upstream had a.go.\n\n", 1),
        ("// Only if upstream has a.go.\n\n", 1),
        ("// Only where upstream has a.go and b.go.\n\n", 1),
        ("/* Only where upstream has a.go. */\n\n", 1),
        ("# Only where upstream has a.go.\n\n", 1),
        ("\n// Only where upstream has a.go.\n\n", 2),
        ("//go:build linux\n\n// Only where upstream has a.go.\n\n", 3),
        (HAS + "// Only where upstream lacks a.go.\n\n", 3),
        (HAS.rstrip("\n") + "\n", 2),
        (HAS.rstrip("\n") + "\n// Package kvcache keeps.\n", 2),
        ("// Only where upstream has /etc/passwd.\n\n", 1),
        ("// Only where upstream has ../a.go.\n\n", 1),
        ("// Only where upstream has ./a.go.\n\n", 1),
    ],
)
def test_what_is_not_quite_one_is_refused_with_place_and_cure(head: str, line: int) -> None:
    with pytest.raises(PatchConflict, match=rf"^overlay/kvcache/x\.go:{line}: ") as refused:
        parse(head + "package kvcache\n")
    assert refused.value.hint


def test_a_patch_set_with_a_misspelt_condition_is_not_loaded(both: Path) -> None:
    (both / f"overlay/{WITH}").write_text(HAS.replace("has", "have") + "package kvcache\n")
    with pytest.raises(PatchConflict, match=r"tier_recurrent\.go:1"):
        manifest.load(both)


@pytest.mark.parametrize(
    ("tag", "there", "absent"),
    [("v0.16.0", WITHOUT, WITH), ("v0.17.0", WITHOUT, WITH), ("v0.17.1", WITH, WITHOUT)],
)
def test_each_version_gets_its_own(
    both: Path, sources: SourceCache, tmp_path: Path, tag: str, there: str, absent: str
) -> None:
    tree, patchset = tmp_path / "tree", manifest.load(both)
    sources.extract(tag, tree)
    before = snapshot(tree)
    touched = apply.apply(patchset, tree, tag=tag, allow_untested=False, go=None)
    assert there in touched
    assert absent not in touched
    assert (tree / there).read_bytes() == patchset.overlay[there]
    assert not (tree / absent).exists()
    found = apply.status(patchset, tree)
    assert (found.state, found.overlay_files) == ("patched", 3)
    assert not apply.apply(patchset, tree, tag=tag, allow_untested=False, go=None)
    apply.revert(tree)
    assert snapshot(tree) == before


def test_a_file_that_is_not_copied_collides_with_nothing(both: Path, sources: SourceCache) -> None:
    """In a tree and in the source cache: `patch check --all-tags` looks at the latter."""
    own = LACKS + "package kvcache\n"
    write_files(both, {"overlay/kvcache/recurrent.go": own})
    patchset = manifest.load(both)
    for tag in ("v0.16.0", "v0.17.1"):
        apply.check_tag(patchset, sources, tag)
    (both / "overlay/kvcache/recurrent.go").write_text(own.replace("lacks", "has"))
    with pytest.raises(PatchConflict, match=r"recurrent\.go exists upstream"):
        apply.check_tag(manifest.load(both), sources, "v0.17.1")


def test_a_condition_that_no_longer_holds_takes_the_file_away(
    both: Path, sources: SourceCache, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    sources.extract("v0.17.0", tree)
    apply.apply(manifest.load(both), tree, tag=None, allow_untested=False, go=None)
    file = both / f"overlay/{WITHOUT}"
    file.write_text(file.read_text().replace("lacks", "has"))
    assert apply.apply(manifest.load(both), tree, tag=None, allow_untested=False, go=None) == [
        WITHOUT
    ]
    assert not (tree / WITHOUT).exists()


def test_a_folder_of_that_name_is_not_the_file(both: Path) -> None:
    patchset = manifest.load(both)
    kind = {"kvcache/recurrent.go": "dir"}.get
    assert WITHOUT in overlay.render(patchset, kind)
    assert WITH not in overlay.render(patchset, kind)


def test_digests_follow_the_condition_and_test_builds_stay_apart(both: Path) -> None:
    first = manifest.load(both)
    file = both / f"overlay/{WITH}"
    file.write_text(LACKS + "package kvcache\n")
    changed = manifest.load(both)
    assert (changed.digest, changed.compiled_digest) != (first.digest, first.compiled_digest)
    file = both / "overlay/kvcache/replay.go"
    file.write_text(HAS + "//go:build kvtier_replay\n\npackage kvcache\n")
    assert manifest.load(both).compiled_digest == changed.compiled_digest


def test_where_a_condition_looks_the_tree_must_be_upstreams(
    both: Path, sources: SourceCache, tmp_path: Path
) -> None:
    """A file put there by hand would turn it round."""
    write_files(both, {"overlay/tier/deep/x.go": HAS + "package deep\n"})
    loaded = manifest.load(both)
    elsewhere = {path: text for path, text in loaded.overlay.items() if path.startswith("tier/")}
    runner = tuple(hook for hook in loaded.hooks if "restore" in hook.name)
    patchset = replace(loaded, hooks=runner, overlay=elsewhere)
    tree = tmp_path / "tree"
    sources.extract("v0.17.0", tree)
    (tree / "kvcache/recurrent.go").write_text("package kvcache\n")
    with pytest.raises(UnsupportedUpstream):
        apply.apply(patchset, tree, tag="v0.17.0", allow_untested=False, go=None)
