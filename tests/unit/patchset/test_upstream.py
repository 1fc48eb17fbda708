from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ollama_tiering.errors import FetchError, MissingTool, UnsupportedUpstream
from ollama_tiering.patchset import upstream
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import FIRST_TAG, FakeTools, git, snapshot, write_pins


def remove_object(repo: Path, oid: str) -> None:
    path = repo / "objects" / oid[:2] / oid[2:]
    path.chmod(0o644)
    path.unlink()


@pytest.mark.parametrize("shape", ["clone", "dot-git", "bare", "worktree", "no-config", "file-url"])
def test_every_shape_of_a_local_clone_serves(
    upstream_repo: Path, tmp_path: Path, patchset: Patchset, report: Report, shape: str
) -> None:
    source = upstream_repo
    if shape == "dot-git":
        source = upstream_repo / ".git"
    elif shape == "bare":
        source = tmp_path / "bare.git"
        git("clone", "-q", "--bare", str(upstream_repo), str(source), cwd=tmp_path)
    elif shape == "worktree":
        source = tmp_path / "linked"
        git("worktree", "add", "-q", "--detach", str(source), "v0.16.0", cwd=upstream_repo)
    elif shape == "no-config":
        source = tmp_path / "bare-like"
        shutil.copytree(upstream_repo / ".git", source)
        (source / "config").unlink()
    name = f"file://{source}" if shape == "file-url" else str(source)
    cache = SourceCache()
    assert cache.fetch(["v0.16.0"], name, patchset, report) == ["v0.16.0"]
    shutil.rmtree(source)  # the cache stands by itself
    cache.extract("v0.16.0", tmp_path / "plain")
    found = {p: (tmp_path / "plain" / p).read_text() for p in FIRST_TAG}
    assert found == FIRST_TAG
    assert (tmp_path / "plain/runner/tool.sh").stat().st_mode & 0o111
    assert not (tmp_path / "plain/.git").exists()


def test_a_second_fetch_needs_no_source(
    cache: SourceCache, patchset: Patchset, report: Report
) -> None:
    assert cache.fetch(["v0.16.0"], "/nowhere/at/all", patchset, report) == []


def test_several_tags_share_a_cache_and_stay_sound(
    cache: SourceCache, upstream_repo: Path, patchset: Patchset, report: Report
) -> None:
    cache.fetch(["v0.16.1"], str(upstream_repo), patchset, report)
    assert cache.tags() == ["v0.16.0", "v0.16.1", "v0.17.0"]
    assert cache.commit("v0.17.0") == git("rev-parse", "v0.17.0^{commit}", cwd=upstream_repo)
    git("fsck", "--strict", cwd=cache.root)
    assert cache.read("v0.16.1", "docs/a.md") == b"more docs\n"
    assert cache.read("v0.16.1", "nowhere") is None
    assert cache.tree("v0.16.1", "nowhere") is None


def test_nothing_is_written_into_the_source(
    upstream_repo: Path, patchset: Patchset, report: Report
) -> None:
    before = snapshot(upstream_repo)
    SourceCache().fetch(["v0.16.0"], str(upstream_repo), patchset, report)
    assert snapshot(upstream_repo) == before


def test_an_unknown_tag_is_named_with_its_neighbours(
    upstream_repo: Path, patchset: Patchset, report: Report
) -> None:
    with pytest.raises(FetchError, match=r"has no tag v0\.16\.9") as caught:
        SourceCache().fetch(["v0.16.9"], str(upstream_repo), patchset, report)
    assert caught.value.exit_code == 3
    assert "v0.16.0" in str(caught.value.hint)


def test_a_clone_without_tags_says_what_to_run(
    upstream_repo: Path, tmp_path: Path, patchset: Patchset, report: Report
) -> None:
    source = tmp_path / "tagless"
    git("clone", "-q", "--no-tags", f"file://{upstream_repo}", str(source), cwd=tmp_path)
    with pytest.raises(FetchError) as caught:
        SourceCache().fetch(["v0.16.0"], str(source), patchset, report)
    assert "git fetch --tags" in str(caught.value.hint)


def test_no_network_is_a_fetch_error_with_a_cure(patchset: Patchset, report: Report) -> None:
    with pytest.raises(FetchError, match="cannot fetch from") as caught:
        SourceCache().fetch(["v0.16.0"], "http://127.0.0.1:9/ollama.git", patchset, report)
    assert "--source PATH" in str(caught.value.hint)
    assert SourceCache().tags() == []


@pytest.mark.parametrize("source", ["/nowhere/at/all", "relative-nowhere"])
def test_a_source_that_is_not_there(patchset: Patchset, report: Report, source: str) -> None:
    with pytest.raises(FetchError, match="no such directory"):
        SourceCache().fetch(["v0.16.0"], source, patchset, report)


def test_a_folder_that_is_no_clone(tmp_path: Path, patchset: Patchset, report: Report) -> None:
    with pytest.raises(FetchError, match="not a git clone"):
        SourceCache().fetch(["v0.16.0"], str(tmp_path), patchset, report)


def test_a_moved_tag_is_refused_and_forgotten(
    upstream_repo: Path, patchset: Patchset, report: Report
) -> None:
    git("tag", "-f", "-a", "-m", "moved", "v0.16.0", "v0.18.0", cwd=upstream_repo)
    with pytest.raises(UnsupportedUpstream, match=r"v0\.16\.0 .* has commit"):
        SourceCache().fetch(["v0.16.0"], str(upstream_repo), patchset, report)
    assert not SourceCache().has("v0.16.0")


