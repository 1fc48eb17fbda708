"""TierContract: what every tier promises, over all implementations that can run here."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering import store as store_package
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import OpenBlock, Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.remote import RemoteTier
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from tests.contract.toy_tier import ToyTier
from tests.places import tmpfs_directory
from tests.unit.store import support

NS = samples.namespace()
NAMESPACE = NS.digest()
BLOCKS = samples.sequence(NS, range(10))
Opener = Callable[[], Tier]


@pytest.fixture(params=["memory", "toy", "tmpfs directory", "disk directory", "remote"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the tier; called again, opens what the first one left, as after a kill."""
    if request.param in ("memory", "toy"):
        tier = ToyTier() if request.param == "toy" else MemoryTier(TierKind.LOCAL)
        yield lambda: tier
        return
    directory = tmp_path / "tier"
    if request.param == "tmpfs directory":
        with tmpfs_directory() as directory:
            yield lambda: FsTier(TierKind.LOCAL, directory, exclusive=False)
        return
    if request.param == "remote":
        # The one that opens it last takes all others' unfinished writes for old.
        yield lambda: remote_tier(directory, unfinished_seconds=-1.0)
        return
    yield lambda: FsTier(TierKind.LOCAL, directory, exclusive=False)


def remote_tier(directory: Path, **options: float) -> Tier:
    directory.mkdir(mode=0o700, exist_ok=True)
    return RemoteTier(directory, lambda: SharedFsTier(directory, **options), deadline_seconds=10.0)


@pytest.fixture
def tier(reopen: Opener) -> Iterator[Tier]:
    opened = reopen()
    yield opened
    opened.close()


def store(tier: Tier, index: int = 0) -> BlockKey:
    block = BLOCKS[index]
    temp = tier.create(NAMESPACE, block.key, len(block.data))
    temp.write_at(0, block.data)
    tier.publish(temp)
    return block.key


def whole(block: OpenBlock) -> bytes:
    return block.read_at(0, block.file_bytes)


def test_what_is_published_is_read_back(tier: Tier) -> None:
    key = store(tier)
    with tier.open(NAMESPACE, key) as block:
        assert block.file_bytes == len(BLOCKS[0].data)
        assert whole(block) == BLOCKS[0].data
    assert tier.exists(NAMESPACE, key)
    assert tier.exists(NAMESPACE, key, len(BLOCKS[0].data))
    assert not tier.exists(NAMESPACE, key, len(BLOCKS[0].data) + 1)


def test_physical_bytes_are_at_least_the_file(tier: Tier) -> None:
    block = BLOCKS[0]
    temp = tier.create(NAMESPACE, block.key, len(block.data))
    temp.write_at(0, block.data)
    assert tier.publish(temp) >= len(block.data)


def test_nothing_is_visible_before_publish(tier: Tier) -> None:
    block = BLOCKS[0]
    temp = tier.create(NAMESPACE, block.key, len(block.data))
    temp.write_at(0, block.data)
    assert not tier.exists(NAMESPACE, block.key)
    with pytest.raises(FileNotFoundError), tier.open(NAMESPACE, block.key):
        pass
    with temp.open() as opened:
        assert whole(opened) == block.data


def test_a_created_block_is_zeros_of_the_asked_size(tier: Tier) -> None:
    temp = tier.create(NAMESPACE, BLOCKS[0].key, 8192)
    with temp.open() as opened:
        assert whole(opened) == bytes(8192)


def test_discard_leaves_nothing(tier: Tier) -> None:
    temp = tier.create(NAMESPACE, BLOCKS[0].key, 8192)
    tier.discard(temp)
    assert list(tier.scan()) == []


def test_an_interrupted_write_is_gone_after_a_restart(reopen: Opener) -> None:
    tier = reopen()
    key = store(tier)
    temp = tier.create(NAMESPACE, BLOCKS[1].key, 8192)
    again = reopen()
    assert [stored.key for stored in again.scan()] == [key]
    assert temp.path is None or not temp.path.exists()


def test_a_scan_finds_what_was_published(reopen: Opener) -> None:
    tier = reopen()
    keys = {store(tier, index) for index in range(3)}
    found = list(reopen().scan())
    assert {stored.key for stored in found} == keys
    assert {stored.namespace for stored in found} == {NAMESPACE}
    assert all(stored.file_bytes == len(BLOCKS[0].data) for stored in found)
    assert all(stored.stored_bytes >= stored.file_bytes for stored in found)


def test_remove_is_idempotent(tier: Tier) -> None:
    key = store(tier)
    tier.remove(NAMESPACE, key)
    tier.remove(NAMESPACE, key)
    assert not tier.exists(NAMESPACE, key)


def test_an_open_block_survives_its_removal(tier: Tier) -> None:
    key = store(tier)
    with tier.open(NAMESPACE, key) as block:
        tier.remove(NAMESPACE, key)
        assert whole(block) == BLOCKS[0].data


def test_quarantine_hides_the_block_and_counts_its_bytes(tier: Tier) -> None:
    key = store(tier)
    tier.quarantine(NAMESPACE, key)
    assert not tier.exists(NAMESPACE, key)
    assert tier.quarantined_bytes() >= len(BLOCKS[0].data)
    assert list(tier.scan()) == []


