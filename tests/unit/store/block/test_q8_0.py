"""q8_0: ggml's rounding, once; from there on lossless, and the same bytes on every tier."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ollama_tiering.store.block import q8_0
from ollama_tiering.store.block.blockfile import (
    buffer_reader,
    encode_block,
    plan_block,
    read_meta,
    verify_payload,
)
from ollama_tiering.store.block.encoding import Encoding, ZstdPlanes
from ollama_tiering.store.block.key import LayerSpec, Namespace, prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.errors import CorruptBlock
from ollama_tiering.store.serving.session import BlockOffer, Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTempBlock, MemoryTier
from ollama_tiering.store.upkeep import transcode
from ollama_tiering.store.upkeep.transcode import Seconds
from tests.unit.store.encoded import decoded, reheaded

HEAD_DIM, BLOCK_TOKENS = 8192, 4
ROWS = np.random.default_rng(5).standard_normal((2, BLOCK_TOKENS, HEAD_DIM)).astype(np.float16)


def namespace(extra: str) -> Namespace:
    return Namespace.of(
        model="sample",
        engine="sample/1",
        cache_dtype="f16",
        layers=[LayerSpec(0, 0, 1, HEAD_DIM, HEAD_DIM)],
        block_tokens=BLOCK_TOKENS,
        extra=extra,
    )


LOSSY, EXACT = namespace("devices=CPU;kv=q8_0"), namespace("devices=CPU;kv=q8_0x")
TOKENS = tokens_to_bytes(range(BLOCK_TOKENS))


def block(ns: Namespace, rows: Any = ROWS, dtype: str = "f16") -> bytes:
    kinds = (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
    plan = plan_block(
        namespace=ns.digest(),
        parent=ns.digest(),
        tokens=TOKENS,
        first_position=0,
        shapes=[SegmentShape(0, 0, kind, dtype, rows[0][0].nbytes) for kind in kinds],
        created_unix_seconds=1,
    )
    return encode_block(plan, [part.data for part in rows])


def payload(data: bytes) -> list[bytes]:
    meta = read_meta(buffer_reader(data), len(data))
    verify_payload(meta, buffer_reader(data))
    return [data[s.file_offset : s.file_offset + s.stored_bytes] for s in meta.segments]


def by_gguf(raw: bytes) -> bytes:
    """llama.cpp's own Python version of ggml's q8_0, there and back."""
    blocks = np.frombuffer(raw, np.float16).astype(np.float32).reshape(-1, 32)
    quant = gguf.quants.Q8_0
    rows = quant.dequantize_blocks(quant.quantize_blocks(blocks))
    out: bytes = rows.astype(np.float16).tobytes()
    return out


finite = st.floats(-60000, 60000, width=16, allow_subnormal=False)


@given(npst.arrays(np.float16, st.integers(1, 4).map(lambda n: n * 32), elements=finite))
@example(np.zeros(32, np.float16))
@example(np.full(32, -0.0, np.float16))
@example(np.full(32, 65504, np.float16))
def test_rounded_rows_have_codes_that_give_them_back(rows: Any) -> None:
    rounded = q8_0.round_rows(rows.tobytes())
    if rounded is None:
        assert np.abs(rows).max() > 60000  # where f16 ends
        return
    assert rounded.tobytes() == by_gguf(rows.tobytes())
    codes = q8_0.codes_of(rounded.data)
    if codes is None:  # a scale below what f16 has: zstd or raw takes them
        assert np.abs(rows[rows != 0]).min() < 1e-3
        return
    assert codes.size == rounded.size * 34 // 64
    assert q8_0.rows_of(codes.data).tobytes() == rounded.tobytes()


def test_normal_rows_always_have_codes_and_lose_little() -> None:
    for scale in (1e-3, 1.0, 100.0):
        rows = (ROWS.astype(np.float32) * scale).astype(np.float16)
        rounded = q8_0.round_rows(rows.tobytes())
        assert rounded is not None
        assert q8_0.codes_of(rounded.data) is not None
        error = rounded.view(np.float16).astype(np.float32) - rows.reshape(-1).astype(np.float32)
        assert 0 < np.abs(error).max() < 5 * scale / 127


@pytest.mark.parametrize(
    "raw",
    [b"", bytes(62), np.full(32, np.nan, np.float16).tobytes(), bytes(62) + b"\x00\x7c"],
    ids=["nothing", "half a block", "NaN", "infinity"],
)
def test_what_q8_0_cannot_hold_is_left_alone(raw: bytes) -> None:
    assert q8_0.round_rows(raw) is None
    assert q8_0.codes_of(raw) is None


def test_rows_that_were_not_rounded_have_no_codes() -> None:
    assert q8_0.codes_of(ROWS.tobytes()) is None


class Bench:
    def __init__(self, local: Encoding = Encoding.NONE, *, ram: bool = True) -> None:
        self.ram, self.local = MemoryTier(TierKind.RAM), MemoryTier(TierKind.LOCAL)
        self.tiers = [(self.ram, 1 << 20)] if ram else []
        self.tiers.append((self.local, 1 << 20))
        self.encoding = local
        self.open()

    def open(self) -> None:
        encodings = TierEncodings({TierKind.LOCAL: self.encoding})
        self.store = TieredStore(
            [*self.tiers], background=False, measure=False, encodings=encodings, clock=lambda: 0.0
        )

    def put(self, ns: Namespace, data: bytes, *, inline: bool = False) -> bytes:
        (key,) = prefix_chain(ns.digest(), TOKENS, BLOCK_TOKENS)
        session = self.store.open_session(ns.digest(), ns.fields(), BLOCK_TOKENS)
        if inline:
            result = session.put_inline(key, data, last=True)
        else:
            (answer,) = session.reserve([BlockOffer(key, ns.digest(), len(data))])
            assert answer.outcome is Outcome.RESERVED
            session._pending[answer.reservation_id].temp.write_at(0, data)
            (result,) = session.commit([answer.reservation_id])
        assert result is not None
        assert result.stored, result
        return key

    def read(self, ns: Namespace, key: Any) -> bytes:
        (leased,) = self.store.lease(ns.digest(), [key]).blocks
        return self.store.read_part(leased, 0, leased.file_bytes)


@pytest.mark.parametrize("local", list(Encoding))
@pytest.mark.parametrize("inline", [False, True])
def test_every_copy_has_the_rounded_rows(local: Encoding, inline: bool) -> None:
    bench = Bench(local)
    key = bench.put(LOSSY, block(LOSSY), inline=inline)
    wanted = [by_gguf(part.tobytes()) for part in ROWS]
    in_ram = bench.read(LOSSY, key)
    assert payload(in_ram) == wanted
    bench.store.run_pending()
    stored = bench.local.blocks[LOSSY.digest(), key]
    assert len(stored) < 0.6 * len(in_ram)
    meta = read_meta(buffer_reader(stored), len(stored))
    assert {segment.encoding for segment in meta.segments} == {pb.ENCODING_Q8_0}
    bench.ram.blocks.clear()
    bench.open()
    assert bench.read(LOSSY, key) == in_ram


@pytest.mark.parametrize("lowest", list(Encoding))
def test_codes_go_down_another_tier_as_they_are(lowest: Encoding) -> None:
    bench = Bench()
    far = MemoryTier(TierKind.REMOTE)
    bench.tiers.append((far, 1 << 20))
    bench.open()
    bench.store._state.encodings._encodings[TierKind.REMOTE] = lowest
    key = bench.put(LOSSY, block(LOSSY))
    raw = bench.read(LOSSY, key)
    bench.store.run_pending()
    state = bench.store._state
    record = state.tree.get(key)
    assert record is not None
    assert bench.store._mover.copy(record, state.levels[1], state.levels[2])
    place = LOSSY.digest(), key
    assert far.blocks[place] == bench.local.blocks[place]
    assert record.bytes_at(2) == len(far.blocks[place]) < 0.6 * len(raw)
    assert bench.store._mover.copy(record, state.levels[2], state.levels[0])
    assert bench.ram.blocks[place] == raw


def test_without_a_ram_tier_rows_are_rounded_and_kept_raw() -> None:
    bench = Bench(ram=False)
    key = bench.put(LOSSY, block(LOSSY))
    assert payload(bench.read(LOSSY, key)) == [by_gguf(part.tobytes()) for part in ROWS]


def test_another_namespace_is_exact() -> None:
    bench = Bench()
    key = bench.put(EXACT, block(EXACT))
    bench.store.run_pending()
    assert bench.read(EXACT, key) == block(EXACT)
    assert bench.local.blocks[EXACT.digest(), key] == block(EXACT)
    assert bench.store.report().q8_0_namespaces == []


def test_the_report_names_the_namespaces_that_are_rounded() -> None:
    bench = Bench()
    bench.put(LOSSY, block(LOSSY))
    assert bench.store.report().q8_0_namespaces == [LOSSY.digest()]


def test_a_segment_with_a_nan_stays_as_it_is() -> None:
    rows = ROWS.copy()
    rows[1, 0, 0] = np.nan
    bench = Bench(Encoding.ZSTD)
    key = bench.put(LOSSY, block(LOSSY, rows))
    k, v = payload(bench.read(LOSSY, key))
    assert k == by_gguf(rows[0].tobytes())
    assert v == rows[1].tobytes()
    bench.store.run_pending()
    stored = bench.local.blocks[LOSSY.digest(), key]
    meta = read_meta(buffer_reader(stored), len(stored))
    assert [s.encoding for s in meta.segments] == [pb.ENCODING_Q8_0, pb.ENCODING_ZSTD]
    assert payload(decoded(stored)) == [k, v]


def test_damage_is_found_before_it_is_rounded() -> None:
    data = bytearray(block(LOSSY))
    data[5000] ^= 1
    bench = Bench()
    (key,) = prefix_chain(LOSSY.digest(), TOKENS, BLOCK_TOKENS)
    session = bench.store.open_session(LOSSY.digest(), LOSSY.fields(), BLOCK_TOKENS)
    (answer,) = session.reserve([BlockOffer(key, LOSSY.digest(), len(data))])
    session._pending[answer.reservation_id].temp.write_at(0, bytes(data))
    (result,) = session.commit([answer.reservation_id])
    assert not result.stored
    assert "checksum" in result.reason
    assert bench.ram.blocks == {}


def test_any_number_of_descriptions_is_remembered_up_to_a_bound() -> None:
    encodings = TierEncodings()
    for index in range(1000):
        ns = Namespace.of(
            model=str(index), engine="", cache_dtype="f16", layers=[], extra="kv=q8_0"
        )
        assert encodings.note(ns.digest(), ns.fields())
    assert len(encodings.rounded_namespaces()) == 256
    assert encodings.rounds(ns.digest())


def encoded() -> bytes:
    rounded = q8_0.round_rows(ROWS.tobytes())
    assert rounded is not None
    data = block(LOSSY, rounded.view(np.float16).reshape(ROWS.shape))
    opened = MemoryOpenBlock(data)
    meta = read_meta(opened.read_at, len(data))
    made = transcode.encode(meta, opened, None, Seconds(), rounded=True)
    assert made is not None
    temp = MemoryTempBlock(meta.namespace, meta.key, made.file_bytes)
    made.write_to(temp, Seconds())
    assert decoded(bytes(temp.data)) == data
    return bytes(temp.data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("stored_bytes", 34), ("row_bytes", 66), ("raw_crc32c", 1), ("encoding", pb.ENCODING_ZSTD)],
)
def test_a_header_that_lies_is_damage(field: str, value: int) -> None:
    def change(header: pb.BlockHeader) -> None:
        setattr(header.segments[0], field, value)

    with pytest.raises(CorruptBlock):
        decoded(reheaded(encoded(), change))


def test_zstd_alone_takes_rounded_rows_too() -> None:
    """After a restart nobody has described the namespace yet."""
    rounded = q8_0.round_rows(ROWS.tobytes())
    assert rounded is not None
    frames = ZstdPlanes().encode(rounded.data, "f16")
    assert sum(map(len, frames)) < rounded.size
