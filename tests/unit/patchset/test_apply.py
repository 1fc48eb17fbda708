from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.errors import BuildError, PatchConflict, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import apply, manifest, tree
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import git, snapshot


def apply_to(patchset: Patchset, root: Path, **given: Any) -> list[str]:
    options = {"tag": None, "allow_untested": False, "go": None} | given
    return apply.apply(patchset, root, **options)


def test_apply_changes_and_adds_exactly_what_the_patch_set_says(
    patchset: Patchset, tree: Path
) -> None:
    before = snapshot(tree)
    touched = apply_to(patchset, tree)
    assert touched == [
        "kvcache/causal.go",
        "kvcache/tier.go",
        "runner/runner.go",
        "tier/deep/proto.go",
    ]
    assert "\ttierInit()\n\tc()" in (tree / "kvcache/causal.go").read_text()
    after = {path: kept for path, kept in snapshot(tree).items() if not path.startswith(".tiering")}
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {*touched, "tier", "tier/deep"}


def test_a_second_apply_writes_nothing(patchset: Patchset, tree: Path) -> None:
    apply_to(patchset, tree)
    times = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    assert apply_to(patchset, tree) == []
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*")} == times


def test_revert_restores_every_byte_mode_and_folder(patchset: Patchset, tree: Path) -> None:
    (tree / "kvcache/causal.go").chmod(0o755)
    (tree / "kvcache/causal.go").chmod(0o644)
    before = snapshot(tree)
    apply_to(patchset, tree)
    assert len(apply.revert(tree)) == 4
    assert snapshot(tree) == before
    assert apply.revert(tree) == []


def test_a_changed_overlay_file_is_the_only_one_written_again(patches: Path, tree: Path) -> None:
    apply_to(manifest.load(patches), tree)
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*.go")}
    (patches / "overlay/kvcache/tier.go").write_text("package kvcache\n\n// changed\n")
    assert apply_to(manifest.load(patches), tree) == ["kvcache/tier.go"]
    after = {path: path.stat().st_mtime_ns for path in tree.rglob("*.go")}
    assert {p.name for p in after if after[p] != before[p]} == {"tier.go"}


def test_files_and_hooks_that_left_the_patch_set_leave_the_tree(patches: Path, tree: Path) -> None:
    before = snapshot(tree)
    apply_to(manifest.load(patches), tree)
    (patches / "series").write_text("hooks/go/cells.patch\n")
    (patches / "hooks/go/restore.patch").unlink()
    (patches / "overlay/tier/deep/proto.go").unlink()
    apply_to(manifest.load(patches), tree)
    assert not (tree / "tier").exists()
    assert (tree / "runner/runner.go").read_bytes() == before["runner/runner.go"][0]
    assert "tierInit" in (tree / "kvcache/causal.go").read_text()
    apply.revert(tree)
    assert snapshot(tree) == before


def test_hooks_of_one_file_build_on_each_other(patches: Path, tree: Path) -> None:
    first = (patches / "hooks/go/cells.patch").read_text()
    second = first.replace("-3,6 +3,7", "-4,5 +4,6").replace(" func Init() {\n", "")
    second = second.replace("+\ttierInit()", " \ttierInit()\n+\ttierAgain()")
    (patches / "hooks/go/again.patch").write_text(second.replace("-4,5 +4,6", "-4,6 +4,7"))
    with (patches / "series").open("a") as series:
        series.write("hooks/go/again.patch\n")
    apply_to(manifest.load(patches), tree)
    assert "\ttierInit()\n\ttierAgain()\n" in (tree / "kvcache/causal.go").read_text()


def test_a_conflict_names_the_hook_and_leaves_the_tree_alone(
    patchset: Patchset, tmp_path: Path, upstream_repo: Path
) -> None:
    plain = tmp_path / "v18"
    git("worktree", "add", "-q", "--detach", str(plain), "v0.18.0", cwd=upstream_repo)
    before = snapshot(plain)
    with pytest.raises(PatchConflict, match=r"cells\.patch does not apply: .*causal\.go:3"):
        apply_to(patchset, plain, tag="v0.18.0", allow_untested=True)
    assert snapshot(plain) == before