def test_an_unpinned_tag_is_fetched_with_a_warning(
    upstream_repo: Path, patchset: Patchset, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    SourceCache().fetch(["v0.18.0"], str(upstream_repo), patchset, report)
    assert "v0.18.0 is not one of the pinned versions" in capsys.readouterr().err
    assert SourceCache().has("v0.18.0")


def test_a_version_with_llama_server_is_fetched_and_its_own_way_named(
    upstream_repo: Path, patchset: Patchset, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its source is not patched at all, and may be tested: no warning, and no --allow-untested."""
    git("tag", "v0.32.15", "v0.18.0", cwd=upstream_repo)
    SourceCache().fetch(["v0.32.15"], str(upstream_repo), patchset, Report())
    said = capsys.readouterr().err
    assert "tiering patch --ollama auto" in said
    assert "warning" not in said
    assert "untested" not in said


def test_a_partial_clone_serves_when_only_spare_files_are_absent(
    upstream_repo: Path, tmp_path: Path, patchset: Patchset, capsys: pytest.CaptureFixture[str]
) -> None:
    oid = git("rev-parse", "v0.16.0:integration/testdata/big.txt", cwd=upstream_repo)
    remove_object(upstream_repo / ".git", oid)
    cache = SourceCache()
    cache.fetch(["v0.16.0"], str(upstream_repo), patchset, Report())
    assert "without integration/testdata/big.txt (not needed" in capsys.readouterr().err
    cache.extract("v0.16.0", tmp_path / "plain")
    assert not (tmp_path / "plain/integration").exists()
    assert (tmp_path / "plain/kvcache/causal.go").exists()


def test_a_partial_clone_without_a_needed_file_is_refused(
    upstream_repo: Path, patchset: Patchset, report: Report
) -> None:
    oid = git("rev-parse", "v0.16.0:kvcache/causal.go", cwd=upstream_repo)
    remove_object(upstream_repo / ".git", oid)
    with pytest.raises(FetchError, match=r"partial clone: v0\.16\.0 lacks kvcache/causal\.go"):
        SourceCache().fetch(["v0.16.0"], str(upstream_repo), patchset, report)
    assert not SourceCache().has("v0.16.0")


def test_a_repaired_clone_can_be_fetched_again(
    upstream_repo: Path, tmp_path: Path, patchset: Patchset, report: Report
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(upstream_repo, whole)
    test_a_partial_clone_without_a_needed_file_is_refused(upstream_repo, patchset, report)
    assert SourceCache().fetch(["v0.16.0"], str(whole), patchset, report) == ["v0.16.0"]
    assert SourceCache().absent("v0.16.0") == []


def test_a_damaged_clone_is_told_apart(
    upstream_repo: Path, patchset: Patchset, report: Report
) -> None:
    remove_object(upstream_repo / ".git", git("rev-parse", "v0.16.0:kvcache", cwd=upstream_repo))
    with pytest.raises(FetchError, match="cannot read") as caught:
        SourceCache().fetch(["v0.16.0"], str(upstream_repo), patchset, report)
    assert "damaged" in str(caught.value.hint)


def test_variables_of_a_surrounding_git_do_not_leak_in(
    upstream_repo: Path, patchset: Patchset, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    cache = SourceCache()
    assert cache.fetch(["v0.16.0"], str(upstream_repo), patchset, report)


def test_line_endings_are_never_converted(
    upstream_repo: Path, tmp_path: Path, patches: Path, patchset: Patchset, report: Report
) -> None:
    git("config", "--file", str(Path.home() / ".gitconfig"), "core.autocrlf", "true", cwd=tmp_path)
    (upstream_repo / "kvcache/crlf.txt").write_bytes(b"a\r\nb\n")
    git("-c", "core.autocrlf=false", "add", "-A", cwd=upstream_repo)
    git("commit", "-qm", "x", cwd=upstream_repo)
    git("tag", "v0.19.0", cwd=upstream_repo)
    write_pins(patches, upstream_repo, ["v0.19.0"])
    cache = SourceCache()
    cache.fetch(["v0.19.0"], str(upstream_repo), patchset, report)
    cache.extract("v0.19.0", tmp_path / "plain")
    assert (tmp_path / "plain/kvcache/crlf.txt").read_bytes() == b"a\r\nb\n"
    assert (tmp_path / "plain/main.go").read_bytes() == FIRST_TAG["main.go"].encode()


def test_extraction_is_all_or_nothing(cache: SourceCache, tmp_path: Path) -> None:
    shutil.rmtree(cache.root / "objects")
    (cache.root / "objects").mkdir()
    with pytest.raises(FetchError, match=r"cannot extract v0\.16\.0"):
        cache.extract("v0.16.0", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_no_git_is_a_missing_tool(fake_tools: FakeTools) -> None:
    fake_tools.remove("git")
    with pytest.raises(MissingTool, match="git: not found"):
        upstream.import_git()


@pytest.mark.parametrize(
    ("given", "tag"), [("0.16.3", "v0.16.3"), ("v0.16.3", "v0.16.3"), ("main", "main")]
)
def test_tags_are_written_with_or_without_v(given: str, tag: str) -> None:
    assert upstream.normal_tag(given) == tag


@pytest.mark.parametrize(
    ("path", "spare"),
    [
        ("docs/a.md", True),
        ("integration/testdata/x", True),
        ("tokenizer/testdata/gemma2/tokenizer.model", True),
        ("kvcache/causal.go", False),
        ("llama/docs/x.c", False),
    ],
)
def test_what_a_build_can_do_without(path: str, spare: bool) -> None:
    assert upstream.is_spare(path) is spare
