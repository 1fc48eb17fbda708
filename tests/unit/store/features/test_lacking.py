"""Disks whose file system cannot do all: what it lacks costs only what depends on it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.config import MIB
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import PROBE_PREFIX
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from ollama_tiering.system import lacking
from ollama_tiering.system.abilities import lacks
from ollama_tiering.system.directories import NotPrivate, UnusableDirectory
from tests.contract.lacking import LackingFileSystem
from tests.unit.store.from_settings import config, kinds, opened
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, Bench, disk_budget

COUNT = 60
TOKENS = range(COUNT * BLOCK_TOKENS)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LackingFileSystem:
    root = tmp_path / "disk"
    root.mkdir(mode=0o700)
    return LackingFileSystem(root, monkeypatch)


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.store.close(drain_seconds=0)


USABLE = (
    "chmod",
    "directory_sync",
    "sync",
    "allocation",
    "link",
    "direct",
    "chmod directory_sync allocation link direct",
)


@pytest.mark.parametrize("what", USABLE)
def test_every_block_reaches_such_a_disk_and_comes_back_from_it(
    tmp_path: Path,
    place: LackingFileSystem,
    benches: list[Bench],
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    place.lack(*what.split())
    tiers: list[tuple[Tier, int]] = [
        (FsTier(TierKind.RAM, tmp_path / "ram"), disk_budget(2 * COUNT)),
        (FsTier(TierKind.LOCAL, place.root / "local"), disk_budget(2 * COUNT)),
    ]
    said = [r.message for r in caplog.records if "lacks=" in r.message]
    assert len(said) == (what not in ("link", "direct"))
    benches.append(bench := Bench(tiers=tiers))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ollama_tiering"):
        made = bench.put(TOKENS)
        bench.store.pins.pin(made[-1].key)
        bench.store.run_pending()
        bench.store.close()
    assert caplog.records == []
    local = FsTier(TierKind.LOCAL, place.root / "local")
    benches.append(again := Bench(tiers=[(local, disk_budget(2 * COUNT))]))
    assert len(again.in_tier(0)) == COUNT
    leased = again.store.lease(NAMESPACE, [block.key for block in made]).blocks
    assert len(leased) == COUNT
    assert all(
        again.store.read_part(block, 0, block.file_bytes) == one.data
        for block, one in zip(leased, made, strict=True)
    )
    assert list(place.root.rglob(f"{PROBE_PREFIX}*")) == []


@pytest.mark.parametrize("what", ["chmod_and_no_modes", "modes", "writable", "owner"])
def test_a_disk_that_keeps_nothing_private_is_refused_in_a_line(
    place: LackingFileSystem, what: str
) -> None:
    place.lack(what)
    with pytest.raises(UnusableDirectory) as refused:
        FsTier(TierKind.LOCAL, place.root / "local")
    assert str(place.root / "local") in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.hint
    assert "another" in refused.value.hint


def test_the_others_serve_where_a_disk_is_refused(
    tmp_path: Path, place: LackingFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    place.lack("modes")
    settings = config(tmp_path, local_dir=place.root / "local")
    assert kinds(settings) == [TierKind.RAM, TierKind.LOCAL]
    (said,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert "keeps no owners and modes" in said
    store = opened(settings)
    try:
        ram, local = store.report().tiers
        assert (ram.state, local.suspended) == ("ok", True)
        assert local.state.startswith("left out: ")
        assert str(place.root / "local") in local.state
        assert [level.tier.kind for level in store.state.levels] == [TierKind.RAM]
    finally:
        store.close()


def test_what_cannot_be_locked_is_refused(place: LackingFileSystem) -> None:
    place.lack("lock")
    with pytest.raises(UnusableDirectory, match="cannot be locked") as refused:
        FsTier(TierKind.LOCAL, place.root / "local")
    assert str(place.root / "local") in refused.value.message


@pytest.mark.parametrize("what", ["chmod", "directory_sync", "allocation"])
def test_a_shared_directory_is_used_too(place: LackingFileSystem, what: str) -> None:
    place.lack(what)
    (place.root / "shared").mkdir(mode=0o700)
    tier = SharedFsTier(place.root / "shared")
    bench = Bench(ram=COUNT)
    made = bench.put(range(4 * BLOCK_TOKENS))
    for block in made:
        temp = tier.create(NAMESPACE, block.key, len(block.data))
        temp.write_at(0, block.data)
        tier.publish(temp)
    assert all(tier.exists(NAMESPACE, block.key) for block in made)
    assert len(list(tier.scan())) == 4
    tier.close()


def test_a_shared_directory_that_keeps_nothing_private_is_refused(
    place: LackingFileSystem,
) -> None:
    (place.root / "shared").mkdir(mode=0o700)
    place.lack("modes")
    with pytest.raises(NotPrivate):
        SharedFsTier(place.root / "shared")


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_weather_is_not_taken_for_what_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def failing(*args: object) -> None:
        raise OSError(error, os.strerror(error))

    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for name, call in (
            ("fsync", lambda: lacking.sync(fd)),
            ("fchmod", lambda: lacking.make_read_only(fd)),
            ("posix_fallocate", lambda: lacking.allocate(fd, 10)),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, failing)
                with pytest.raises(OSError, match=os.strerror(error)):
                    call()
                assert lacks(tmp_path) == []
    finally:
        os.close(fd)


def test_a_file_that_others_may_read_is_never_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that changed its mind since it was tried."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o644)

    def failing(*args: object) -> None:
        raise OSError(errno.EPERM, "made to fail")

    monkeypatch.setattr(os, "fchmod", failing)
    try:
        with pytest.raises(PermissionError):
            lacking.make_read_only(fd)
    finally:
        os.close(fd)


def test_space_that_cannot_be_allocated_is_written(
    place: LackingFileSystem,
) -> None:
    place.lack("allocation")
    path = place.root / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lacking.allocate(fd, 3 * MIB + 5)
    finally:
        os.close(fd)
    assert path.stat().st_size == 3 * MIB + 5
    assert path.stat().st_blocks * 512 >= 3 * MIB
