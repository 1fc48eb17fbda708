"""The sidecar names blocks of a text and of its windows, and writes their headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ollama_tiering.sidecar.policy.chains import Chains
from ollama_tiering.sidecar.policy.text_blocks import Text, TextBlocks, TextRows
from ollama_tiering.store import (
    BlockExtra,
    BlockMeta,
    SegmentShape,
    as_namespace,
    block_key,
    buffer_reader,
    encode_block,
    extras_of,
    read_meta,
    tokens_to_bytes,
    window_end_extra,
    window_extra,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import InvalidBlock

NAMESPACE = as_namespace(b"n" * 32)
K, V = pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V
ROWS = [SegmentShape(0, 0, K, "f16", 16), SegmentShape(0, 0, V, "f16", 32)]
WINDOW = [SegmentShape(1, 2, K, "f16", 8)]
IMAGE = BlockExtra(70, b"i" * 32)


def blocks(step: int = 64) -> TextBlocks:
    return TextBlocks(Chains(NAMESPACE, step), [*ROWS, *WINDOW], [1])


def text(count: int, **beside: Any) -> Text:
    return Text(tokens_to_bytes(list(range(count))), **beside)


def metas(of: Text, wanted: Sequence[TextRows], maker: TextBlocks | None = None) -> list[BlockMeta]:
    """What their files say, once they are filled."""
    made = []
    for file in (maker or blocks()).planned(of, wanted):
        data = encode_block(file.plan, [bytes(length) for _, length in file.plan.spans])
        meta = read_meta(buffer_reader(data), len(data))
        assert (file.plan.key, file.parent) == (meta.key, meta.parent)
        assert (file.plan.file_bytes, file.plan.payload_offset) == (len(data), meta.payload_offset)
        made.append(meta)
    return made


def test_blocks_are_named_by_the_chain_of_their_tokens() -> None:
    of = text(150, extras=[IMAGE])
    made = metas(of, [TextRows(0, 64), TextRows(64, 64), TextRows(128, 22)])
    parent: bytes = NAMESPACE
    for first, meta in zip((0, 64, 128), made, strict=True):
        inside = of.tokens[4 * first : 4 * (first + 64)]
        extras = extras_of([IMAGE], first, 64)
        assert (meta.parent, meta.tokens, list(meta.extras)) == (parent, inside, extras)
        assert (meta.first_position, meta.namespace) == (first, NAMESPACE)
        assert [(s.child, s.kind, s.row_bytes) for s in meta.segments] == [(0, K, 16), (0, V, 32)]
        parent = block_key(parent, inside, extras)
        assert meta.key == parent
    assert made[1].extras, "the image is in none of the blocks"
    assert metas(of, [TextRows(128, 22)])[0].key == made[2].key, (
        "the first need not be stored again"
    )


def test_rows_that_name_a_block_are_in_its_key_and_in_all_that_follow() -> None:
    prints = [bytes([i]) * 8 for i in range(3)]
    of = text(150, fingerprints=prints)
    made = list(blocks().planned(of, [TextRows(0, 64), TextRows(64, 64), TextRows(128, 22)]))
    assert [file.fingerprint for file in made] == prints
    other = text(150, fingerprints=[b"x" * 8, *prints[1:]])
    others = list(blocks().planned(other, [TextRows(128, 22)]))
    assert others[0].plan.key != made[2].plan.key
    assert others[0].fingerprint == prints[2]


def test_a_window_hangs_on_its_blocks_and_its_last_block_names_the_others() -> None:
    of = text(150)
    chain = metas(of, [TextRows(0, 64), TextRows(64, 64), TextRows(128, 22)])
    cells = list(range(500, 600))  # of rows 50 to 150
    parts = metas(
        of,
        [
            TextRows(50, 14, 1, cells[:14]),
            TextRows(64, 64, 1, cells[14:78]),
            TextRows(128, 22, 1, cells, ends_window=True),
        ],
    )
    assert [list(part.cells) for part in parts] == [cells[:14], cells[14:78], cells[78:]]
    assert [part.parent for part in parts] == [block.key for block in chain]
    assert list(parts[0].extras) == [window_extra(1, 50, cells[:14])]
    assert list(parts[1].extras) == [window_extra(1, 0, cells[14:78])]
    assert list(parts[2].extras) == [window_end_extra(1, 0)]
    assert [list(part.others) for part in parts] == [[], [], [parts[0].key, parts[1].key]]
    assert [part.first_position for part in parts] == [64, 128, 192]
    assert all([s.child for s in part.segments] == [1] for part in parts)


def test_a_window_within_one_block_names_no_others() -> None:
    (part,) = metas(text(150), [TextRows(100, 20, 1, list(range(20)), ends_window=True)])
    assert list(part.extras) == [window_end_extra(1, 36)]
    assert (list(part.others), part.rows) == ([], 20)


@pytest.mark.parametrize(
    ("of", "rows"),
    {
        "past the text": (text(100), TextRows(64, 64)),
        "over a block's end": (text(150), TextRows(60, 8)),
        "no rows": (text(150), TextRows(64, 0)),
        "the rest of a tail": (text(100), TextRows(70, 30)),
        "a window past the text": (text(150), TextRows(140, 20, 1, list(range(20)), True)),
        "a window over a block's end": (text(150), TextRows(60, 8, 1, list(range(8)), True)),
        "a part of a block": (text(150), TextRows(64, 32)),
        "not from a block's start": (text(150), TextRows(70, 58)),
        "half a tail": (text(150), TextRows(128, 21)),
        "rows that are not known": (
            text(150, fingerprints=[b"1" * 8, b"2" * 8]),
            TextRows(128, 22),
        ),
        "a window of rows not known": (
            text(150, fingerprints=[b"1" * 8]),
            TextRows(100, 20, 1, list(range(20)), True),
        ),
        "more cells than the text has rows": (
            text(150),
            TextRows(0, 64, 1, list(range(65)), True),
        ),
        "cells of others, and not the last": (text(150), TextRows(64, 64, 1, list(range(80)))),
        "fewer cells than rows": (text(150), TextRows(64, 64, 1, list(range(63)), True)),
        "a window that begins in two places": (
            text(150),
            TextRows(100, 20, 1, list(range(40)), True),
        ),
    }.values(),
)
def test_rows_that_are_no_block_are_refused(of: Text, rows: TextRows) -> None:
    with pytest.raises(InvalidBlock):
        list(blocks().planned(of, [rows]))


def test_a_window_of_an_unknown_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="segments"):
        list(blocks().planned(text(64), [TextRows(0, 8, 7, list(range(8)), True)]))