def test_a_later_conflict_undoes_nothing_because_nothing_was_done(
    patches: Path, tree: Path
) -> None:
    hook = patches / "hooks/go/restore.patch"
    hook.write_text(hook.read_text().replace(" \tserve()", " \tsomething()"))
    before = snapshot(tree)
    with pytest.raises(PatchConflict, match=r"restore\.patch"):
        apply_to(manifest.load(patches), tree)
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("path", "said"), [("kvcache/tier.go", "exists upstream"), ("tier", "is a file upstream")]
)
def test_an_overlay_file_that_upstream_has_is_refused(
    patchset: Patchset, tree: Path, path: str, said: str
) -> None:
    (tree / path).write_text("upstream's own\n")
    before = snapshot(tree)
    with pytest.raises(PatchConflict, match=said):
        apply_to(patchset, tree, allow_untested=True)
    assert snapshot(tree) == before


def test_a_foreign_tree_is_refused_with_its_diffstat(
    patchset: Patchset, tree: Path, cache: SourceCache
) -> None:
    (tree / "kvcache/cache.go").write_text("mine\n")
    (tree / "kvcache/new.go").write_text("mine\n")
    (tree / "kvcache/sub/x.go").unlink()
    before = snapshot(tree)
    with pytest.raises(UnsupportedUpstream) as caught:
        apply_to(patchset, tree, tag="v0.16.0", cache=cache)
    assert "1 changed, 1 missing, 1 unknown" in str(caught.value)
    for line in ("M kvcache/cache.go", "D kvcache/sub/x.go", "A kvcache/new.go"):
        assert line in str(caught.value)
    assert snapshot(tree) == before
    assert apply_to(patchset, tree, tag="v0.16.0", allow_untested=True)


def test_changes_where_the_patch_set_does_not_reach_do_not_matter(
    patchset: Patchset, tree: Path
) -> None:
    (tree / "docs/a.md").write_text("mine\n")
    assert apply.check(patchset, tree, tag=None, allow_untested=False) == "v0.16.0"


def test_without_a_tag_the_tree_is_recognised(
    patchset: Patchset, tmp_path: Path, cache: SourceCache
) -> None:
    cache.extract("v0.17.0", tmp_path / "seventeen")
    assert (
        apply.check(patchset, tmp_path / "seventeen", tag=None, allow_untested=False) == "v0.17.0"
    )
    with pytest.raises(UnsupportedUpstream, match=r"is not v0\.16\.0"):
        apply.check(patchset, tmp_path / "seventeen", tag="v0.16.0", allow_untested=False)


def test_an_edit_after_patching_is_never_overwritten(patches: Path, tree: Path) -> None:
    apply_to(manifest.load(patches), tree)
    (tree / "kvcache/tier.go").write_text("hand work\n")
    (patches / "overlay/kvcache/tier.go").write_text("package kvcache // new\n")
    before = snapshot(tree)
    for attempt in (lambda: apply_to(manifest.load(patches), tree), lambda: apply.revert(tree)):
        with pytest.raises(PatchConflict, match=r"kvcache/tier\.go in .* changed after patching"):
            attempt()
    assert snapshot(tree) == before
    assert apply.status(manifest.load(patches), tree).edited == ("kvcache/tier.go",)


@pytest.mark.fault
@pytest.mark.parametrize("fatal_write", range(1, 12))
def test_a_kill_at_any_write_is_undone_by_the_next_command(
    patchset: Patchset, tree: Path, monkeypatch: pytest.MonkeyPatch, fatal_write: int
) -> None:
    before = snapshot(tree)
    _die_at_write(monkeypatch, fatal_write)
    try:
        apply_to(patchset, tree)
    except _Killed:
        monkeypatch.undo()
        strays = {path.name for path in tree.rglob("*") if ".tiering" not in path.parts}
        assert strays <= {Path(path).name for path in before} | {
            "tier.go",
            "tier",
            "deep",
            "proto.go",
        }
        assert apply_to(patchset, tree), "the next apply does the whole work"
    monkeypatch.undo()
    assert apply.status(patchset, tree).state == "patched"
    apply.revert(tree)
    assert snapshot(tree) == before


