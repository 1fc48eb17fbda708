"""What the doctor says of a memory group's limit, and of another user's sidecar."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.config import GIB, MIB, MemoryLimit, SidecarConfig
from ollama_tiering.doctor import check_running, check_storage
from tests.places import short_directory
from tests.strangers import NOBODY, all_heard, listening_as

GROUP = Path("/sys/fs/cgroup/a/memory.max")


def settings(place: Path, ram_bytes: int) -> SidecarConfig:
    return SidecarConfig(place / "s", place / "ram", ram_bytes, place / "local", MIB)


@pytest.mark.parametrize(
    ("limit", "ram_bytes", "state"),
    [
        (MemoryLimit(500 * MIB, GROUP), GIB, "warn"),
        (MemoryLimit(4 * GIB, GROUP), MIB, "ok"),
        (MemoryLimit(64 * GIB), MIB, "ok"),
    ],
)
def test_the_limit_that_counts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: MemoryLimit, ram_bytes: int, state: str
) -> None:
    monkeypatch.setattr(check_storage, "memory_limit", lambda: limit)
    checks = check_storage.checks(settings(tmp_path, ram_bytes))
    (memory,) = [check for check in checks if check.name == "memory"]
    assert memory.state == state
    assert (str(GROUP) in memory.finding) == (limit.group is not None)
    if state == "warn":
        assert "the RAM tier gets 122.0 MiB" in memory.cure


def test_another_users_sidecar_is_named_and_not_asked() -> None:
    with short_directory() as place, listening_as(NOBODY, place / "s") as heard:
        first = next(iter(check_running.checks(settings(place, MIB))))
        assert first.state == "fail"
        assert f"a process of user {NOBODY} listens on {place}/s" in first.finding
        assert all_heard(place / "s", heard) == b""
