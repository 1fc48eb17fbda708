"""A conversation is exported and imported with its window blocks, and nothing else gets in."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.blockfile import encode_block, plan_block
from ollama_tiering.store.block.key import BlockExtra, BlockKey, tokens_to_bytes, window_end_extra
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.errors import ArchiveRefused, CorruptBlock, NoRoom
from ollama_tiering.store.serving.session import CommitResult
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.archive import open_archive, parse_manifest
from ollama_tiering.store.tools.chain_to_export import LeftOut, with_whole_windows
from ollama_tiering.store.tools.exporting import export_chain
from ollama_tiering.store.tools.importing import (
    BlockSink,
    Imported,
    Present,
    check_archive,
    import_blocks,
)
from tests.unit.store.archives import TOKENS, Side, edited, members, nothing, pack, plain
from tests.unit.store.support import NAMESPACE, NS, Bench, keys_of, path_of

BLOCKS = samples.sequence(NS, TOKENS)
OTHER = samples.window(NS, BLOCKS[1], TOKENS[4:8], 4, first=1)
END = samples.window(NS, BLOCKS[2], TOKENS[8:], 8, others=[OTHER])
STATE = samples.state(NS, BLOCKS[0], TOKENS[3], 0, row=3, row_bytes=64)
WINDOWS = [STATE, OTHER, END]  # as they hang on the chain's blocks


def leaf() -> str:
    return BLOCKS[-1].key.hex()


def fill(side: Side) -> Side:
    side.bench.put(TOKENS)
    assert all(result.stored for result in side.bench.try_put(WINDOWS))
    return side


def export(side: Side, target: Path, *, as_directory: bool = False) -> list[LeftOut]:
    """What `tiering export` does."""
    admin = side.admin
    chain, left_out = with_whole_windows(admin.chain(leaf()), admin.opened, nothing)
    opened = admin.opened(chain)
    export_chain(chain, opened, target, as_directory=as_directory, progress=nothing)
    return left_out


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Side]:
    side = fill(Side(tmp_path / "source"))
    yield side
    side.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path / "target")
    yield side
    side.close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("exported")
    side = fill(Side(root / "store"))
    assert export(side, root / "x.tar") == []
    side.close()
    return (root / "x.tar").read_bytes()


# --- there and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("as_directory", [False, True])
def test_windows_go_out_and_come_back(
    source: Side, target: Side, tmp_path: Path, as_directory: bool
) -> None:
    assert export(source, tmp_path / "x", as_directory=as_directory) == []
    size = sum(len(one.data) for one in (*BLOCKS, *WINDOWS))
    assert target.take(tmp_path / "x") == Imported(6, 0, 6, size)
    for one in (*BLOCKS, *WINDOWS):
        path = path_of(target.bench.tiers[0][0], one.key)
        assert path.read_bytes() == one.data
    found = target.bench.match(TOKENS)
    named = [[window.key for window in block.attached] for block in found]
    assert named == [[one.key] for one in (STATE, OTHER, END)]
    assert target.take(tmp_path / "x") == Imported(6, 6, 0, 0)


def test_the_manifest_says_that_there_are_windows_where_there_are(
    exported: bytes, source: Side, tmp_path: Path
) -> None:
    (_, text), *files = members(exported)
    document = json.loads(text)
    assert document["version"] == 2
    names = [f"blocks/{one.key.hex()}.kvb" for one in (*BLOCKS, *WINDOWS)]
    assert [info.name for info, _ in files] == names
    assert [entry["key"] for entry in document["windows"]] == [one.key.hex() for one in WINDOWS]
    manifest = parse_manifest(text)
    assert parse_manifest(manifest.to_bytes()) == manifest
    for level in source.bench.state.levels:
        for window in WINDOWS:
            with source.bench.state.lock:
                source.bench.state.forget_copy(level, window.key)
    export(source, tmp_path / "plain.tar")
    (_, text), *_ = members((tmp_path / "plain.tar").read_bytes())
    assert json.loads(text)["version"] == 1  # which any reader knows
    assert "windows" not in json.loads(text)


def test_only_windows_that_are_missing_are_stored(
    exported: bytes, target: Side, tmp_path: Path
) -> None:
    (tmp_path / "x.tar").write_bytes(exported)
    target.bench.put(TOKENS)
    target.bench.try_put([OTHER])
    assert target.take(tmp_path / "x.tar") == Imported(6, 4, 2, len(STATE.data) + len(END.data))


def test_what_hung_on_a_tail_that_a_longer_block_covers_is_not_wanted(
    exported: bytes, target: Side, tmp_path: Path
) -> None:
    (tmp_path / "x.tar").write_bytes(exported)
    target.bench.put([*TOKENS, 92])
    done = target.take(tmp_path / "x.tar")
    assert (done.blocks, done.present, done.stored) == (6, 4, 2)
    assert target.keys() >= keys_of([STATE, OTHER])
    assert target.take(tmp_path / "x.tar") == Imported(6, 6, 0, 0)


class Leasing:
    """A sink whose blocks are in use once they are stored."""

    def __init__(self, sink: BlockSink, bench: Bench) -> None:
        self._sink, self._bench = sink, bench

    def put(self, key: BlockKey, parts: Iterator[tuple[bytes, bool]]) -> CommitResult:
        result = self._sink.put(key, parts)
        self._bench.store.lease(NAMESPACE, [key])
        return result


def test_without_room_for_windows_the_chain_is_there(exported: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(exported)
    bench = Bench(ram=None, local=4)
    admin = Administration(bench.store, alone=True)
    with open_archive(tmp_path / "x.tar") as archive:
        manifest = check_archive(archive, nothing).manifest
        with admin.sink(manifest) as sink, pytest.raises(NoRoom):
            import_blocks(archive, Leasing(sink, bench), Present(), nothing)
    assert bench.rows(TOKENS) == 10


def test_a_damaged_window_is_left_out_with_the_window_that_it_is_part_of(
    source: Side, target: Side, tmp_path: Path
) -> None:
    path = path_of(source.bench.tiers[0][0], OTHER.key)
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[4100] ^= 4
    path.write_bytes(content)
    left_out = export(source, tmp_path / "x.tar")
    assert [one.key for one in left_out] == [OTHER.key, END.key]
    assert "checksum" in left_out[0].reason
    assert left_out[1].reason == "another block of its window is not there"
    assert target.take(tmp_path / "x.tar").blocks == 4
    assert target.keys() == keys_of([*BLOCKS, STATE])


def test_one_that_goes_away_before_it_is_read_is_left_out(source: Side, tmp_path: Path) -> None:
    chain = source.admin.chain(leaf())
    for level in source.bench.state.levels:
        with source.bench.state.lock:
            source.bench.state.forget_copy(level, END.key)
    chain, left_out = with_whole_windows(chain, source.admin.opened, nothing)
    assert [key for key, _ in chain.windows] == [STATE.key, OTHER.key]
    assert [(one.key, one.reason) for one in left_out] == [(END.key, "block is gone")]


def test_a_damaged_block_of_the_chain_ends_it(source: Side, tmp_path: Path) -> None:
    path = path_of(source.bench.tiers[0][0], BLOCKS[1].key)
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[4100] ^= 4
    path.write_bytes(content)
    with pytest.raises(CorruptBlock):
        export(source, tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()


def test_verify_reads_windows_and_takes_a_damaged_one_only(source: Side) -> None:
    path = path_of(source.bench.tiers[0][0], END.key)
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[4100] ^= 4
    path.write_bytes(content)
    found = [f for step in source.admin.verify(repair=True) for f in step.findings]
    assert [(one.what, one.repaired) for one in found] == [("damaged", True)]
    assert END.key.hex() in found[0].path
    assert source.keys() == keys_of([*BLOCKS, STATE, OTHER])


# --- what must not get in -----------------------------------------------------------------------

Fields = dict[str, object]


def forged(**fields: object) -> samples.SampleBlock:
    """END with other fields, and checksums and a key that are right for them."""
    tokens = fields.pop("tokens", TOKENS[8:])
    assert isinstance(tokens, list)
    cells = fields.pop("cells", range(100, 100 + len(tokens)))
    wanted: Fields = {
        "namespace": NAMESPACE,
        "parent": BLOCKS[2].key,
        "first_position": 12,
        "extras": [window_end_extra(0, 0)],
        "others": [OTHER.key],
        **fields,
    }
    plan = plan_block(
        tokens=tokens_to_bytes(tokens),
        shapes=[SegmentShape(0, 0, pb.SEGMENT_KIND_K, "f16", 64)],
        cells=cells,  # type: ignore[arg-type]
        created_unix_seconds=1,
        **wanted,  # type: ignore[arg-type]
    )
    data = encode_block(plan, [bytes(length) for _, length in plan.spans])
    parent = wanted["parent"]
    assert isinstance(parent, bytes)
    return samples.SampleBlock(plan.key, parent, plan.rows, True, data)


def with_windows(archive: bytes, windows: list[samples.SampleBlock]) -> bytes:
    """The chain of an archive with other window blocks, and a manifest that fits them."""
    (head, text), *rest = members(archive)
    document = json.loads(text)
    document["windows"] = [
        {
            "key": one.key.hex(),
            "file_bytes": len(one.data),
            "sha256": hashlib.sha256(one.data).hexdigest(),
        }
        for one in windows
    ]
    files = [plain(f"blocks/{one.key.hex()}.kvb", one.data) for one in windows]
    return pack([(head, json.dumps(document).encode()), *rest[: len(BLOCKS)], *files])


def instead(window: samples.SampleBlock) -> Callable[[bytes], bytes]:
    return lambda archive: with_windows(archive, [STATE, OTHER, window])


def in_the_chain(archive: bytes) -> bytes:
    """A window block as the chain's last one."""
    (head, text), *rest = members(archive)
    document = json.loads(text)
    cells = forged(parent=BLOCKS[1].key, first_position=8, extras=[], others=[], tokens=[90, 91])
    assert cells.key == BLOCKS[2].key  # without an extra it has the very name of the tail
    document["version"] = 1
    del document["windows"]
    document["blocks"][2] |= {
        "file_bytes": len(cells.data),
        "sha256": hashlib.sha256(cells.data).hexdigest(),
    }
    tail = plain(f"blocks/{cells.key.hex()}.kvb", cells.data)
    return pack([(head, json.dumps(document).encode()), *rest[:2], tail])


