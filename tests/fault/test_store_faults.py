"""Weather and damage below the store: a miss and a counter, never lost data, never wrong bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.upkeep import unusable
from ollama_tiering.store.upkeep.index import BlockIndex
from tests.fault.planted import plant_device
from tests.places import tmpfs_directory
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, Bench, keys_of, path_of
from tests.vectors import make

pytestmark = pytest.mark.fault

NO_BLOCKS = 8 << 10  # the namespace's description
SMALL_FILES = 16 << 10  # the count of today's writes


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On tmpfs, where directories take no blocks: budgets can be counted in whole blocks."""
    with tmpfs_directory() as directory:
        yield directory


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(tiers=directories(tmp_path), index_path=tmp_path / "index.sqlite")
    yield opened
    opened.store.close()


def directories(root: Path, ram: int = 8, local: int = 16) -> list[tuple[Tier, int]]:
    return [
        (FsTier(TierKind.RAM, root / "ram", exclusive=False), ram * FILE_BYTES + NO_BLOCKS),
        (
            FsTier(TierKind.LOCAL, root / "local", exclusive=False),
            local * FILE_BYTES + NO_BLOCKS + SMALL_FILES,
        ),
    ]


def crash(bench: Bench) -> None:
    """Forgets the store without closing it; the files stay."""
    root = bench.tiers[0][0].directory
    assert root is not None
    bench.tiers = directories(root.parent)
    bench.open()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 16
    path.chmod(0o600)
    path.write_bytes(content)


def failing(error: int, when: Callable[..., bool] = lambda *args: True) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise OSError(error, os.strerror(error))
        return None

    return call


# --- disks that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_read_error_on_write_down_deletes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    blocks = bench.put(range(8))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", failing(error))
        bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks)
    assert all(path_of(bench.tiers[0][0], block.key).exists() for block in blocks)
    failures = bench.store.report().tiers[0].stats.failures
    assert failures == {errno.errorcode[error]: 2}  # both were tried at once
    assert bench.state.levels[0].suspended_until == bench.now + 1  # which makes it no worse
    bench.tick(120)
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)


@pytest.mark.parametrize("call", ["fsync", "pwrite", "rename", "posix_fallocate"])
def test_a_write_error_below_leaves_the_block_in_ram(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (block,) = bench.put([1, 2, 3])
    bench.tiers[1][0].in_memory = False  # fsync even where the test runs on tmpfs
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(errno.EIO))
        bench.store.run_pending()
    assert bench.store.report().tiers[1].suspended
    assert bench.store.report().tiers[1].reserved_bytes == 0
    assert bench.in_tier(1) == set()
    assert bench.rows([1, 2, 3]) == 3
    local = bench.tiers[1][0].directory
    assert local is not None
    assert not [*local.rglob("*.tmp")]
    bench.tick(120)
    bench.store.run_pending()
    assert bench.in_tier(1) == {block.key}


