"""Chains with window blocks that hang on them."""

from __future__ import annotations

from collections.abc import Sequence

from measure.store import samples
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from tests.unit.store.support import BLOCK_TOKENS, NS, Bench

TOKENS = list(range(10))  # two whole blocks and a tail of two


def hang(
    bench: Bench, block: samples.SampleBlock, tokens: Sequence[int], first: int = 0
) -> samples.SampleBlock:
    """Stores a window block on one with these tokens, from one of its rows on."""
    position = read_meta(buffer_reader(block.data), len(block.data)).first_position
    window = samples.window(NS, block, tokens, position, first)
    assert all(result.stored for result in bench.try_put([window]))
    bench.tick()
    return window


def hang_on_all(bench: Bench, blocks: list[samples.SampleBlock]) -> list[samples.SampleBlock]:
    parts = [TOKENS[at : at + BLOCK_TOKENS] for at in range(0, len(TOKENS), BLOCK_TOKENS)]
    return [hang(bench, block, part) for block, part in zip(blocks, parts, strict=True)]