ELSEWHERE = samples.sequence(NS, [1, 2])[0]
WRONG_CELLS = b"".join((END.data[:40], bytes([END.data[40] ^ 1]), END.data[41:]))

TRICKS: dict[str, Callable[[bytes], bytes]] = {
    "on a block of another chain": instead(forged(parent=ELSEWHERE.key)),
    "on another window block": instead(forged(parent=OTHER.key)),
    "on the namespace": instead(forged(parent=NAMESPACE, first_position=0)),
    "before its place": instead(forged(first_position=8)),
    "after its place": instead(forged(first_position=16)),
    "between two places": instead(forged(first_position=13)),
    "other tokens": instead(forged(tokens=[90, 92])),
    "more tokens than its block": instead(forged(tokens=[90, 91, 92])),
    "no cells": instead(forged(cells=(), others=[])),
    "no extra": instead(forged(extras=[])),
    "an extra elsewhere": instead(forged(extras=[BlockExtra(1, bytes(32))])),
    "an extra too many": instead(forged(extras=[window_end_extra(0, 0), BlockExtra(1, bytes(32))])),
    "an extra that is no digest": instead(forged(extras=[BlockExtra(0, b"x")])),
    "of another namespace": instead(forged(namespace=bytes(31) + b"x")),
    "names one that is missing": instead(forged(others=[OTHER.key, ELSEWHERE.key])),
    "names a block of the chain": instead(forged(others=[BLOCKS[0].key])),
    "names what is no key": instead(forged(others=[b"x"])),
    "a bit in its header": lambda a: with_windows(
        a,
        [
            STATE,
            OTHER,
            samples.SampleBlock(END.key, END.parent, END.rows, True, WRONG_CELLS),
        ],
    ),
    "twice": lambda a: edited(a, lambda d: d["windows"].append(d["windows"][0])),
    "once more as a block": lambda a: edited(a, lambda d: d["windows"].append(d["blocks"][0])),
    "missing": lambda a: pack(members(a)[:-1]),
    "not in the manifest": lambda a: edited(a, lambda d: d["windows"].pop()),
    "no list": lambda a: edited(a, lambda d: d.update(windows="abc")),
    "not named": lambda a: edited(a, lambda d: d.pop("windows")),
    "of the first version": lambda a: edited(a, lambda d: d.update(version=1)),
    "another checksum": lambda a: edited(a, lambda d: d["windows"][0].update(sha256="00" * 32)),
    "in the chain": in_the_chain,
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_refused_and_leaves_no_trace(
    name: str, exported: bytes, target: Side, tmp_path: Path
) -> None:
    (tmp_path / "x.tar").write_bytes(TRICKS[name](exported))
    with pytest.raises(ArchiveRefused) as caught:
        target.take(tmp_path / "x.tar")
    assert caught.value.exit_code == 8
    assert target.keys() == set()


def test_cells_that_are_not_one_for_each_row_are_refused(
    exported: bytes, target: Side, tmp_path: Path
) -> None:
    (tmp_path / "x.tar").write_bytes(instead(forged(cells=[1, 2, 3]))(exported))
    with pytest.raises(ArchiveRefused, match="3 cells are not one for each of 2 rows"):
        target.take(tmp_path / "x.tar")
    assert target.keys() == set()


def test_the_archives_the_tricks_start_from_are_good(
    exported: bytes, target: Side, tmp_path: Path
) -> None:
    goods = (exported, instead(forged())(exported), edited(exported, id), pack(members(exported)))
    for number, good in enumerate(goods):
        (tmp_path / f"{number}.tar").write_bytes(good)
        assert target.take(tmp_path / f"{number}.tar").blocks == 6
    assert forged().key == END.key
    with tarfile.open(tmp_path / "0.tar") as tar:
        assert len(tar.getnames()) == 7


def test_what_has_cells_and_is_no_window_block_is_not_stored() -> None:
    bench = Bench()
    bench.put(TOKENS)
    for wrong in (
        forged(extras=[]),
        forged(extras=[BlockExtra(1, bytes(32))]),
        forged(parent=NAMESPACE, first_position=0, tokens=[90, 93]),
    ):
        (result,) = bench.try_put([wrong])
        assert not result.stored
        assert result.reason == "it has cells, and is no window block otherwise"
