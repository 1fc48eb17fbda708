"""Encoded blocks on a disk: a client gets raw copies of them, and the books know both sizes."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from ollama_tiering.store.block.blockfile import buffer_reader as reader
from ollama_tiering.store.block.blockfile import read_meta
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.block.key import BlockKey, tokens_to_bytes
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import InvalidBlock
from ollama_tiering.store.serving.session import BlockOffer, Outcome
from ollama_tiering.store.serving.staging import readable_by_client
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.upkeep.index import BlockIndex, IndexRow
from tests.unit.store.encoded import (
    BLOCK_TOKENS,
    ENCODED,
    NAMESPACE,
    NS,
    RAW,
    RAW_BYTES,
    EncodedBench,
)


def test_a_block_is_written_down_encoded_and_counted_as_what_it_takes() -> None:
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.store.run_pending()
    assert bench.content(bench.ram, key) == data
    stored = bench.content(bench.local, key)
    assert len(stored) < 0.9 * len(data)
    ram, local = bench.store.report().tiers
    assert (ram.used_bytes, local.used_bytes) == (len(data), len(stored))
    assert (local.encoding, local.raw_bytes, local.stored_bytes) == (
        "zstd",
        len(data),
        len(stored),
    )
    assert ram.encoding == "none"
    record = bench.state.tree.get(key)
    assert record is not None
    assert readable_by_client(bench.state.levels[0], record)
    assert not readable_by_client(bench.state.levels[1], record)


def test_a_tier_holds_more_blocks_encoded_than_raw() -> None:
    bench = EncodedBench(ram=12, local=9)
    for index in range(10):
        bench.put(index * 10)
        bench.store.run_pending()
    assert len(bench.local.blocks) == 10
    assert sum(map(len, bench.local.blocks.values())) <= 9 * RAW_BYTES


def test_a_leased_block_is_decoded_into_ram() -> None:
    bench = EncodedBench()
    made = [bench.put(index * 10) for index in range(3)]
    bench.reboot()
    leased = bench.store.lease(NAMESPACE, [key for key, _ in made])
    assert [block.tier for block in leased.blocks] == [TierKind.RAM] * 3
    for block, (key, data) in zip(leased.blocks, made, strict=True):
        assert block.file_bytes == len(data)
        assert bench.store.read_part(block, 0, block.file_bytes) == data
        assert bench.content(bench.ram, key) == data
        assert (NAMESPACE, key) in bench.local.blocks
    assert bench.state.encodings.decoding.bytes_per_second > 0
    assert not bench.state.staging


def test_after_a_restart_the_sizes_are_known_again() -> None:
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.reboot()
    record = bench.state.tree.get(key)
    assert record is not None
    assert record.file_bytes == len(data)
    assert record.bytes_at(1) == len(bench.content(bench.local, key))


def test_a_block_that_would_not_get_smaller_is_read_where_it_lies() -> None:
    bench = EncodedBench()
    key, data = bench.put(1, noise=True)
    bench.reboot()
    assert bench.content(bench.local, key) == data
    leased = bench.store.lease(NAMESPACE, [key])
    assert [block.tier for block in leased.blocks] == [TierKind.LOCAL]


def test_blocks_encoded_before_the_setting_changed_are_still_read() -> None:
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.store.run_pending()
    bench.encoding = Encoding.NONE
    bench.reboot()
    (block,) = bench.store.lease(NAMESPACE, [key]).blocks
    assert bench.store.read_part(block, 0, block.file_bytes) == data


def test_what_ram_has_no_room_for_is_a_miss() -> None:
    bench = EncodedBench(ram=2)
    made = [bench.put(index * 10)[0] for index in range(2)]
    bench.store.run_pending()
    made += [bench.put(index * 10)[0] for index in range(2, 4)]
    bench.reboot()
    leased = bench.store.lease(NAMESPACE, made)
    assert [block.key for block in leased.blocks] == made[:2]
    assert bench.store.report().counters.misses["not staged"] == 1
    bench.store.release(leased.lease_id)
    assert len(bench.store.lease(NAMESPACE, made[2:]).blocks) == 2


def test_a_damaged_encoded_block_is_quarantined_and_a_miss() -> None:
    bench = EncodedBench()
    key, _ = bench.put(1)
    bench.reboot()
    stored = bytearray(bench.content(bench.local, key))
    stored[9000] ^= 1
    bench.local.blocks[NAMESPACE, key] = bytes(stored)
    assert bench.store.lease(NAMESPACE, [key]).blocks == []
    assert (NAMESPACE, key) in bench.local.bad
    assert bench.state.tree.get(key) is None
    assert bench.ram.blocks == {}
    assert bench.ram.writing == {}
    assert bench.state.levels[0].lru.counted_bytes == 0


def test_weather_while_decoding_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.reboot()

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(bench.local, "open", fails)
        assert bench.store.lease(NAMESPACE, [key]).blocks == []
    bench.now += 100
    (block,) = bench.store.lease(NAMESPACE, [key]).blocks
    assert bench.store.read_part(block, 0, block.file_bytes) == data


def test_an_encoding_of_another_time_is_kept_and_a_miss() -> None:
    bench = EncodedBench()
    key, _ = bench.put(1)
    bench.reboot()
    newer = bytearray(bench.content(bench.local, key))
    newer[8:12] = (2).to_bytes(4, "little")  # version 2, checksum of the preamble right
    from ollama_tiering.store.block.checksum import crc32c

    newer[28:32] = crc32c(newer[:28]).to_bytes(4, "little")
    bench.local.blocks[NAMESPACE, key] = bytes(newer)
    assert bench.store.lease(NAMESPACE, [key]).blocks == []
    assert bench.content(bench.local, key) == bytes(newer)
    assert bench.local.bad == {}
    assert bench.store.report().tiers[1].used_bytes == len(newer)


def test_two_leases_of_one_block_decode_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EncodedBench()
    key, _ = bench.put(1)
    bench.reboot()
    entered, go_on = threading.Event(), threading.Event()
    copies = []
    copy = bench.store._leaser._stager._copy

    def slowly(*args: Any) -> Any:
        copies.append(args)
        entered.set()
        assert go_on.wait(10)
        return copy(*args)

    monkeypatch.setattr(bench.store._leaser._stager, "_copy", slowly)
    found: list[int] = []

    def lease() -> None:
        found.append(len(bench.store.lease(NAMESPACE, [key]).blocks))

    first, second = threading.Thread(target=lease), threading.Thread(target=lease)
    first.start()
    assert entered.wait(10)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert found == [1, 1]
    assert len(copies) == 1


def test_a_deadline_that_has_passed_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EncodedBench(staging_seconds=0.01)
    key, _ = bench.put(1)
    bench.reboot()
    go_on = threading.Event()
    stager = bench.store._leaser._stager
    copy = stager._copy

    def slowly(*args: Any) -> Any:
        assert go_on.wait(10)
        return copy(*args)

    monkeypatch.setattr(stager, "_copy", slowly)
    assert bench.store.lease(NAMESPACE, [key]).blocks == []
    assert bench.store.report().counters.misses == {"not staged in time": 1}
    go_on.set()


def test_a_match_tells_both_sizes_and_what_decoding_takes() -> None:
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.reboot()
    level = bench.state.levels[1]
    level.speed.read = 1e8
    tokens = tokens_to_bytes(range(1, 1 + BLOCK_TOKENS))

    def expected() -> float:
        (found,) = bench.store.match(NAMESPACE, [key], tokens, BLOCK_TOKENS)
        assert found.tier is TierKind.LOCAL
        assert (found.stored_bytes, found.raw_bytes) == (
            len(bench.content(bench.local, key)),
            len(data),
        )
        return found.expected_seconds

    bench.state.encodings.decoding.bytes_per_second = 1e6
    slow = expected()
    bench.state.encodings.decoding.bytes_per_second = 1e12
    fast = expected()
    assert slow - fast == pytest.approx(len(data) / 1e6, rel=1e-3)
    assert fast == pytest.approx(100e-6 + len(bench.content(bench.local, key)) / 1e8, rel=1e-3)


def test_the_copy_that_is_there_sooner_is_counted_with() -> None:
    """A raw copy on a slow tier against an encoded one on a faster: by seconds, per block."""
    tiers = [(MemoryTier(kind), 1 << 30) for kind in TierKind]
    state = StoreState(tiers, encodings=TierEncodings({TierKind.LOCAL: Encoding.ZSTD}))
    record = BlockRecord(BlockKey(bytes(32)), NAMESPACE, NAMESPACE, b"", 0, 1_000_000, 0.0)
    record.levels, record.encoded = frozenset({1, 2}), {1: 500_000}
    speeds = [(0.0, 1e-9), (0.0, 1e-8), (0.0, 1e-8)]
    state.encodings.decoding.bytes_per_second = 1e9  # 5 ms + 1 ms against 10 ms
    assert state.nearest(record, speeds) == (1, pytest.approx(6e-3))
    state.encodings.decoding.bytes_per_second = 1e8  # 5 ms + 10 ms
    assert state.nearest(record, speeds) == (2, pytest.approx(10e-3))


def test_promotion_decodes() -> None:
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.reboot()
    bench.state.promotable[key] = 0.0
    bench.store.run_pending()
    assert bench.content(bench.ram, key) == data


@pytest.mark.parametrize("inline", [False, True])
def test_a_client_may_not_put_an_encoded_block(inline: bool) -> None:
    bench = EncodedBench()
    meta = read_meta(reader(ENCODED), len(ENCODED))
    session = bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
    if inline:
        with pytest.raises(InvalidBlock, match="raw"):
            session.put_inline(meta.key, ENCODED, last=True)
    else:
        (answer,) = session.reserve([BlockOffer(meta.key, meta.parent, len(ENCODED))])
        assert answer.outcome is Outcome.RESERVED
        session._pending[answer.reservation_id].temp.write_at(0, ENCODED)
        (result,) = session.commit([answer.reservation_id])
        assert not result.stored
        assert "raw" in result.reason
    assert bench.ram.blocks == {}
    assert bench.state.levels[0].lru.counted_bytes == 0


def test_books_that_name_a_wrong_size_are_corrected_by_the_file() -> None:
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.reboot()
    record = bench.state.tree.get(key)
    assert record is not None
    bench.state.correct_size(record, bench.state.levels[1], record.encoded[1], len(data) + 8192)
    assert bench.store.lease(NAMESPACE, [key]).blocks == []
    assert record.file_bytes == len(data)
    (block,) = bench.store.lease(NAMESPACE, [key]).blocks
    assert bench.store.read_part(block, 0, block.file_bytes) == data
    assert bench.store.report().tiers[1].raw_bytes == len(data)


def test_the_index_keeps_both_sizes(tmp_path: Any) -> None:
    row = IndexRow(
        key=BlockKey(bytes(32)),
        tier=2,
        namespace=NAMESPACE,
        parent=bytes(32),
        tokens=bytes(16),
        plain_rows=4,
        file_bytes=len(ENCODED),
        raw_file_bytes=len(RAW),
        stored_bytes=len(ENCODED),
        last_use=1.0,
        created=1.0,
        hits=0,
    )
    index = BlockIndex(tmp_path / "index.sqlite")
    assert index.save([row], [])
    assert list(index.load()) == [row]
    index.close()


def test_the_speed_of_decoding_outlives_a_restart(tmp_path: Any) -> None:
    bench = EncodedBench(index_path=tmp_path / "index.sqlite")
    key, _ = bench.put(1)
    bench.store.run_pending()
    bench.state.encodings.decoding.bytes_per_second = 123e6
    bench.store.close()
    bench.open()
    assert bench.state.encodings.decoding.bytes_per_second == 123e6
    assert bench.state.tree.get(key) is not None
