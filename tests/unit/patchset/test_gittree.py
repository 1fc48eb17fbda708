from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.patchset import gittree
from tests.unit.patchset.conftest import git


def test_names_equal_those_of_git(upstream_repo: Path) -> None:
    (upstream_repo / "kvcache/link").symlink_to("cache.go")
    (upstream_repo / "kvcache/sub.go").write_text("sorts between sub/ and sub0\n")
    (upstream_repo / "kvcache/empty").mkdir()
    git("add", "-A", cwd=upstream_repo)
    git("commit", "-qm", "x", cwd=upstream_repo)
    for folder in ("kvcache", "runner", "kvcache/sub"):
        wanted = git("rev-parse", f"HEAD:{folder}", cwd=upstream_repo)
        assert gittree.folder_oid(upstream_repo, folder) == wanted


def test_excluded_and_replaced_files(upstream_repo: Path, tmp_path: Path) -> None:
    wanted = gittree.folder_oid(upstream_repo, "kvcache")
    original = tmp_path / "original"
    original.write_bytes((upstream_repo / "kvcache/cache.go").read_bytes())
    (upstream_repo / "kvcache/cache.go").write_text("changed\n")
    (upstream_repo / "kvcache/ours.go").write_text("ours\n")
    assert gittree.folder_oid(upstream_repo, "kvcache") != wanted
    found = gittree.folder_oid(
        upstream_repo,
        "kvcache",
        without=frozenset({"kvcache/ours.go"}),
        instead={"kvcache/cache.go": original},
    )
    assert found == wanted


@pytest.mark.parametrize("folder", ["nowhere", "main.go"])
def test_no_folder_has_no_name(upstream_repo: Path, folder: str) -> None:
    assert gittree.folder_oid(upstream_repo, folder) is None