@pytest.mark.fault
@pytest.mark.parametrize("fatal_write", range(1, 5))
def test_a_killed_revert_goes_on(
    patchset: Patchset, tree: Path, monkeypatch: pytest.MonkeyPatch, fatal_write: int
) -> None:
    before = snapshot(tree)
    apply_to(patchset, tree)
    _die_at_write(monkeypatch, fatal_write)
    try:
        apply.revert(tree)
    except _Killed:
        monkeypatch.undo()
        assert apply.status(patchset, tree).state in ("interrupted", "patched")
        apply.revert(tree)
    assert snapshot(tree) == before


@pytest.mark.fault
@pytest.mark.parametrize("full_at", range(1, 9))
def test_a_full_disk_leaves_upstream_and_says_so(
    patchset: Patchset, tree: Path, monkeypatch: pytest.MonkeyPatch, full_at: int
) -> None:
    before = snapshot(tree)
    _die_at_write(monkeypatch, full_at, OSError(errno.ENOSPC, "No space left on device", "x"))
    with pytest.raises(BuildError, match="no space left"):
        apply_to(patchset, tree)
    monkeypatch.undo()
    apply.revert(tree)
    assert snapshot(tree) == before


def test_status_tells_the_states_apart(patches: Path, tree: Path) -> None:
    patchset = manifest.load(patches)
    assert apply.status(patchset, tree).state == "pristine"
    apply_to(patchset.emptied(), tree)
    assert apply.status(patchset, tree).state == "stock"
    apply.revert(tree)
    apply_to(patchset, tree)
    found = apply.status(patchset, tree)
    assert (found.state, found.tag, found.overlay_files) == ("patched", "v0.16.0", 2)
    (patches / "overlay/kvcache/tier.go").write_text("package kvcache // new\n")
    assert apply.status(manifest.load(patches), tree).state == "outdated"
    (tree / "runner/runner.go").unlink()
    assert apply.status(patchset, tree).state == "edited"


def test_status_of_a_foreign_tree_is_unknown(patchset: Patchset, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    assert apply.status(patchset, tmp_path / "foreign").state == "unknown"


def test_a_damaged_record_is_refused(patchset: Patchset, tree: Path) -> None:
    apply_to(patchset, tree)
    (tree / ".tiering/record.json").write_text("{")
    with pytest.raises(PatchConflict, match="damaged"):
        apply.status(patchset, tree)


def test_a_tree_that_is_not_there_is_a_usage_error(patchset: Patchset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        apply.status(patchset, tmp_path / "nowhere")


def test_a_tree_inside_somebodys_repository_is_patched_all_the_same(
    patchset: Patchset, tree: Path
) -> None:
    git("init", "-q", cwd=tree.parent)
    assert len(apply_to(patchset, tree)) == 4


def test_a_cached_tag_is_checked_without_a_tree(
    patchset: Patchset, cache: SourceCache, patches: Path
) -> None:
    for tag in ("v0.16.0", "v0.17.0"):
        apply.check_tag(patchset, cache, tag)
    (patches / "overlay/runner").mkdir()
    (patches / "overlay/runner/runner.go").write_text("package runner\n")
    with pytest.raises(PatchConflict, match=r"runner/runner\.go exists upstream"):
        apply.check_tag(manifest.load(patches), cache, "v0.16.0")


class _Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def _die_at_write(
    monkeypatch: pytest.MonkeyPatch, fatal: int, how: BaseException | None = None
) -> None:
    """The `fatal`-th file move of the process does not happen any more, nor does any later one."""
    count = 0
    real = os.replace

    def replace(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count >= fatal:
            raise how or _Killed
        real(self, target)
        return Path(target)

    monkeypatch.setattr(tree.Path, "replace", replace)
