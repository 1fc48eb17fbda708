"""The Python side does what the golden vectors say; `go test` reads the same files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.config import load_sidecar
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta, verify_payload
from ollama_tiering.store.block.key import (
    BlockExtra,
    LayerSpec,
    Namespace,
    as_namespace,
    namespace_digest,
    prefix_chain,
    tokens_to_bytes,
)
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from tests.tokens import tail_key
from tests.unit.store.encoded import decoded
from tests.vectors import make

VECTORS = Path(__file__).resolve().parents[3] / "vectors"
KEYS: dict[str, Any] = json.loads((VECTORS / "keys.json").read_text())
DESCRIPTIONS: list[dict[str, Any]] = json.loads((VECTORS / "descriptions.json").read_text())[
    "descriptions"
]
SETTINGS: dict[str, Any] = json.loads((VECTORS / "settings.json").read_text())
FILES = make.blocks()
BLOCKS: list[dict[str, Any]] = json.loads((VECTORS / "blocks.json").read_text())["blocks"]


def test_committed_vectors_are_what_the_generator_makes() -> None:
    made = make.documents()
    written = make.BY_GO
    files = [p for p in VECTORS.rglob("*") if p.suffix in (".kvb", ".json")]
    committed = {p.relative_to(VECTORS) for p in files}
    assert {path for path in committed if path.parent != written} == set(made)
    for path, content in made.items():
        assert (VECTORS / path).read_bytes() == content, path


@pytest.mark.parametrize("entry", KEYS["namespaces"], ids=lambda entry: entry["name"])
def test_namespace_digest_equals_the_vector(entry: dict[str, Any]) -> None:
    fields = [(field["name"], field["value"]) for field in entry["fields"]]
    assert namespace_digest(fields).hex() == entry["digest"]


@pytest.mark.parametrize("entry", DESCRIPTIONS, ids=lambda entry: entry["name"])
def test_a_description_gives_the_fields_and_the_digest_of_the_vector(entry: dict[str, Any]) -> None:
    given = dict(entry["description"])
    layers = [LayerSpec(**layer) for layer in given.pop("layers")]
    namespace = Namespace.of(layers=layers, **given)
    fields = [(field["name"], field["value"]) for field in entry["fields"]]
    assert namespace.fields() == fields
    assert namespace_digest(fields).hex() == entry["digest"]


def test_no_two_descriptions_are_one_namespace() -> None:
    assert len({entry["digest"] for entry in DESCRIPTIONS}) == len(DESCRIPTIONS) > 12


@pytest.mark.parametrize("entry", SETTINGS["sockets"], ids=lambda entry: entry["name"])
def test_the_sidecar_listens_where_the_vector_says(
    entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "OLLAMA_KV_TIER_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    for name, value in entry["env"].items():
        monkeypatch.setenv(name, value.replace("{own}", str(own)))
    (tmp_path / "config.toml").touch()
    found = load_sidecar(path=tmp_path / "config.toml").socket_path
    assert str(found) == entry["socket"].replace("{own}", str(own))


@pytest.mark.parametrize("entry", SETTINGS["extras"], ids=lambda entry: entry["name"])
def test_rows_are_rounded_where_the_extra_of_the_vector_says_so(entry: dict[str, Any]) -> None:
    fields = [("model", "m"), ("extra", "devices=none" + entry["extra"])]
    assert TierEncodings().note(namespace_digest(fields), fields) == entry["rounded"]


@pytest.mark.parametrize("entry", KEYS["chains"], ids=lambda entry: entry["name"])
def test_chain_equals_the_vector(entry: dict[str, Any]) -> None:
    digests = {n["name"]: as_namespace(bytes.fromhex(n["digest"])) for n in KEYS["namespaces"]}
    namespace = digests[entry["namespace"]]
    tokens = tokens_to_bytes(entry["tokens"])
    extras = [BlockExtra(e["row"], bytes.fromhex(e["digest"])) for e in entry["extras"]]
    chain = prefix_chain(namespace, tokens, entry["block_tokens"], extras)
    tail = tail_key(namespace, tokens, entry["block_tokens"], extras)
    assert [key.hex() for key in chain] == entry["keys"]
    assert (tail.hex() if tail else None) == entry["tail_key"]


@pytest.mark.parametrize("entry", BLOCKS, ids=lambda entry: entry["file"])
def test_block_file_reads_as_the_vector_says(entry: dict[str, Any]) -> None:
    data = FILES[entry["file"].removesuffix(".kvb")]
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    if entry["expect"] == "unsupported":
        with pytest.raises(UnsupportedFormat):
            read_meta(buffer_reader(data), len(data))
        return
    if entry["expect"] == "encoded":
        raw = decoded(data)
        assert len(raw) == entry["raw_file_bytes"]
        assert hashlib.sha256(raw).hexdigest() == entry["raw_sha256"]
        return
    if entry["expect"] == "encoded-corrupt":
        with pytest.raises(CorruptBlock):
            decoded(data)
        return
    if entry["expect"] == "corrupt-header":
        with pytest.raises(CorruptBlock):
            read_meta(buffer_reader(data), len(data))
        return
    meta = read_meta(buffer_reader(data), len(data))
    assert meta.namespace.hex() == entry["namespace"]
    assert meta.key.hex() == entry["key"]
    assert meta.parent.hex() == entry["parent"]
    assert meta.first_position == entry["first_position"]
    assert meta.tokens == tokens_to_bytes(entry["tokens"])
    assert [(e.row, e.digest.hex()) for e in meta.extras] == [
        (e["row"], e["digest"]) for e in entry["extras"]
    ]
    assert list(meta.cells) == entry["cells"]
    assert [key.hex() for key in meta.others] == entry["window"]
    for segment, wanted in zip(meta.segments, entry["segments"], strict=True):
        assert segment.file_offset == entry["payload_offset"] + wanted["offset"]
        assert pb.SegmentKind.Name(segment.kind) == f"SEGMENT_KIND_{wanted['kind']}"
        assert (segment.child, segment.layer) == (wanted["child"], wanted["layer"])
        assert (segment.dtype, segment.row_bytes) == (wanted["dtype"], wanted["row_bytes"])
        assert segment.crc32c == wanted["crc32c"]
        payload = data[segment.file_offset :][: segment.stored_bytes]
        intact = hashlib.sha256(payload).hexdigest() == wanted["sha256"]
        assert intact
    if entry["expect"] == "ok":
        verify_payload(meta, buffer_reader(data))
    else:
        with pytest.raises(CorruptBlock):
            verify_payload(meta, buffer_reader(data))
