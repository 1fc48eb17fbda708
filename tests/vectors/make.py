"""Writes what pytest and `go test` both read: keys, descriptions, settings, block files.

    python -m tests.vectors.make        the documents, which are committed
    python -m tests.vectors.make DIR    all of it for `go test`, block files too

Block files are made when they are needed: blocks.json has the SHA-256 of each.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.vectors import by_go, encoded, malformed, sound
from tests.vectors.accounts import accounts_document
from tests.vectors.building import parts
from tests.vectors.descriptions import descriptions_document, settings_document
from tests.vectors.keys import keys_document

HERE = Path(__file__).resolve().parent
BY_GO = Path("by_go")  # block files that the Go engines wrote


def blocks() -> dict[str, bytes]:
    """Name -> content of the block files that blocks.json tells of."""
    return {name: content for name, (_, _, content) in _told().items()}


def _told() -> dict[str, tuple[str, str, bytes]]:
    return sound.files() | encoded.files() | malformed.files()


def documents() -> dict[Path, bytes]:
    """Path below HERE -> content, of all that is committed and Python makes."""
    told = {
        "comment": "Made by tests/vectors/make.py. corrupt-header: damage found before the payload "
        "is read; corrupt-payload: the header is fine, a checksum is not; unsupported: a miss, the "
        "file stays; encoded: decodes to the file of raw_sha256; encoded-corrupt: does not. A "
        "reader that does not decode takes both for unsupported.",
        "blocks": [expectation(name, *entry) for name, entry in _told().items()],
    }
    return {
        Path("keys.json"): _text(keys_document()),
        Path("descriptions.json"): _text(descriptions_document()),
        Path("settings.json"): _text(settings_document()),
        Path("accounts.json"): _text(accounts_document()),
        Path("by_go.json"): _text(by_go.document()),
        Path("blocks.json"): _text(told),
    }


def expectation(name: str, expect: str, why: str, content: bytes) -> dict[str, Any]:
    """One entry of blocks.json."""
    out: dict[str, Any] = {
        "file": f"{name}.kvb",
        "expect": expect,
        "why": why,
        "file_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    if expect == "encoded":
        raw, _ = encoded.q8_0_block() if "q8_0" in name else encoded.encoded_block()
        out |= {"raw_file_bytes": len(raw), "raw_sha256": hashlib.sha256(raw).hexdigest()}
    if expect in ("ok", "corrupt-payload"):
        header, payload_offset, payload = parts(content)
        out |= {
            "namespace": header.namespace.hex(),
            "key": header.key.hex(),
            "parent": header.parent.hex(),
            "first_position": header.first_position,
            "rows": len(header.tokens) // 4,
            "tokens": [int(t) for (t,) in struct.iter_unpack("<i", header.tokens)],
            "extras": [{"row": e.row, "digest": e.digest.hex()} for e in header.extras],
            "cells": list(header.cells),
            "window": [key.hex() for key in header.window],
            "created_unix_seconds": header.created_unix_seconds,
            "payload_offset": payload_offset,
            "segments": [_segment(segment, payload) for segment in header.segments],
        }
    return out


def _segment(segment: pb.Segment, payload: bytes) -> dict[str, Any]:
    stored = payload[segment.offset : segment.offset + segment.stored_bytes]
    return {
        "child": segment.child,
        "layer": segment.layer,
        "kind": pb.SegmentKind.Name(segment.kind).removeprefix("SEGMENT_KIND_"),
        "dtype": segment.dtype,
        "row_bytes": segment.row_bytes,
        "offset": segment.offset,
        "stored_bytes": segment.stored_bytes,
        "crc32c": segment.crc32c,
        "sha256": hashlib.sha256(stored).hexdigest(),
    }


def _text(document: dict[str, Any]) -> bytes:
    """A line for each entry of a list."""
    lines = []
    for name, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            entries = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            text = f"[\n{entries}\n]"
        lines.append(f"{json.dumps(name)}: {text}")
    return "{{\n{}\n}}\n".format(",\n".join(lines)).encode()


if __name__ == "__main__":
    files, root = documents(), HERE
    if sys.argv[1:]:
        root = Path(sys.argv[1])
        shutil.copytree(HERE / BY_GO, root / BY_GO)
        files |= {Path("blocks") / f"{name}.kvb": content for name, content in blocks().items()}
    for path, content in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(content)
