"""Where a self-test has its files, and what goes that a killed one left."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from ollama_tiering.launch.self_test import place


def test_sockets_lie_where_their_names_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    chosen = place.short_place()
    assert chosen in (Path("/tmp"), Path("/dev/shm"))
    longest = f"{chosen}/kvt-12345678/store/run/s.engine"
    assert len(os.fsencode(longest)) <= 107


def test_what_a_killed_one_left_long_ago_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(name: str, part: str, *, hours: float) -> Path:
        folder = tmp_path / name
        (folder / part).mkdir(parents=True)
        os.utime(folder, (time.time() - hours * 3600,) * 2)
        return folder

    gone = [left("kvt-aaaaaaaa", "models", hours=7), left("kvt-bbbbbbbb", "tmpabcd_123", hours=7)]
    kept = [
        left("kvt-running1", "models", hours=1),
        left("kvt-notes", "mine", hours=7),
        left("other", "models", hours=7),
    ]
    (tmp_path / "kvt-file").touch()
    (tmp_path / "kvt-link").symlink_to(tmp_path / "other")
    place.sweep(tmp_path)
    assert [folder.exists() for folder in gone] == [False, False]
    assert all(folder.exists() for folder in kept)
    again = left("kvt-cccccccc", "models", hours=7)
    monkeypatch.setattr(os, "geteuid", lambda: 0xFFFF0000)  # another user's
    place.sweep(tmp_path)
    assert again.exists()


def test_the_sweep_is_made_where_the_test_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    monkeypatch.setattr(place, "short_place", lambda: tmp_path)
    monkeypatch.setattr(place, "sweep", swept.append)
    with place.own_folder() as folder:
        assert folder.parent == tmp_path
    assert swept == [tmp_path]