def test_while_the_lower_tier_fails_ram_goes_on_as_the_last(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(range(4 * 8))
    monkeypatch.setattr(bench.tiers[1][0], "create", failing(errno.EIO))
    bench.store.run_pending()
    newer = bench.put([100])
    assert keys_of(newer) <= bench.in_tier(0)
    assert bench.store.report().tiers[0].stats.evicted_blocks == 1


def test_a_commit_that_cannot_be_made_durable_is_not_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = samples.sequence(NS, [1, 2])
    (reserved,) = bench.reserve([block])
    bench.fill(reserved, block.data)
    with monkeypatch.context() as broken:
        broken.setattr(os, "rename", failing(errno.EIO))
        (result,) = bench.session.commit([reserved.reservation_id])
    assert not result.stored
    assert bench.rows([1, 2]) == 0
    assert bench.store.report().tiers[0].reserved_bytes == 0
    bench.tick(120)
    bench.put([1, 2])


def test_a_short_read_is_weather_and_no_damage(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = bench.put([1, 2, 3])
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", lambda fd, length, offset: b"")
        assert not bench.store.report_corrupt(NAMESPACE, block.key)
    assert path_of(bench.tiers[0][0], block.key).exists()
    assert bench.store.report().tiers[0].stats.quarantined_blocks == 0


def test_reads_in_pieces_are_put_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put([1, 2, 3])
    whole = os.pread
    with monkeypatch.context() as slow:
        slow.setattr(os, "pread", lambda fd, n, at: whole(fd, min(n, 1000), at))
        bench.store.run_pending()
    assert len(bench.in_tier(1)) == 1


def test_an_unlink_that_fails_keeps_the_bytes_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = bench.put([1, 2, 3])
    used = bench.store.report().tiers[0].used_bytes
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", failing(errno.EIO))
        bench.store.remove_seq(NAMESPACE, [block.key])
    assert bench.rows([1, 2, 3]) == 0
    assert bench.store.report().tiers[0].used_bytes == used


def test_a_directory_removed_while_running_is_a_miss(bench: Bench) -> None:
    blocks = bench.put(range(8))
    bench.store.run_pending()
    for tier, _ in bench.tiers:
        assert tier.directory is not None
        shutil.rmtree(tier.directory)
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert leased.blocks == []
    assert bench.rows(range(8)) == 0
    results = bench.try_put(samples.sequence(NS, [5]))
    assert not any(result.stored for result in results)


# --- a full disk --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 3 blocks and a bit, whatever the budget says."""
    directory = tmp_path / "small"
    directory.mkdir(mode=0o700)
    options = f"size={4 * FILE_BYTES},mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root and the right to mount")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_disk_evicts_retries_and_refuses(small_disk: Path) -> None:
    tier: Tier = FsTier(TierKind.LOCAL, small_disk, exclusive=False)
    bench = Bench(tiers=[(tier, 1000 * FILE_BYTES)])
    for token in range(12):
        bench.put([token])  # evicts within a budget that is far from used up
    assert 1 <= len(bench.in_tier(0)) <= 4
    lease = bench.lease(samples.sequence(NS, [11]))
    offers = [samples.sequence(NS, [token])[0] for token in range(100, 108)]
    outcomes = [reserved.outcome for reserved in bench.reserve(offers)]
    assert outcomes[0] is Outcome.RESERVED
    assert outcomes[-1] is Outcome.NO_ROOM
    bench.store.release(lease)
    assert bench.store.report().tiers[0].stats.failures == {"ENOSPC": 1}
    bench.store.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_space_is_asked_twice_and_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    old = bench.put([1])
    bench.store.run_pending()
    asked = []

    def full(fd: int, offset: int, length: int) -> None:
        asked.append(length)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", full)
    (reserved,) = bench.reserve(samples.sequence(NS, [2]))
    assert reserved.outcome is Outcome.NO_ROOM
    assert len(asked) == 4  # twice in each tier
    assert keys_of(old).isdisjoint(bench.in_tier(0) | bench.in_tier(1))
    name = errno.errorcode[error]
    assert [tier.stats.failures for tier in bench.store.report().tiers] == [{name: 1}, {name: 1}]
    assert all(tier.reserved_bytes == 0 for tier in bench.store.report().tiers)


def test_a_full_disk_below_keeps_what_is_in_ram(small_disk: Path, tmp_path: Path) -> None:
    tiers: list[tuple[Tier, int]] = [
        (FsTier(TierKind.RAM, tmp_path / "ram", exclusive=False), 100 * FILE_BYTES),
        (FsTier(TierKind.LOCAL, small_disk, exclusive=False), 100 * FILE_BYTES),
    ]
    bench = Bench(tiers=tiers)
    bench.put(range(4 * 8))
    for _ in range(20):
        bench.store.run_pending()
        bench.tick(120)
    assert len(bench.in_tier(0)) == 8
    assert bench.rows(range(4 * 8)) == 32
    bench.store.close()


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 9, 14, 30, 40, 100])
def test_a_damaged_header_is_found_at_the_next_start(bench: Bench, offset: int) -> None:
    blocks = bench.put(range(8))
    path = path_of(bench.tiers[0][0], blocks[1].key)
    flip(path, offset)
    crash(bench)
    assert bench.rows(range(8)) == 4
    assert not path.exists()
    assert path.with_name(path.name + ".bad").exists()
    assert bench.store.report().counters.misses["corrupt"] == 1


def test_a_truncated_file_is_quarantined_at_the_next_start(bench: Bench) -> None:
    (block,) = bench.put([1, 2])
    bench.store.flush_index()
    path = path_of(bench.tiers[0][0], block.key)
    path.chmod(0o600)
    os.truncate(path, FILE_BYTES - 4096)
    crash(bench)
    assert bench.rows([1, 2]) == 0
    assert path.with_name(path.name + ".bad").exists()


def test_a_file_of_another_version_is_kept_and_counted(bench: Bench) -> None:
    (block,) = bench.put([1, 2])
    path = path_of(bench.tiers[0][0], block.key)
    path.chmod(0o600)
    path.write_bytes(make.blocks()["unknown-version"])
    crash(bench)
    assert bench.rows([1, 2]) == 0
    assert path.exists()
    files = [file for file in (bench.tiers[0][0].directory or path).rglob("*") if file.is_file()]
    assert path in files
    assert bench.store.report().tiers[0].used_bytes == sum(
        file.stat().st_blocks * 512 for file in files
    )


