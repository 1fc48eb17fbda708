"""Blocks of a disk are read without staying in the page cache; a short file is told apart."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.system import pagecache
from tests.places import tmpfs_directory

DATA = os.urandom(64 << 10)
NS = samples.namespace()


@pytest.fixture(params=["disk", "tmpfs"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    with tmpfs_directory() as made:
        yield made


def test_what_is_there_is_read(directory: Path) -> None:
    path = directory / "block"
    path.write_bytes(DATA)
    assert bytes(pagecache.read_past(str(path), len(DATA), os.O_RDONLY)) == DATA


def test_a_short_file_is_no_silent_zeros(directory: Path) -> None:
    path = directory / "block"
    path.write_bytes(DATA)
    with pytest.raises(EOFError):
        pagecache.read_past(str(path), len(DATA) + 4096, os.O_RDONLY)


def test_a_file_system_without_direct_reads_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "block"
    path.write_bytes(DATA)
    preadv = os.preadv
    refused = []

    def without_direct(fd: int, buffers: Any, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", without_direct)
    assert bytes(pagecache.read_past(str(path), len(DATA), os.O_RDONLY)) == DATA
    assert len(refused) == 1


def test_another_error_passes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pagecache.read_past(str(tmp_path / "none"), 4096, os.O_RDONLY)


def test_a_block_read_through_a_disk_tier_is_not_left_in_the_page_cache(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path, exclusive=False)
    if tier.in_memory:
        pytest.skip("the temporary directory is on tmpfs")
    (block,) = samples.sequence(NS, [1, 2, 3, 4])
    temp = tier.create(NS.digest(), block.key, len(block.data))
    temp.write_at(0, block.data)
    tier.publish(temp)
    for _ in range(5):  # the kernel keeps a page that another processor has just taken in hand
        with tier.open(NS.digest(), block.key) as opened:
            assert opened.read_at(0, opened.file_bytes) == block.data
        with tier.open(NS.digest(), block.key) as opened:
            left = opened.resident()
        if left is False:
            break
        time.sleep(0.1)
    assert left is False
