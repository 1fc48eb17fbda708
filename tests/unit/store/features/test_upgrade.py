"""Directories of another version: the first cut's are read in full, a later one's are kept.

The archive was written by the code of that time (tests/vectors/first_cut/make.py), not by today's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering import cli
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.blockfile import read_meta, verify_payload
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.key import (
    BlockExtra,
    BlockKey,
    as_key,
    as_namespace,
    prefix_chain,
    tokens_to_bytes,
)
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tools import verify
from ollama_tiering.store.upkeep.index import _VERSION
from ollama_tiering.system.files import fd_reader
from tests.sidecar import SidecarProcess
from tests.tokens import tail_key

ARCHIVE = Path(__file__).resolve().parents[3] / "vectors" / "first_cut" / "store.tar.gz"
BUDGET_BYTES = 16 << 20  # the index's headroom of 8 MiB is taken from it
TODAYS_INDEX_VERSION = _VERSION


class FirstCut:
    """A copy of the directories, and what its maker says lies there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(root, filter="fully_trusted")  # with its modes: 0400 and 0700
        document: dict[str, Any] = json.loads((root / "blocks.json").read_text())
        self.namespace = as_namespace(bytes.fromhex(document["namespace"]))
        self.sha256 = {bytes.fromhex(b["key"]): b["sha256"] for b in document["blocks"]}
        self.conversations: dict[str, tuple[list[int], list[BlockKey]]] = {}
        for block in document["blocks"]:
            tokens, keys = self.conversations.setdefault(block["conversation"], ([], []))
            tokens += block["tokens"]
            keys.append(as_key(bytes.fromhex(block["key"])))

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.root.rglob("*"))
            if path.name.endswith((".kvb", ".bad", "namespace.json"))
        }

    def paths(self, key: bytes) -> list[Path]:
        return sorted(self.root.rglob(f"{key.hex()}.kvb"))

    def index_version(self) -> int:
        path = self.root / "local" / INDEX_NAME
        with contextlib.closing(sqlite3.connect(path)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        return int(version)

    @contextlib.contextmanager
    def opened(self) -> Iterator[TieredStore]:
        tiers = [(TierKind.RAM, "ram"), (TierKind.LOCAL, "local")]
        store = TieredStore(
            [(FsTier(kind, self.root / name), BUDGET_BYTES) for kind, name in tiers],
            index_path=self.root / "local" / INDEX_NAME,
            background=False,
            measure=False,
        )
        try:
            yield store
        finally:
            store.close()

    def give_version(self, key: bytes, version: int) -> None:
        """As a later format would be: another version in the preamble, checksums right."""
        for path in self.paths(key):
            content = bytearray(path.read_bytes())
            struct.pack_into("<I", content, 8, version)
            struct.pack_into("<I", content, 28, crc32c(content[:28]))
            path.chmod(0o600)
            path.write_bytes(content)
            path.chmod(0o400)


@pytest.fixture
def first_cut(tmp_path: Path) -> FirstCut:
    return FirstCut(tmp_path)


def rows(store: TieredStore, cut: FirstCut, tokens: list[int], keys: list[BlockKey]) -> int:
    data, whole = tokens_to_bytes(tokens), keys[: len(tokens) // 4]
    return sum(block.rows for block in store.match(cut.namespace, whole, data, 4))


def test_the_archive_holds_what_is_to_be_read(first_cut: FirstCut) -> None:
    assert first_cut.index_version() == 1
    assert len(first_cut.sha256) == 6
    assert [len(tokens) % 4 for tokens, _ in first_cut.conversations.values()] == [2, 0, 0]
    for tier in ("ram", "local"):
        names = [Path(name).name for name in first_cut.files() if name.startswith(f"{tier}/")]
        assert sum(name.endswith(".kvb") for name in names) == 6
        assert sum(name.endswith(".bad") for name in names) == 1
        assert sum(name == "namespace.json" for name in names) == 1


def test_every_block_of_the_first_cut_is_found_bit_for_bit(
    first_cut: FirstCut, caplog: pytest.LogCaptureFixture
) -> None:
    before = first_cut.files()
    with first_cut.opened() as store:
        assert f"index version 1 is not {TODAYS_INDEX_VERSION}" in caplog.text
        for tokens, keys in first_cut.conversations.values():
            assert rows(store, first_cut, tokens, keys) == len(tokens)
            leased = store.lease(first_cut.namespace, keys)
            for block, key in zip(leased.blocks, keys, strict=True):
                assert block.path is not None
                content = Path(block.path).read_bytes()
                assert hashlib.sha256(content).hexdigest() == first_cut.sha256[key]
            store.release(leased.lease_id)
        report = store.report()
        assert [tier.blocks for tier in report.tiers] == [6, 6]
        assert all(tier.used_bytes > 7 * 20480 for tier in report.tiers)  # the quarantined one too
        assert report.unsaved_blocks == 0
    assert first_cut.files() == before


@pytest.mark.parametrize("tier", ["ram", "local"])
def test_its_files_pass_todays_checks(first_cut: FirstCut, tier: str) -> None:
    for key in first_cut.sha256:
        (path,) = [p for p in first_cut.paths(key) if p.is_relative_to(first_cut.root / tier)]
        with path.open("rb") as file:
            read_at = fd_reader(file.fileno())
            meta = read_meta(read_at, path.stat().st_size)
            verify_payload(meta, read_at)
        assert (meta.key, meta.namespace) == (key, first_cut.namespace)


def test_todays_keys_and_bytes_are_those_of_the_first_cut(first_cut: FirstCut) -> None:
    ns = samples.namespace("first-cut")
    assert ns.digest() == first_cut.namespace
    image = BlockExtra(5, hashlib.sha256(b"an image").digest())
    for name, (tokens, keys) in first_cut.conversations.items():
        extras = [image] if name == "with an image" else []
        data = tokens_to_bytes(tokens)
        made = prefix_chain(first_cut.namespace, data, 4, extras)
        tail = tail_key(first_cut.namespace, data, 4, extras)
        assert [*made, *([tail] if tail else [])] == keys
        for block in samples.sequence(ns, tokens, extras):
            assert hashlib.sha256(block.data).hexdigest() == first_cut.sha256[block.key]


def test_its_index_is_made_anew_and_serves_the_next_start(
    first_cut: FirstCut, caplog: pytest.LogCaptureFixture
) -> None:
    with first_cut.opened():
        pass
    assert first_cut.index_version() == TODAYS_INDEX_VERSION
    caplog.clear()
    with first_cut.opened() as store:
        assert "index" not in caplog.text
        assert [tier.blocks for tier in store.report().tiers] == [6, 6]
    with contextlib.closing(sqlite3.connect(first_cut.root / "local" / INDEX_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM blocks").fetchone() == (12,)


def test_a_sidecar_serves_them_and_takes_new_blocks_after_them(first_cut: FirstCut) -> None:
    before = first_cut.files()
    with SidecarProcess(first_cut.root) as daemon, daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        for tokens, keys in first_cut.conversations.values():
            request = pb.HasRequest(
                namespace=first_cut.namespace,
                keys=keys[: len(tokens) // 4],
                tokens=tokens_to_bytes(tokens),
                block_tokens=4,
            )
            assert stub.Has(request, timeout=10).matched_tokens == len(tokens)
            get = pb.GetRequest(namespace=first_cut.namespace, keys=keys, inline=True)
            for answer in stub.Get(get, timeout=10):
                assert hashlib.sha256(answer.part).hexdigest() == first_cut.sha256[answer.key]
    assert {name: digest for name, digest in first_cut.files().items() if name in before} == before


Command = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def command(daemon: SidecarProcess, *args: str) -> tuple[int, Any]:
        monkeypatch.setenv("XDG_CONFIG_HOME", daemon.environment()["XDG_CONFIG_HOME"])
        with pytest.raises(SystemExit) as caught:
            cli.main([*args, "--socket", str(daemon.socket), "--json"])
        assert isinstance(caught.value.code, int)
        return caught.value.code, json.loads(capsys.readouterr().out)

    return command


def test_verify_finds_the_first_cuts_directories_sound(first_cut: FirstCut, run: Command) -> None:
    with SidecarProcess(first_cut.root) as daemon:
        code, document = run(daemon, "verify")
    assert code == 0
    assert document["blocks"] == 12
    assert [finding["what"] for finding in document["findings"]] == ["quarantined"] * 2


# --- a later version ----------------------------------------------------------------------------


def test_a_later_versions_block_is_refused_by_version_kept_and_counted(
    first_cut: FirstCut, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, keys = first_cut.conversations["with a tail"]
    first_cut.give_version(keys[1], 2)
    before = first_cut.files()
    with first_cut.opened() as store:
        assert caplog.text.count("block format version 2 is unknown") == 2  # once for each file
        assert rows(store, first_cut, tokens, keys) == 4
        assert [b.key for b in store.lease(first_cut.namespace, keys).blocks] == keys[:1]
        assert not store.report_corrupt(first_cut.namespace, keys[1])
        for tier in store.report().tiers:
            assert tier.directory is not None
            assert tier.blocks == 5
            assert tier.stats.quarantined_blocks == 0
            found = [p for p in tier.directory.rglob("*") if p.is_file()]
            assert tier.used_bytes >= sum(p.stat().st_blocks * 512 for p in found)
    assert first_cut.files() == before


def test_a_later_version_behind_a_valid_index_is_set_aside_when_it_is_read(
    first_cut: FirstCut,
) -> None:
    tokens, keys = first_cut.conversations["with a tail"]
    with first_cut.opened():
        pass
    first_cut.give_version(keys[1], 2)  # the index does not know: the size is the same
    before = first_cut.files()
    with first_cut.opened() as store:
        assert rows(store, first_cut, tokens, keys) == 10
        assert not store.report_corrupt(first_cut.namespace, keys[1])
        assert rows(store, first_cut, tokens, keys) == 4
        assert store.report().counters.misses["unknown format"] >= 1
    assert first_cut.files() == before


def test_verify_names_a_later_version_and_leaves_it_even_with_repair(
    first_cut: FirstCut, run: Command
) -> None:
    _, keys = first_cut.conversations["with a tail"]
    first_cut.give_version(keys[1], 2)
    with SidecarProcess(first_cut.root) as daemon:
        for arguments in (["verify"], ["verify", "--repair"]):
            code, document = run(daemon, *arguments)
            assert code == 0  # nothing is damaged
            unknown = [f for f in document["findings"] if f["what"] == verify.UNKNOWN_FORMAT]
            assert len(unknown) == 2
            assert {f["detail"] for f in unknown} == {"block format version 2 is unknown"}
        code, _ = run(daemon, "gc")
        assert code == 0
    assert len(first_cut.paths(keys[1])) == 2


def test_the_directory_of_a_later_layout_is_left_alone(first_cut: FirstCut) -> None:
    later = first_cut.root / "local" / "v2" / "blocks"
    later.parent.mkdir(mode=0o700)
    later.write_bytes(b"of a later version")
    with first_cut.opened() as store:
        assert store.report().tiers[1].blocks == 6
    assert later.read_bytes() == b"of a later version"
