"""Which commit is named: the checkout's, or the one that was installed from a git URL."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ollama_tiering.patchset import own_commit

ID = "0123456789abcdef0123456789abcdef01234567"


def installed(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    """As a package with this direct_url.json, in no checkout of ours."""
    package = SimpleNamespace(read_text=lambda name: {"direct_url.json": told}[name])
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: package)


def test_a_checkout_names_its_own_and_whether_it_was_changed(tmp_path: Path) -> None:
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/series").write_text("one\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *named, *words], cwd=tmp_path, check=True)
    found = own_commit.commit_of(tmp_path)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True
    )
    assert found
    assert head.stdout.startswith(found)
    (tmp_path / "patches/series").write_text("two\n")
    assert own_commit.commit_of(tmp_path) == f"{found} with changes"
    assert own_commit.commit_of(tmp_path, "patches") == found


def test_a_package_in_somebodys_checkout_does_not_name_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(own_commit, "CHECKOUT", tmp_path)
    installed(monkeypatch, None)
    assert own_commit.commit() == ""


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (f'{{"url": "https://a/b", "vcs_info": {{"vcs": "git", "commit_id": "{ID}"}}}}', ID[:8]),
        ('{"url": "file:///a", "dir_info": {}}', ""),
        ("[]", ""),
        ("broken", ""),
        (None, ""),
    ],
)
def test_a_package_names_what_it_was_installed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, named: str
) -> None:
    monkeypatch.setattr(own_commit, "CHECKOUT", tmp_path)
    installed(monkeypatch, told)
    assert own_commit.commit() == named
