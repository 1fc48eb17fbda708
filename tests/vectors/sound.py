"""Block files as clients write and read them."""

from __future__ import annotations

from ollama_tiering.store.block.key import (
    BlockExtra,
    BlockKey,
    tokens_to_bytes,
    window_end_extra,
    window_extra,
)
from tests.vectors.building import IMAGE, Files, block, kv, parts
from tests.vectors.keys import INT32_MAX

Q8_0_ROW = 4 * 64 // 32 * 34  # bytes of 4 heads of 64 in ggml's q8_0


def files() -> Files:
    first = block(list(range(64)), kv(0, 0))
    parent = BlockKey(parts(first)[0].key)
    return {
        "ok-64-rows": ("ok", "the first block of a sequence", first),
        "ok-second-block": (
            "ok",
            "a whole block with a parent",
            block(list(range(64, 128)), kv(0, 0), parent=parent, first_position=64),
        ),
        "ok-tail-1-row": (
            "ok",
            "a tail block of one row",
            block([INT32_MAX], kv(0, 0), parent=parent, first_position=64),
        ),
        "ok-tail-63-rows": (
            "ok",
            "a tail block of 63 rows, two layers, rows of 100 bytes",
            block(
                [-i for i in range(63)],
                kv(0, 0, 100) + kv(0, 1, 100),
                parent=parent,
                first_position=64,
            ),
        ),
        "ok-two-children": (
            "ok",
            "a wrapper cache: layers of two children",
            block([1, 2], kv(0, 1) + kv(1, 0)),
        ),
        "ok-segment-over-one-page": (
            "ok",
            "segments longer than 4096 bytes",
            block([9, 8, 7], kv(0, 0, 2048)),
        ),
        "ok-extras": (
            "ok",
            "an image at row 1",
            block([1, 0, 3], kv(0, 0), extras=(BlockExtra(1, IMAGE),)),
        ),
        "ok-extras-at-one-row": (
            "ok",
            "two digests at the last row",
            block([1, 2, 3], kv(0, 0), extras=(BlockExtra(2, IMAGE), BlockExtra(2, bytes(32)))),
        ),
        "ok-q8_0-cache": (
            "ok",
            "rows of a q8_0 cache: 34 bytes for 32 elements",
            block([4, 5, 6], kv(0, 0, Q8_0_ROW, "q8_0")),
        ),
        **_window(parent),
    }


def _window(parent: BlockKey) -> Files:
    """The window of rows 62 to 65 of a content: two blocks, of which the last names the other."""
    before = block(
        [62, 63],
        kv(1, 0),
        extras=[window_extra(1, 62, [5, 0])],
        parent=parent,
        first_position=64,
        cells=[5, 0],
    )
    other = BlockKey(parts(before)[0].key)
    on = BlockKey(parts(block([64, 65], kv(0, 0), parent=parent, first_position=64))[0].key)
    last = block(
        [64, 65],
        kv(1, 0),
        extras=[window_end_extra(1, 0)],
        parent=on,
        first_position=128,
        cells=[1, 2],
        others=[other],
    )
    assert parts(last)[0].tokens == tokens_to_bytes([64, 65])
    return {
        "ok-window-block": ("ok", "two rows of a window, with their cells", before),
        "ok-window-end": ("ok", "what a window ends with: it names the block before", last),
    }