def test_quarantine_of_what_is_not_there_says_so(tier: Tier) -> None:
    with pytest.raises(FileNotFoundError):
        tier.quarantine(NAMESPACE, BLOCKS[0].key)


def test_quarantine_outlives_a_restart_until_purged(reopen: Opener) -> None:
    tier = reopen()
    tier.quarantine(NAMESPACE, store(tier))
    again = reopen()
    assert list(again.scan()) == []
    assert again.quarantined_bytes() > 0
    again.purge_quarantine(keep_blocks=0)
    assert again.quarantined_bytes() == 0


def test_purge_keeps_the_newest(tier: Tier) -> None:
    for index in range(3):
        tier.quarantine(NAMESPACE, store(tier, index))
    tier.purge_quarantine(keep_blocks=1)
    assert tier.quarantined_bytes() == len(BLOCKS[2].data)


def test_reading_past_the_end_is_an_error(tier: Tier) -> None:
    key = store(tier)
    with tier.open(NAMESPACE, key) as block, pytest.raises(Exception) as caught:  # noqa: PT011
        block.read_at(block.file_bytes - 10, 20)
    assert not isinstance(caught.value, AssertionError)


def test_the_same_key_in_two_namespaces_is_two_blocks(tier: Tier) -> None:
    other = NamespaceId(bytes(32))
    key = store(tier)
    assert not tier.exists(other, key)
    tier.remove(other, key)
    assert tier.exists(NAMESPACE, key)


def test_describe_twice_is_fine_and_no_block(tier: Tier) -> None:
    tier.describe(NAMESPACE, NS.fields())
    tier.describe(NAMESPACE, NS.fields())
    assert list(tier.scan()) == []


def test_a_full_disk_is_enospc(monkeypatch: pytest.MonkeyPatch, tier: Tier) -> None:
    if hasattr(tier, "capacity_bytes"):  # of a tier without files
        tier.capacity_bytes = 4096
    else:

        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="space") as caught:
        tier.create(NAMESPACE, BLOCKS[0].key, 8192)
    assert caught.value.errno == errno.ENOSPC
    assert list(tier.scan()) == []


def test_directories_that_come_and_go_are_counted_right(tmp_path: Path) -> None:
    """Four writers make and remove the same directories all the time."""
    tier = FsTier(TierKind.LOCAL, tmp_path / "tier")
    list(tier.scan())
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(60):
                key = BlockKey(bytes([turn % 2, number]) + bytes(30))
                tier.publish(tier.create(NAMESPACE, key, 8192))
                tier.remove(NAMESPACE, key)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert list(tier.scan()) == []
    held = sum(p.lstat().st_blocks * 512 for p in [tier.directory, *tier.directory.rglob("*")])
    assert tier.overhead_bytes() == held
    tier.close()


def test_everything_but_blocks_is_overhead(tier: Tier) -> None:
    tier.describe(NAMESPACE, NS.fields())
    keys = [store(tier, index) for index in range(3)]
    tier.quarantine(NAMESPACE, keys[0])
    tier.measure_overhead()
    if tier.directory is None or tier.is_shared:  # of a shared tier the scan counts the rest
        assert tier.overhead_bytes() == tier.quarantined_bytes()
        return
    held = sum(p.lstat().st_blocks * 512 for p in [tier.directory, *tier.directory.rglob("*")])
    blocks = sum(p.lstat().st_blocks * 512 for p in tier.directory.rglob("*.kvb"))
    assert tier.overhead_bytes() == held - blocks


def test_a_whole_store_evicts_down_to_it_and_restores_from_it(reopen: Opener) -> None:
    top, tier = MemoryTier(TierKind.RAM), reopen()
    budget_bytes = 32 * (support.FILE_BYTES + 2 * support.DIRECTORY_BYTES)
    bench = support.Bench(tiers=[(top, 8 * support.FILE_BYTES), (tier, budget_bytes)])
    tokens = range(4 * support.BLOCK_TOKENS)
    try:
        bench.store.run_pending()  # files are counted before any is written
        blocks = bench.put(tokens)
        bench.store.run_pending()
        bench.put(range(1000, 1000 + 8 * support.BLOCK_TOKENS))
        bench.store.run_pending()
        keys = support.keys_of(blocks)
        assert not bench.in_tier(0) & keys
        assert bench.in_tier(1) >= keys
        assert bench.rows(tokens) == len(tokens)
        leased = bench.store.lease(support.NAMESPACE, [block.key for block in blocks])
        assert len(leased.blocks) == len(blocks)
        for block, there in zip(blocks, leased.blocks, strict=True):
            assert (there.tier is tier.kind) == tier.clients_open
            place = tier if tier.clients_open else top
            with place.open(support.NAMESPACE, block.key) as opened:
                assert whole(opened) == block.data
    finally:
        bench.store.close()


@pytest.mark.parametrize("package", ["books", "serving", "upkeep"])
def test_the_store_asks_what_a_tier_is_and_not_for_its_kind(package: str) -> None:
    files = list((Path(store_package.__file__ or "").parent / package).glob("*.py"))
    assert len(files) > 5
    asking = [file.name for file in files if re.search(r"TierKind\.[A-Z]", file.read_text())]
    assert asking == []
