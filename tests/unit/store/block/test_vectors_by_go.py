"""Block files that the Go side has written say what it was told to write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ollama_tiering.store.block.blockfile import BlockMeta, buffer_reader, read_meta, verify_payload
from ollama_tiering.store.block.key import (
    BlockExtra,
    block_key,
    tokens_to_bytes,
    window_end_extra,
    window_extra,
)
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.vectors import by_go
from tests.vectors.make import BY_GO, HERE

TOLD: dict[str, Any] = json.loads((HERE / "by_go.json").read_text())
K, V = pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V


def read(file: str) -> tuple[bytes, BlockMeta]:
    data = (HERE / BY_GO / file).read_bytes()
    meta = read_meta(buffer_reader(data), len(data))
    verify_payload(meta, buffer_reader(data))
    return data, meta


def test_what_go_was_told_to_write_is_there_and_nothing_else() -> None:
    files = {path.name for path in (HERE / BY_GO).iterdir()}
    assert files == {entry["file"] for entry in TOLD["blocks"]}


@pytest.mark.parametrize("entry", TOLD["blocks"], ids=lambda entry: entry["file"])
def test_header_and_rows_are_what_go_was_told_to_write(entry: dict[str, Any]) -> None:
    data, meta = read(entry["file"])
    parent, tokens = bytes.fromhex(entry["parent"]), tokens_to_bytes(entry["tokens"])
    window = entry["window"]
    extras = [BlockExtra(extra["row"], bytes.fromhex(extra["digest"])) for extra in entry["extras"]]
    if window and window["last"]:
        extras = [window_end_extra(window["child"], window["first"])]
    elif window:
        extras = [window_extra(window["child"], window["first"], window["cells"])]
    assert meta.namespace.hex() == entry["namespace"]
    assert (meta.parent, meta.tokens, list(meta.extras)) == (parent, tokens, extras)
    assert meta.key == block_key(parent, tokens, extras)
    assert meta.first_position == entry["first_position"]
    assert meta.created_unix_seconds == TOLD["created_unix_seconds"]
    assert list(meta.cells) == (window["cells"] if window else [])
    assert [key.hex() for key in meta.others] == (window["others"] if window else [])
    assert not meta.encoded
    wanted = [
        (layer["child"], layer["layer"], kind, entry["dtype"], layer[f"{name}_row_bytes"])
        for layer in entry["layers"]
        for kind, name in ((K, "k"), (V, "v"))
    ]
    found = [(s.child, s.layer, s.kind, s.dtype, s.row_bytes) for s in meta.segments]
    assert found == wanted
    for number, segment in enumerate(meta.segments):
        stored = data[segment.file_offset :][: segment.stored_bytes]
        assert stored == by_go.payload(number, len(entry["tokens"]) * segment.row_bytes)


@pytest.mark.parametrize("entry", TOLD["blocks"], ids=lambda entry: entry["file"])
def test_nothing_but_zeros_lies_between_what_go_wrote(entry: dict[str, Any]) -> None:
    data, meta = read(entry["file"])
    ends = [32 + int.from_bytes(data[12:16], "little")]
    ends += [segment.file_offset + segment.stored_bytes for segment in meta.segments]
    starts = [segment.file_offset for segment in meta.segments] + [len(data)]
    for end, start in zip(ends, starts, strict=True):
        assert not any(data[end:start])