def test_a_block_in_anothers_place_is_quarantined(bench: Bench) -> None:
    one, two = bench.put(range(8))
    path = path_of(bench.tiers[0][0], one.key)
    path.chmod(0o600)
    path.write_bytes(two.data)
    crash(bench)
    assert bench.rows(range(8)) == 0


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "socket", "device"])
def test_something_planted_in_a_blocks_place_is_not_opened(
    bench: Bench, tmp_path: Path, kind: str
) -> None:
    blocks = bench.put(range(8))
    path = path_of(bench.tiers[0][0], blocks[0].key)
    secret = tmp_path / "secret"
    secret.write_bytes(blocks[0].data)
    path.unlink()
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(path)  # opened without care, a read would wait for ever
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        plant_device(path)
    else:
        with socket.socket(socket.AF_UNIX) as planted, contextlib.chdir(path.parent):
            planted.bind(path.name)
    with pytest.raises(OSError), bench.tiers[0][0].open(NAMESPACE, blocks[0].key):  # noqa: PT011
        pass  # also where nobody looked at what it is before
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert leased.blocks == []
    assert not bench.store.report_corrupt(NAMESPACE, blocks[0].key)
    crash(bench)
    assert bench.rows(range(8)) == 0
    assert secret.read_bytes() == blocks[0].data


def test_a_link_planted_as_a_shard_is_not_followed(bench: Bench, tmp_path: Path) -> None:
    (block,) = samples.sequence(NS, [1])
    shard = path_of(bench.tiers[0][0], block.key).parent
    shard.parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    shard.symlink_to(tmp_path / "elsewhere")
    shard_below = path_of(bench.tiers[1][0], block.key).parent
    shard_below.parent.mkdir(mode=0o700, exist_ok=True)
    shard_below.symlink_to(tmp_path / "elsewhere")
    (reserved,) = bench.reserve([block])
    assert reserved.outcome is Outcome.NO_ROOM
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_foreign_files_in_a_tier_are_left_alone(bench: Bench) -> None:
    (block,) = bench.put([1, 2])
    path = path_of(bench.tiers[0][0], block.key)
    foreign = [path.with_name("notes.txt"), path.parent.parent / "README", path.with_suffix(".x")]
    for file in foreign:
        file.write_text("mine")
    crash(bench)
    assert bench.rows([1, 2]) == 2
    assert all(file.read_text() == "mine" for file in foreign)


def test_only_the_newest_damaged_blocks_are_kept(tmp_path: Path) -> None:
    bench = Bench(tiers=directories(tmp_path, ram=100))
    level = bench.state.levels[0]
    for token in range(20):
        (block,) = bench.put([token])
        unusable.quarantine(bench.state, level, NAMESPACE, block.key)
    assert len([*tmp_path.rglob("*.bad")]) == 16
    assert bench.store.report().tiers[0].stats.quarantined_blocks == 20


# --- the index ----------------------------------------------------------------------------------


def ruin_with_garbage(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + os.urandom(20_000))


def ruin_with_zeros(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)


def ruin_by_removal(path: Path) -> None:
    path.unlink()


def ruin_by_version(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def ruin_by_text(path: Path) -> None:
    path.write_text("not a database")


def ruin_by_table(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE blocks")


def ruin_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "ruin",
    [
        ruin_with_garbage,
        ruin_with_zeros,
        ruin_by_removal,
        ruin_by_version,
        ruin_by_text,
        ruin_by_table,
        ruin_by_directory,
    ],
)
def test_a_ruined_index_is_rebuilt_from_the_files(
    bench: Bench, ruin: Callable[[Path], None]
) -> None:
    blocks = bench.put(range(10))
    bench.store.run_pending()
    bench.store.close()
    assert bench.index_path is not None
    ruin(bench.index_path)
    crash(bench)
    assert bench.rows(range(10)) == 10
    assert bench.in_tier(0) == bench.in_tier(1) == keys_of(blocks)
    bench.store.flush_index()
    if bench.index_path.is_file():
        again = BlockIndex(bench.index_path)
        assert {row.key for row in again.load()} == keys_of(blocks)
        again.close()


def test_rows_without_files_and_files_without_rows(bench: Bench) -> None:
    one = bench.put([1, 2])
    bench.store.flush_index()
    path_of(bench.tiers[0][0], one[0].key).unlink()
    two = bench.put([3, 4])
    crash(bench)
    assert bench.rows([1, 2]) == 0
    assert bench.rows([3, 4]) == 2
    bench.store.flush_index()
    assert bench.index_path is not None
    index = BlockIndex(bench.index_path)
    assert {row.key for row in index.load()} == keys_of(two)
    index.close()


def test_an_index_damaged_while_running_is_written_again(bench: Bench) -> None:
    blocks = bench.put(range(8))
    bench.store.flush_index()
    index = bench.store._keeper._index
    assert index is not None
    index._start_over(sqlite3.DatabaseError("database disk image is malformed"))
    index._connection.execute("DELETE FROM blocks")
    index._connection.commit()
    index.rebuilt = True
    bench.store.flush_index()
    assert {row.key for row in index.load()} == keys_of(blocks)
