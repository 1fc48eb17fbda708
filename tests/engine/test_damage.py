"""Damaged block files: what is restored is what is in the file, and a damaged file is a miss.

A flipped bit with checksums made right again must show in the logprobs: the numbers compared
elsewhere do depend on the restored bytes. With the checksum left alone the same bit is a miss, the
answer is the right one, and the file is set aside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ollama_tiering.store.block import blockfile
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.engine.harness import (
    BLOCK_TOKENS,
    Result,
    Server,
    Sidecar,
    assert_same,
    in_memory,
    text,
    wait_until,
)
from tests.places import short_directory

TOKENS = 300
DAMAGED = 2  # the third block of five
SIGN = 0x80  # of the high byte of an f16: no Inf and no NaN comes of it


@dataclass
class Rig:
    sidecar: Sidecar
    server: Server
    reference: Server

    def hit(self, prompt: str, resumed: int, model: str = "g2") -> Result:
        return in_memory(self.reference, model, prompt, resumed)

    def store(self, prompt: str, model: str = "g2") -> Result:
        """Has the prompt's blocks in every tier and nothing in memory."""
        answer = self.server.generate(model, prompt)
        self.sidecar.settle(self.server, model)
        self.server.unload(model)
        wait_until("RAM and disk hold the same", lambda: self.sidecar.stat().queued_demotions == 0)
        return answer

    def copies(self, prompt: str, block: int) -> list[Path]:
        """The files that hold this block, one for each tier."""
        found = []
        for file in self.sidecar.block_files():
            data = file.read_bytes()
            meta = blockfile.read_meta(blockfile.buffer_reader(data), len(data))
            first = block * BLOCK_TOKENS
            tokens = list(prompt[first : first + BLOCK_TOKENS].encode())
            held = [
                int.from_bytes(meta.tokens[i : i + 4], "little")
                for i in range(0, len(meta.tokens), 4)
            ]
            if meta.first_position == first and held[: len(tokens)] == tokens:
                found.append(file)
        assert len(found) == 2, "one in RAM, one on disk"
        return found

    def quarantined(self) -> int:
        return sum(tier.quarantined_blocks for tier in self.sidecar.stat().tiers)


@pytest.fixture(scope="module", params=["stock"])
def rig(
    request: pytest.FixtureRequest,
    binary: Path,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """The parameter is how attention is computed."""
    folder = tmp_path_factory.mktemp("damage")
    env = {"OLLAMA_FLASH_ATTENTION": 1, "OLLAMA_CPU_ATTENTION": request.param}
    with (
        short_directory(in_memory=True) as fast,
        Sidecar(folder / "sidecar", fast) as sidecar,
        Server(binary, folder / "tested", models, socket=sidecar.socket, env=env) as server,
        Server(binary, folder / "reference", models, env=env) as reference,
    ):
        yield Rig(sidecar, server, reference)


def rewrite(file: Path, change: Callable[[bytearray], object]) -> None:
    """In place, so that the store sees no other file than before."""
    data = bytearray(file.read_bytes())
    change(data)
    file.chmod(0o600)
    with file.open("r+b") as out:
        out.write(data)
        out.truncate()


def flip_in_payload(data: bytearray, kind: pb.SegmentKind, layer: int) -> None:
    """The sign of one element, in the middle row."""
    meta = blockfile.read_meta(blockfile.buffer_reader(data), len(data))
    segment = next(s for s in meta.segments if (s.layer, s.kind) == (layer, kind))
    row = meta.rows // 2
    data[segment.file_offset + row * segment.row_bytes + 11] ^= SIGN


def make_checksums_right(data: bytearray) -> None:
    header_bytes = int.from_bytes(data[12:16], "little")
    payload_offset = int.from_bytes(data[16:24], "little")
    header = pb.BlockHeader()
    header.ParseFromString(bytes(data[32 : 32 + header_bytes]))
    for segment in header.segments:
        start = payload_offset + segment.offset
        segment.crc32c = crc32c(data[start : start + segment.stored_bytes])
    packed = blockfile.pack_head(header.SerializeToString(deterministic=True), payload_offset)
    data[:payload_offset] = packed


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        pytest.param(pb.SEGMENT_KIND_K, 0, id="K-0"),
        pytest.param(pb.SEGMENT_KIND_K, 3, id="K-3", marks=pytest.mark.slow),
        pytest.param(pb.SEGMENT_KIND_V, 0, id="V-0", marks=pytest.mark.slow),
        pytest.param(pb.SEGMENT_KIND_V, 3, id="V-3"),
    ],
)
@pytest.mark.parametrize("rig", ["exact"], indirect=True)
def test_a_flipped_bit_with_right_checksums_changes_the_logprobs(
    rig: Rig, kind: pb.SegmentKind, layer: int
) -> None:
    answer, reference = with_a_flipped_bit(rig, kind, layer)
    assert answer.resumed == reference.resumed
    assert answer.logprobs[0] != reference.logprobs[0]


def test_a_block_with_other_rows_than_name_it_is_set_aside(rig: Rig) -> None:
    """Where tokens do not decide the bits of rows, right checksums are not enough."""
    answer, _ = with_a_flipped_bit(rig, pb.SEGMENT_KIND_K, 0)
    assert answer.resumed == DAMAGED * BLOCK_TOKENS
    wait_until("a copy is set aside", rig.quarantined)


