"""A remote tier in zstd: both kinds of staging at once, and sidecars of different encodings."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.block.key import BlockKey, tokens_to_bytes
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.serving.staging import readable_by_client
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from tests.contract.faulty import Faults, remote_tier
from tests.unit.store.encoded import BLOCK_TOKENS, NAMESPACE, RAW_BYTES, EncodedBench

NONE, ZSTD = Encoding.NONE, Encoding.ZSTD


class FarBench(EncodedBench):
    """RAM and a local tier over a directory that others share."""

    def __init__(self, directory: Path, local: Encoding, remote: Encoding, **options: Any) -> None:
        self.directory = directory
        self.faults = Faults()
        self.encodings = {TierKind.LOCAL: local, TierKind.REMOTE: remote}
        super().__init__(**options)

    def open(self) -> None:
        self.far = remote_tier(self.directory, self.faults)
        tiers = [
            *zip((self.ram, self.local), self.budgets, strict=True),
            (self.far, 32 * RAW_BYTES),
        ]
        self.store = TieredStore(
            tiers,
            background=False,
            measure=False,
            encodings=TierEncodings(self.encodings),
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            **self.options,
        )
        self.state = self.store._state
        self.look()

    def look(self) -> None:
        assert self.store._remote is not None
        self.store._remote._rescan.run()

    def demote(self, key: BlockKey, *, source: int = 0) -> None:
        """Into the remote tier, from one above it."""
        mover, levels = self.store._remote, self.state.levels
        assert mover is not None
        assert mover.copy(self.record(key), levels[source], levels[2])

    def forget_above(self) -> None:
        for level, tier in zip(self.state.levels, (self.ram, self.local), strict=False):
            for key in list(level.lru):
                self.state.forget_copy(level, key)
            tier.blocks.clear()

    def far_only(self, first: int) -> tuple[BlockKey, bytes]:
        key, data = self.put(first)
        self.demote(key)
        self.forget_above()
        return key, data

    def record(self, key: BlockKey) -> BlockRecord:
        record = self.state.tree.get(key)
        assert record is not None
        return record

    def file(self, key: BlockKey) -> bytes:
        (path,) = self.directory.rglob(f"{key.hex()}.kvb")
        return path.read_bytes()

    def read(self, key: BlockKey) -> tuple[TierKind, bytes]:
        """As a client gets it."""
        (block,) = self.store.lease(NAMESPACE, [key]).blocks
        return block.tier, self.store.read_part(block, 0, block.file_bytes)


Make = Callable[..., FarBench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    directory = tmp_path / "remote"
    directory.mkdir(mode=0o700)
    made: list[FarBench] = []

    def one(local: Encoding, remote: Encoding, **options: Any) -> FarBench:
        made.append(FarBench(directory, local, remote, **options))
        return made[-1]

    yield one
    for bench in made:
        bench.faults.heal()
        bench.store.close(drain_seconds=0)


@pytest.mark.parametrize("local", Encoding)
@pytest.mark.parametrize("remote", Encoding)
def test_down_and_up_again_in_every_pair_of_encodings(
    make: Make, local: Encoding, remote: Encoding
) -> None:
    bench = make(local, remote)
    key, data = bench.put(1)
    bench.store.run_pending()
    stored = bench.content(bench.local, key)
    assert (stored == data) == (local is NONE)
    bench.demote(key, source=1)
    far = bench.file(key)
    assert (far == data) == (remote is NONE)
    if remote is ZSTD:
        assert len(far) < 0.9 * len(data)
        if local is ZSTD:
            assert far == stored  # as it is, not decoded in between
    record = bench.record(key)
    assert record.bytes_at(2) == len(far)
    assert not readable_by_client(bench.state.levels[2], record)
    report = bench.store.report().tiers[2]
    assert (report.encoding, report.raw_bytes) == (remote.value, len(data))
    assert report.stored_bytes == pytest.approx(len(far), abs=8192)  # physical
    bench.forget_above()
    assert bench.read(key) == (TierKind.RAM, data)


def test_what_ram_has_no_room_for_is_decoded_into_a_raw_local_tier(make: Make) -> None:
    bench = make(NONE, ZSTD, ram=1)
    key, data = bench.far_only(1)
    other, _ = bench.put(10)
    assert bench.store.lease(NAMESPACE, [other]).blocks  # pins all of RAM
    assert bench.read(key) == (TierKind.LOCAL, data)
    assert bench.content(bench.local, key) == data


def test_an_encoded_local_tier_is_no_place_to_stage_into(make: Make) -> None:
    bench = make(ZSTD, ZSTD, ram=1)
    key, data = bench.far_only(1)
    other, _ = bench.put(10)
    leased = bench.store.lease(NAMESPACE, [other])
    assert bench.store.lease(NAMESPACE, [key]).blocks == []
    assert (NAMESPACE, key) not in bench.local.blocks
    bench.store.release(leased.lease_id)
    bench.store.run_pending()
    assert bench.read(key) == (TierKind.RAM, data)


def test_what_encoding_saved_of_the_allowance_may_be_written(make: Make) -> None:
    bench = make(NONE, ZSTD)
    books = bench.state.levels[2].shared
    assert books is not None
    key, data = bench.put(1)
    before = books.allowance_bytes
    assert before > len(data)
    bench.demote(key)
    physical = bench.state.levels[2].lru.stored_bytes(key)
    assert before - books.allowance_bytes == max(physical, len(bench.file(key))) < len(data)
    assert books.taken_bytes == before - books.allowance_bytes


def test_a_match_expects_the_encoded_bytes_and_their_decoding(make: Make) -> None:
    bench = make(NONE, ZSTD)
    key, data = bench.far_only(1)
    bench.state.levels[2].speed.read = 1e8
    bench.state.encodings.decoding.bytes_per_second = 1e7
    tokens = tokens_to_bytes(range(1, 1 + BLOCK_TOKENS))
    (found,) = bench.store.match(NAMESPACE, [key], tokens, BLOCK_TOKENS)
    assert (found.tier, found.raw_bytes) == (TierKind.REMOTE, len(data))
    assert found.stored_bytes == len(bench.file(key))
    expected = 500e-6 + len(bench.file(key)) / 1e8 + len(data) / 1e7
    assert found.expected_seconds == pytest.approx(expected)


def test_staging_measures_reading_and_decoding_apart(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(NONE, ZSTD)
    keys = [bench.far_only(first)[0] for first in (1, 10)]
    monkeypatch.setattr("ollama_tiering.store.books.speed._MIN_SAMPLE_BYTES", 1)
    told: list[tuple[int, float, float]] = []
    busy = bench.state.levels[2].speed.busy
    end = busy.end
    monkeypatch.setattr(busy, "end", lambda *what: (told.append(what), end(*what)))
    assert len(bench.store.lease(NAMESPACE, keys).blocks) == 2
    assert [read_bytes for read_bytes, _, _ in told] == [len(bench.file(key)) for key in keys]
    assert all(reading > 0 and decoding > 0 for _, reading, decoding in told)
    assert bench.state.levels[2].speed.read > 0
    assert bench.state.encodings.decoding.bytes_per_second > 0


def test_the_copy_that_is_there_sooner_is_staged(make: Make) -> None:
    bench = make(ZSTD, NONE)
    key, data = bench.put(1)
    bench.store.run_pending()
    bench.demote(key)
    bench.state.forget_copy(bench.state.levels[0], key)
    bench.ram.blocks.clear()
    record = bench.record(key)
    bench.state.levels[1].speed.read = bench.state.levels[2].speed.read = 1e9
    bench.state.encodings.decoding.bytes_per_second = 1e12
    assert bench.state.soonest_first(record) == [1, 2]
    bench.state.encodings.decoding.bytes_per_second = 1e6
    assert bench.state.soonest_first(record) == [2, 1]
    assert bench.read(key) == (TierKind.RAM, data)
    assert bench.state.levels[2].stats.read_bytes == len(data)
    assert bench.state.levels[1].stats.read_bytes == 0


def test_weather_on_the_one_copy_and_the_other_is_staged(make: Make) -> None:
    bench = make(ZSTD, NONE)
    key, data = bench.put(1)
    bench.store.run_pending()
    bench.demote(key)
    bench.state.forget_copy(bench.state.levels[0], key)
    bench.ram.blocks.clear()
    bench.state.levels[2].speed.read = 1e12  # chosen first
    bench.faults.fail(errno.EIO, "read_at")
    assert bench.read(key) == (TierKind.RAM, data)
    assert bench.store.report().tiers[2].state == "resting"
    tokens = tokens_to_bytes(range(1, 1 + BLOCK_TOKENS))
    bench.state.forget_copy(bench.state.levels[0], key)
    (found,) = bench.store.match(NAMESPACE, [key], tokens, BLOCK_TOKENS)
    assert found.tier is TierKind.LOCAL  # not the faster one, which rests


def test_damage_is_quarantined_and_a_miss(make: Make) -> None:
    bench = make(NONE, ZSTD)
    key, _ = bench.far_only(1)
    (path,) = bench.directory.rglob("*.kvb")
    content = bytearray(path.read_bytes())
    content[9000] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    assert bench.store.lease(NAMESPACE, [key]).blocks == []
    assert [p.name for p in bench.directory.rglob("*.bad")] == [path.name + ".bad"]
    assert bench.ram.blocks == {}
    assert bench.state.levels[0].lru.counted_bytes == 0


def test_sidecars_of_different_encodings_read_each_other(make: Make) -> None:
    one, two = make(NONE, ZSTD), make(ZSTD, NONE)
    first, first_data = one.far_only(1)
    second, second_data = two.far_only(100)
    one.look()
    two.look()
    assert two.record(first).encoded == {2: len(one.file(first))}
    assert one.record(second).encoded == {}
    assert two.read(first) == (TierKind.RAM, first_data)
    assert one.read(second) == (TierKind.RAM, second_data)


def test_a_file_replaced_in_another_encoding_is_noticed(make: Make) -> None:
    """Both found it missing, both wrote it: the later file is there."""
    one, two = make(NONE, ZSTD), make(ZSTD, NONE)
    key, data = one.put(1)
    two.put(1)
    one.demote(key)
    two.demote(key)
    assert one.file(key) == data
    assert one.record(key).bytes_at(2) < len(data)
    one.look()
    assert one.record(key).encoded == {}
    level = one.state.levels[2]
    assert level.lru.stored_bytes(key) >= len(data)
    assert level.raw_bytes == len(data)
    one.forget_above()
    assert one.read(key) == (TierKind.RAM, data)


def test_sizes_are_known_again_after_a_restart(make: Make, tmp_path: Path) -> None:
    bench = make(NONE, ZSTD, index_path=tmp_path / "index.sqlite")
    key, data = bench.far_only(1)
    bench.store.close()
    bench.faults.calls.clear()
    bench.open()
    assert "open" not in bench.faults.calls  # the index spared reading headers
    record = bench.record(key)
    assert (record.file_bytes, record.bytes_at(2)) == (len(data), len(bench.file(key)))
    meta = read_meta(buffer_reader(bench.file(key)), len(bench.file(key)))
    assert meta.encoded
    assert bench.read(key) == (TierKind.RAM, data)
