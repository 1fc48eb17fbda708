"""Blocks on a shared tier that nobody with the key wrote: never read by a client, never removed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.errors import NotAuthentic
from ollama_tiering.store.tiers.authenticity import (
    TRAILER_BYTES,
    AuthenticBlock,
    Authenticity,
    content_bytes,
)
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTier
from ollama_tiering.store.tools.frozen import FrozenRemote
from tests.contract.faulty import Faults, remote_tier
from tests.unit.store.forgeries import (
    FORGERIES,
    OTHER_KEY,
    forge_with_key_id,
    forged,
    overwrite,
    path_of,
)
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, Bench, keys_of

KEY = bytes(range(32))
TOKENS = range(8)


class MacBench(Bench):
    """RAM above a remote tier whose files carry a MAC of `key`, or none with None."""

    def __init__(self, directory: Path, key: bytes | None = KEY, **options: Any) -> None:
        tier = remote_tier(directory, Faults(), authenticity=Authenticity(key))
        ram = MemoryTier(TierKind.RAM)
        super().__init__(tiers=[(ram, 16 * FILE_BYTES), (tier, 64 << 20)], **options)

    def look(self) -> None:
        mover = self.store._remote
        assert mover is not None
        mover._rescan.run()

    def forget_above(self) -> None:
        for key in list(self.state.levels[0].lru):
            self.state.forget_copy(self.state.levels[0], key)
        ram = self.tiers[0][0]
        assert isinstance(ram, MemoryTier)
        ram.blocks.clear()

    def served(self, blocks: list[samples.SampleBlock]) -> list[bytes]:
        """What a client reads of them."""
        leased = self.store.lease(NAMESPACE, [block.key for block in blocks])
        parts = [self.store.read_part(b, 0, b.file_bytes) for b in leased.blocks]
        self.store.release(leased.lease_id)
        return parts

    def misses(self) -> dict[str, int]:
        return self.store.report().counters.misses


@pytest.fixture
def opened() -> Iterator[Callable[..., MacBench]]:
    benches: list[MacBench] = []

    def make(*args: Any, **options: Any) -> MacBench:
        benches.append(MacBench(*args, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.store.close(drain_seconds=0)


Opened = Callable[..., MacBench]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def stored(opened: Opened, directory: Path) -> list[samples.SampleBlock]:
    """Two blocks in the directory, each with its MAC, and a sidecar gone."""
    bench = opened(directory)
    blocks = bench.put(TOKENS)
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)
    return blocks


def test_a_file_carries_a_mac_and_is_given_out_without_it(
    opened: Opened, directory: Path, stored: list[samples.SampleBlock]
) -> None:
    for block in stored:
        content = path_of(directory, block).read_bytes()
        assert content[:-TRAILER_BYTES] == block.data
        assert content[-TRAILER_BYTES:] == Authenticity(KEY).trailer(block.data)
    bench = opened(directory)
    bench.look()
    assert bench.served(stored) == [block.data for block in stored]
    assert bench.misses() == {}


def test_what_is_encoded_there_carries_one_too(opened: Opened, directory: Path) -> None:
    encodings = {TierKind.REMOTE: Encoding.ZSTD}
    wide = samples.namespace("wide", kv_heads=4, head_dim=256)
    blocks = samples.sequence(wide, list(TOKENS))
    one = opened(directory, encodings=TierEncodings(encodings))
    with one.store.open_session(wide.digest(), wide.fields(), 4) as session:
        for block in blocks:
            result = session.put_inline(block.key, block.data, last=True)
            assert result is not None
            assert result.stored
    one.store.run_pending()
    assert all(path_of(directory, b).stat().st_size < len(b.data) for b in blocks)
    two = opened(directory)
    two.look()
    leased = two.store.lease(wide.digest(), [block.key for block in blocks])
    parts = [two.store.read_part(b, 0, b.file_bytes) for b in leased.blocks]
    assert parts == [block.data for block in blocks]


@pytest.mark.parametrize("forge", FORGERIES)
@pytest.mark.parametrize("known", [False, True], ids=["adopted", "known before"])
def test_a_forged_block_is_a_miss_said_once_and_kept(
    opened: Opened,
    directory: Path,
    stored: list[samples.SampleBlock],
    caplog: pytest.LogCaptureFixture,
    forge: Callable[[Path, samples.SampleBlock], bytes],
    known: bool,
) -> None:
    bench = opened(directory)
    if known:
        bench.look()
    path = path_of(directory, stored[1])
    content = forge(path, stored[1])
    overwrite(path, content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            bench.look()
            bench.forget_above()
            assert bench.served(stored) == [stored[0].data]
    assert bench.misses()["not authentic"] == 1
    (line,) = [r.getMessage() for r in caplog.records if "not authentic" in r.getMessage()]
    assert "same key" in line  # the cure
    assert path.read_bytes() == content
    assert not list(directory.rglob("*.bad"))
    assert bench.state.levels[1].kept_bytes >= len(content)  # it takes room


def test_a_block_stored_anew_takes_the_place_of_a_forged_one(
    opened: Opened, directory: Path, stored: list[samples.SampleBlock]
) -> None:
    path = path_of(directory, stored[1])
    overwrite(path, forge_with_key_id(path, stored[1]))
    bench = opened(directory)
    bench.look()
    assert len(bench.served(stored)) == 1
    bench.put(TOKENS)
    bench.store.run_pending()
    bench.forget_above()
    assert bench.served(stored) == [block.data for block in stored]


def test_a_block_that_a_neighbour_stored_properly_is_used_after_all(
    opened: Opened, directory: Path, stored: list[samples.SampleBlock]
) -> None:
    path = path_of(directory, stored[1])
    good = path.read_bytes()
    overwrite(path, forge_with_key_id(path, stored[1]))
    bench = opened(directory)
    bench.look()
    assert len(bench.served(stored)) == 1
    bench.look()
    overwrite(path, good)
    os.utime(path, (1e9, 1e9))
    bench.look()
    bench.forget_above()
    assert bench.served(stored) == [block.data for block in stored]


def test_without_macs_by_name_both_kinds_are_read(
    opened: Opened, directory: Path, stored: list[samples.SampleBlock]
) -> None:
    plain = path_of(directory, stored[1])
    overwrite(plain, stored[1].data)
    bench = opened(directory, None)
    bench.look()
    assert bench.served(stored) == [block.data for block in stored]
    more = bench.put(range(100, 104))
    bench.store.run_pending()
    assert path_of(directory, more[0]).read_bytes() == more[0].data


def test_the_bytes_of_the_mac_are_in_the_budget(opened: Opened, directory: Path) -> None:
    bench = opened(directory)
    bench.put(TOKENS)
    bench.store.run_pending()
    on_disk = sum(path.stat().st_blocks * 512 for path in directory.rglob("*.kvb"))
    assert bench.state.levels[1].lru.used_bytes == on_disk


@pytest.mark.parametrize("forge", FORGERIES)
def test_tools_without_a_sidecar_check_it_too(
    directory: Path,
    stored: list[samples.SampleBlock],
    forge: Callable[[Path, samples.SampleBlock], bytes],
) -> None:
    path = path_of(directory, stored[1])
    overwrite(path, forge(path, stored[1]))
    tier = FrozenRemote(directory, Authenticity(KEY))
    assert {block.file_bytes for block in tier.scan()} == {FILE_BYTES}
    with tier.open(NAMESPACE, stored[0].key) as block:
        assert block.read_at(0, block.file_bytes) == stored[0].data
    with tier.open(NAMESPACE, stored[1].key) as block, pytest.raises(NotAuthentic):
        block.read_at(0, 32)


class Shifting(MemoryOpenBlock):
    """A file that somebody changes as soon as it was read once."""

    def __init__(self, first: bytes, then: bytes) -> None:
        super().__init__(first)
        self._first = MemoryOpenBlock(first)
        self._then = MemoryOpenBlock(then)
        self._read: set[int] = set()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        again = offset in self._read
        self._read.add(offset)
        source = self._then if again else self._first
        buffer[:] = source.read_at(offset, buffer.nbytes)


def test_what_was_checked_is_what_is_read(stored: list[samples.SampleBlock]) -> None:
    authenticity = Authenticity(KEY)
    data = stored[0].data
    seal = authenticity.trailer(data)
    block = AuthenticBlock(Shifting(data + seal, forged(stored[0]) + seal), authenticity)
    for _ in range(2):
        buffer = memoryview(bytearray(len(data)))
        block.read_into(0, buffer)
        assert bytes(buffer) == block.read_at(0, len(data)) == data


def test_every_byte_of_a_file_counts() -> None:
    authenticity = Authenticity(KEY)
    data = bytes(3 * 4096)
    seal = authenticity.trailer(data)
    authenticity.check(data, seal)
    for at in [*range(0, len(data), 61), *range(len(data), len(data) + TRAILER_BYTES)]:
        changed = bytearray(data + seal)
        changed[at] ^= 1
        with pytest.raises(NotAuthentic):
            authenticity.check(changed[: len(data)], bytes(changed[len(data) :]))


def test_sizes_with_and_without_a_mac() -> None:
    assert content_bytes(8192) == 8192
    assert content_bytes(8192 + TRAILER_BYTES) == 8192
    assert content_bytes(8192 + 63) == 8192 + 63


def test_neighbours_with_different_keys_do_not_use_each_others_blocks(
    opened: Opened, directory: Path, stored: list[samples.SampleBlock]
) -> None:
    bench = opened(directory, OTHER_KEY)
    bench.look()
    assert bench.in_tier(1) == set()
    assert bench.misses()["not authentic"] == len(stored)
    assert NS.digest() == NAMESPACE