def with_a_flipped_bit(rig: Rig, kind: pb.SegmentKind, layer: int) -> tuple[Result, Result]:
    """The answer over a stored prompt of which one bit is another, and the one in memory."""
    prompt = text(TOKENS, ("right checksums", kind, layer))
    reference = rig.hit(prompt, TOKENS - 1)
    rig.store(prompt)
    for file in rig.copies(prompt, DAMAGED):

        def flip(data: bytearray) -> None:
            flip_in_payload(data, kind, layer)
            make_checksums_right(data)

        rewrite(file, flip)
    return rig.server.generate("g2", prompt), reference


def flip_k(data: bytearray) -> None:
    flip_in_payload(data, pb.SEGMENT_KIND_K, 1)


def flip_v(data: bytearray) -> None:
    flip_in_payload(data, pb.SEGMENT_KIND_V, 2)


def flip_in_last_row(data: bytearray) -> None:
    """Of the last segment, whichever layers the block has."""
    meta = blockfile.read_meta(blockfile.buffer_reader(data), len(data))
    last = meta.segments[-1]
    data[last.file_offset + meta.rows * last.row_bytes - 1] ^= SIGN


def flip_in_header(data: bytearray) -> None:
    data[40] ^= 1


def flip_in_preamble(data: bytearray) -> None:
    data[13] ^= 1


def cut_in_half(data: bytearray) -> None:
    del data[len(data) // 2 :]


def empty(data: bytearray) -> None:
    data.clear()


DAMAGES = (flip_k, flip_v, flip_in_header, flip_in_preamble, cut_in_half, empty)
# Every damage in the middle, one in the first and in the last block; the others there are slow.
DAMAGED_BLOCKS = [
    pytest.param(
        block,
        damage,
        id=f"{block}-{damage.__name__}",
        marks=() if block == DAMAGED or damage is flip_k else pytest.mark.slow,
    )
    for block in (0, DAMAGED, TOKENS // BLOCK_TOKENS)
    for damage in DAMAGES
]


@pytest.mark.parametrize(("block", "damage"), DAMAGED_BLOCKS)
def test_a_damaged_block_is_a_miss_and_is_quarantined(
    rig: Rig, block: int, damage: Callable[[bytearray], None]
) -> None:
    prompt = text(TOKENS, ("damaged", block, damage.__name__))
    reference = rig.hit(prompt, block * BLOCK_TOKENS)
    rig.store(prompt)
    copies, before = rig.copies(prompt, block), rig.quarantined()
    for file in copies:
        rewrite(file, damage)
    assert_same(rig.server.generate("g2", prompt), reference)
    bad = [file.with_name(file.name + ".bad") for file in copies]
    wait_until("the files are set aside", lambda: all(file.exists() for file in bad))
    wait_until("they are counted", lambda: rig.quarantined() == before + len(copies))

    # what was recomputed takes the place of what was damaged
    rig.sidecar.settle(rig.server, "g2")
    rig.server.unload("g2")
    again = rig.server.generate("g2", prompt)
    assert (again.text, again.resumed) == (reference.text, TOKENS - 1)


def test_a_damaged_copy_in_ram_does_not_cost_the_copy_on_disk(rig: Rig) -> None:
    prompt = text(TOKENS, "only one copy")
    reference = rig.hit(prompt, TOKENS - 1)
    rig.store(prompt)
    in_ram, on_disk = sorted(
        rig.copies(prompt, DAMAGED), key=lambda file: rig.sidecar.local_dir in file.parents
    )
    rewrite(in_ram, flip_k)
    assert rig.server.generate("g2", prompt).resumed == DAMAGED * BLOCK_TOKENS
    wait_until("the file is set aside", in_ram.with_name(in_ram.name + ".bad").exists)
    assert on_disk.exists()
    rig.sidecar.settle(rig.server, "g2")
    rig.server.unload("g2")
    assert_same(rig.server.generate("g2", prompt), reference)


def test_a_block_of_other_tokens_under_this_name_is_not_used(rig: Rig) -> None:
    prompt, other = text(TOKENS, "mine"), text(TOKENS, "another's")
    reference = rig.hit(prompt, DAMAGED * BLOCK_TOKENS)
    rig.store(prompt)
    rig.store(other)
    theirs = rig.copies(other, DAMAGED)[0].read_bytes()
    for file in rig.copies(prompt, DAMAGED):
        rewrite(file, lambda data: data.__setitem__(slice(None), theirs))
    assert_same(rig.server.generate("g2", prompt), reference)


def test_files_that_vanished_are_a_miss(rig: Rig) -> None:
    prompt = text(TOKENS, "vanished")
    reference = rig.hit(prompt, DAMAGED * BLOCK_TOKENS)
    rig.store(prompt)
    for file in rig.copies(prompt, DAMAGED):
        os.unlink(file)  # noqa: PTH108
    assert_same(rig.server.generate("g2", prompt), reference)


@pytest.mark.parametrize("model", ["sliding", pytest.param("olmo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", [DAMAGED, 0])
def test_of_a_chain_with_windows_a_damaged_block_costs_all_and_no_more(
    rig: Rig, model: str, block: int
) -> None:
    """The windows are those of the end: behind fewer rows they would be of no prompt."""
    prompt = text(700, ("windows", model, block))
    cold = rig.hit(prompt, 0, model)
    rig.store(prompt, model)
    for file in rig.copies(prompt, block):
        rewrite(file, flip_in_last_row)
    answer = rig.server.generate(model, prompt)
    assert answer.resumed == 0
    assert_same(answer, cold)
    # What was computed takes the damaged block's place, and the windows are of use again.
    rig.sidecar.settle(rig.server, model)
    rig.server.unload(model)
    again = rig.server.generate(model, prompt)
    assert again.resumed > 600
