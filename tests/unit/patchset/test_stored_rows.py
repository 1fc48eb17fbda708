"""Files that store and restore are changed with a look at what they have stored before."""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.patchset import manifest, stored_rows

PATCHES = Path(__file__).parents[3] / "patches"


def test_whoever_changes_them_has_said_whether_rows_stored_before_are_right() -> None:
    patchset = manifest.load(PATCHES)
    found = stored_rows.digest(patchset.compiled)
    assert found == stored_rows.RECORDED, (
        "files that store and restore have changed. If wrong rows may have been stored by them as "
        "they were, or under a wrong name, or if other bytes are stored of a row now, add one to "
        f"NUMBER in ollama_tiering/patchset/stored_rows.py; then set RECORDED to {found!r}"
    )
    assert patchset.storing == (stored_rows.NUMBER, "")


def test_there_are_such_files_and_none_that_names_rows_is_among_them() -> None:
    overlay = manifest.load(PATCHES).overlay
    for prefix in stored_rows.FILES:
        assert any(name.startswith(prefix) for name in overlay), prefix
    for name in ("key", "variables", "libraries", "threads", "computing", "identity", "config"):
        assert f"kvtier/{name}.go" in overlay
        assert not f"kvtier/{name}.go".startswith(stored_rows.FILES)
    for folder in (
        "kvtier/rows/",
        "runner/",
        "kvcache/",
        "ml/",
        "llama/",
        "exactattn/",
        "kvpaged/",
    ):
        assert not any(n.startswith(stored_rows.FILES) for n in overlay if n.startswith(folder))
