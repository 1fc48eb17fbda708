"""Export and import: what goes out comes back, and nothing else gets in."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.store import samples
from ollama_tiering.errors import StoreDamaged, TieringError, UsageError
from ollama_tiering.store.errors import ArchiveRefused, CorruptBlock, NoRoom
from ollama_tiering.store.tiers.contract import OpenBlock
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.archive import MAX_MANIFEST_BYTES, open_archive, parse_manifest
from ollama_tiering.store.tools.exporting import export_chain
from ollama_tiering.store.tools.importing import Imported, Present, check_archive, import_blocks
from tests.unit.store.archives import TOKENS, Side, edited, members, nothing, pack, plain
from tests.unit.store.support import FILE_BYTES, NS, Bench, path_of


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path / "source")
    side.bench.put(TOKENS)
    yield side
    side.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path / "target")
    yield side
    side.close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One tar of TOKENS, for tests that take it apart."""
    root = tmp_path_factory.mktemp("exported")
    side = Side(root / "store")
    blocks = side.bench.put(TOKENS)
    side.export(blocks[-1].key.hex(), root / "x.tar")
    side.close()
    return (root / "x.tar").read_bytes()


def leaf() -> str:
    return samples.sequence(NS, TOKENS)[-1].key.hex()


# --- there and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("as_directory", [False, True])
def test_there_and_back_is_the_same_bytes(
    source: Side, target: Side, tmp_path: Path, as_directory: bool
) -> None:
    source.export(leaf(), tmp_path / "x", as_directory=as_directory)
    assert target.take(tmp_path / "x") == Imported(3, 0, 3, 3 * FILE_BYTES)
    assert target.bench.rows(TOKENS) == 10
    for block in samples.sequence(NS, TOKENS):
        path = path_of(target.bench.tiers[0][0], block.key)
        assert path.read_bytes() == block.data
    assert target.take(tmp_path / "x") == Imported(3, 3, 0, 0)
    left = [path.name for path in tmp_path.iterdir()]
    assert sorted(left) == ["source", "target", "x"]


def test_only_what_is_missing_is_stored(source: Side, target: Side, tmp_path: Path) -> None:
    source.export(leaf(), tmp_path / "x.tar")
    target.bench.put([*range(4), 77])
    assert target.take(tmp_path / "x.tar") == Imported(3, 1, 2, 2 * FILE_BYTES)


def test_a_tail_that_a_longer_block_covers_is_there_already(
    source: Side, target: Side, tmp_path: Path
) -> None:
    source.export(leaf(), tmp_path / "x.tar")
    target.bench.put([*TOKENS, 92])
    assert target.take(tmp_path / "x.tar") == Imported(3, 3, 0, 0)


def test_a_tar_is_one_that_tar_reads(source: Side, tmp_path: Path) -> None:
    source.export(leaf(), tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as tar:
        names = tar.getnames()
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        document = json.load(manifest)
        sums = [
            hashlib.sha256(file.read()).hexdigest()
            for name in names[1:]
            if (file := tar.extractfile(name))
        ]
        assert {(info.uid, info.mode & 0o777, info.mtime) for info in tar} == {(0, 0o600, 0)}
    assert names[0] == "manifest.json"
    assert [f"blocks/{entry['key']}.kvb" for entry in document["blocks"]] == names[1:]
    assert [entry["sha256"] for entry in document["blocks"]] == sums
    assert (tmp_path / "x.tar").stat().st_mode & 0o777 == 0o600


def test_what_is_there_is_not_replaced(source: Side, tmp_path: Path) -> None:
    existing = tmp_path / "mine"
    existing.write_text("mine")
    with pytest.raises(UsageError):
        source.export(leaf(), existing)
    assert existing.read_text() == "mine"


def test_a_damaged_block_is_not_exported_and_nothing_is_left(source: Side, tmp_path: Path) -> None:
    path = path_of(source.bench.tiers[0][0], samples.sequence(NS, TOKENS)[1].key)
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[4100] ^= 4
    path.write_bytes(content)
    for as_directory in (False, True):
        with pytest.raises(CorruptBlock):
            source.export(leaf(), tmp_path / "x", as_directory=as_directory)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class _Turning:
    """An open block whose payload gives other bytes wherever it is read again."""

    def __init__(self, block: OpenBlock) -> None:
        self._block = block
        self._seen = bytearray(block.file_bytes)
        self.file_bytes = block.file_bytes

    def read_at(self, offset: int, length: int) -> bytes:
        places = range(offset, offset + length)
        data = bytearray(self._block.read_at(offset, length))
        for index, place in enumerate(places):
            if place >= 4096 and self._seen[place]:
                data[index] ^= 255
            self._seen[place] = 1
        return bytes(data)


def test_what_is_exported_is_what_was_checked(source: Side, tmp_path: Path) -> None:
    chain = source.admin.chain(leaf())

    @contextlib.contextmanager
    def turning(opened: AbstractContextManager[OpenBlock]) -> Iterator[Any]:
        with opened as block:
            yield _Turning(block)

    opened = (turning(one) for one in source.admin.opened(chain))
    export_chain(chain, opened, tmp_path / "x", as_directory=True, progress=nothing)
    for block in samples.sequence(NS, TOKENS):
        (written,) = (tmp_path / "x").rglob(f"*{block.key.hex()}*")
        assert written.read_bytes() == block.data


def test_a_chain_whose_description_is_lost_is_not_exported(source: Side, tmp_path: Path) -> None:
    (description,) = source.root.rglob("namespace.json")
    description.write_text('{"model": "another"}')
    with pytest.raises(StoreDamaged, match=r"namespace\.json"):
        source.export(leaf(), tmp_path / "x.tar")


def test_without_room_the_start_is_kept_and_it_is_said(source: Side, tmp_path: Path) -> None:
    source.export(leaf(), tmp_path / "x.tar")
    small = Bench(ram=None, local=2)
    admin = Administration(small.store, alone=True)
    with open_archive(tmp_path / "x.tar") as archive:
        manifest = check_archive(archive, nothing).manifest
        with admin.sink(manifest) as sink, pytest.raises(NoRoom):
            import_blocks(archive, sink, Present(), nothing)
    assert small.rows(TOKENS) == 8


# --- what must not get in -----------------------------------------------------------------------


def resealed(archive: bytes, change: Callable[[list[bytes]], list[bytes]]) -> bytes:
    """Other block files under the same names, with a manifest that fits them."""
    (head, text), *rest = members(archive)
    document = json.loads(text)
    datas = change([data for _, data in rest])
    for entry, data in zip(document["blocks"], datas, strict=True):
        entry |= {"sha256": hashlib.sha256(data).hexdigest(), "file_bytes": len(data)}
    files = [(info, data) for (info, _), data in zip(rest, datas, strict=True)]
    return pack([(head, json.dumps(document).encode()), *files])


def link(name: str, kind: bytes, to: str) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info, b""


def with_one_more(extra: tuple[tarfile.TarInfo, bytes]) -> Callable[[bytes], bytes]:
    return lambda archive: pack([*members(archive), extra])


def instead_of_the_last(extra: Callable[[str], tuple[tarfile.TarInfo, bytes]]) -> Any:
    def build(archive: bytes) -> bytes:
        *rest, (last, _) = members(archive)
        return pack([*rest, extra(last.name)])

    return build


def swap(document: dict[str, Any]) -> None:
    document["blocks"][0], document["blocks"][1] = document["blocks"][1], document["blocks"][0]


def set_at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return edit


def flip(index: int, offset: int) -> Callable[[list[bytes]], list[bytes]]:
    def change(datas: list[bytes]) -> list[bytes]:
        data = bytearray(datas[index])
        data[offset] ^= 1
        return [*datas[:index], bytes(data), *datas[index + 1 :]]

    return change


def huge_claim(archive: bytes) -> bytes:
    """A header that claims 2^63 bytes."""
    info = tarfile.TarInfo("blocks/huge.kvb")
    info.size = (1 << 63) - 1
    return archive[:-1024] + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def long_extended_header(archive: bytes) -> bytes:
    info = tarfile.TarInfo("x" * 300)
    return pack([(info, b""), *members(archive)])


OTHER_CHAIN = [block.data for block in samples.sequence(NS, [*range(200, 208), 1, 2])]
OTHER_MODEL = [block.data for block in samples.sequence(samples.namespace("other"), TOKENS)]

TRICKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda archive: b"",
    "zeros": lambda archive: bytes(10240),
    "no tar": lambda archive: b"#!/bin/sh\n" * 200,
    "cut in the manifest": lambda archive: archive[:700],
    "cut in a block": lambda archive: archive[:9000],
    "cut before the end mark": lambda archive: archive[:-1024],
    "no manifest": lambda archive: pack(members(archive)[1:]),
    "two manifests": lambda archive: pack([members(archive)[0], *members(archive)]),
    "a block twice": lambda archive: pack([*members(archive), members(archive)[1]]),
    "a block missing": lambda archive: pack(members(archive)[:-1]),
    "one file more": with_one_more(plain("readme.txt")),
    "a path upwards": with_one_more(plain("../../escaped")),
    "an absolute path": with_one_more(plain("/tmp/escaped")),
    "a symlink": with_one_more(link("blocks/l", tarfile.SYMTYPE, "/etc/passwd")),
    "a hard link": with_one_more(link("blocks/l", tarfile.LNKTYPE, "manifest.json")),
    "a device": with_one_more(link("blocks/d", tarfile.CHRTYPE, "")),
    "a fifo": with_one_more(link("blocks/f", tarfile.FIFOTYPE, "")),
    "a directory": with_one_more(link("blocks", tarfile.DIRTYPE, "")),
    "a link instead of a block": instead_of_the_last(
        lambda name: link(name, tarfile.SYMTYPE, "/etc/passwd")
    ),
    "a short block": instead_of_the_last(lambda name: plain(name, bytes(4096))),
    "2^63 bytes": huge_claim,
    "an extended header": long_extended_header,
    "reordered": lambda archive: edited(archive, swap),
    "another format": lambda a: edited(a, set_at("format", value="zip")),
    "another version": lambda a: edited(a, set_at("version", value=2)),
    "no namespace": lambda a: edited(a, set_at("namespace", value="")),
    "another namespace": lambda a: edited(a, set_at("namespace", value="00" * 32)),
    "another model": lambda a: edited(a, set_at("description", 1, 1, value="other")),
    "a path as key": lambda a: edited(a, set_at("blocks", 0, "key", value="../../../etc/passwd")),
    "a negative size": lambda a: edited(a, set_at("blocks", 0, "file_bytes", value=-1)),
    "a huge size": lambda a: edited(a, set_at("blocks", 0, "file_bytes", value=1 << 63)),
    "a size that is none": lambda a: edited(a, set_at("blocks", 0, "file_bytes", value=True)),
    "another checksum": lambda a: edited(a, set_at("blocks", 0, "sha256", value="00" * 32)),
    "no blocks": lambda a: edited(a, set_at("blocks", value=[])),
    "blocks as text": lambda a: edited(a, set_at("blocks", value="abc")),
    "a list as manifest": lambda a: pack([plain("manifest.json", b"[]"), *members(a)[1:]]),
    "deep nesting": lambda a: pack([plain("manifest.json", b"[" * 99999), *members(a)[1:]]),
    "a bit in a header": lambda a: resealed(a, flip(1, 40)),
    "a bit in a payload": lambda a: resealed(a, flip(2, 4100)),
    "a bit in the preamble": lambda a: resealed(a, flip(0, 17)),
    "blocks of another chain": lambda a: resealed(a, lambda datas: OTHER_CHAIN),
    "one block of another chain": lambda a: resealed(a, lambda d: [d[0], OTHER_CHAIN[1], d[2]]),
    "another model's blocks": lambda a: resealed(a, lambda d: OTHER_MODEL),
    "blocks under each other's names": lambda a: resealed(a, lambda d: [d[1], d[0], d[2]]),
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_refused_and_leaves_no_trace(
    name: str, exported: bytes, target: Side, tmp_path: Path
) -> None:
    archive = tmp_path / "x.tar"
    archive.write_bytes(TRICKS[name](exported))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ArchiveRefused) as caught:
        target.take(archive)
    assert caught.value.exit_code == 8
    assert target.keys() == set()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_archive_the_tricks_start_from_is_good(
    exported: bytes, target: Side, tmp_path: Path
) -> None:
    for number, good in enumerate((exported, resealed(exported, list), edited(exported, id))):
        archive = tmp_path / f"{number}.tar"
        archive.write_bytes(good)
        assert target.take(archive).blocks == 3
    assert len(target.keys()) == 3


def test_the_tail_first_in_the_chain_is_refused(tmp_path: Path, target: Side) -> None:
    """A chain with a short block in its middle, sealed as if it were right."""
    short, *_ = samples.sequence(NS, [1, 2])
    _, after = samples.sequence(NS, [*range(4), 5])
    source = Side(tmp_path / "source")
    source.bench.put([1, 2])
    source.export(short.key.hex(), tmp_path / "x.tar")
    source.close()
    (head, text), block = members((tmp_path / "x.tar").read_bytes())
    document = json.loads(text)
    document["blocks"].append(
        {
            "key": after.key.hex(),
            "file_bytes": len(after.data),
            "sha256": hashlib.sha256(after.data).hexdigest(),
        }
    )
    more = plain(f"blocks/{after.key.hex()}.kvb", after.data)
    archive = tmp_path / "y.tar"
    archive.write_bytes(pack([(head, json.dumps(document).encode()), block, more]))
    with pytest.raises(ArchiveRefused):
        target.take(archive)
    assert target.keys() == set()


def test_a_directory_is_not_left_by_links_and_fifos_do_not_hang(
    source: Side, target: Side, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    source.export(leaf(), elsewhere, as_directory=True)
    first = f"{samples.sequence(NS, TOKENS)[0].key.hex()}.kvb"

    def copy(name: str) -> Path:
        made = tmp_path / name
        (made / "blocks").mkdir(parents=True)
        for path in elsewhere.rglob("*.*"):
            (made / path.relative_to(elsewhere)).write_bytes(path.read_bytes())
        return made

    linked = copy("linked")
    (linked / "blocks" / first).unlink()
    (linked / "blocks" / first).symlink_to(elsewhere / "blocks" / first)
    fifo = copy("fifo")
    (fifo / "blocks" / first).unlink()
    os.mkfifo(fifo / "blocks" / first)
    whole = copy("whole")
    for path in (whole / "blocks").iterdir():
        path.unlink()
    (whole / "blocks").rmdir()
    (whole / "blocks").symlink_to(elsewhere / "blocks")
    manifest = copy("manifest")
    (manifest / "manifest.json").unlink()
    (manifest / "manifest.json").symlink_to(elsewhere / "manifest.json")
    short = copy("short")
    os.truncate(short / "blocks" / first, 4096)
    huge = copy("huge")
    os.truncate(huge / "manifest.json", MAX_MANIFEST_BYTES + 1)
    for place in (linked, fifo, whole, manifest, short, huge, tmp_path):
        with pytest.raises(ArchiveRefused):
            target.take(place)
    assert target.keys() == set()
    assert target.take(copy("good")).stored == 3


def test_a_file_that_changes_after_the_check_is_not_stored(
    exported: bytes, target: Side, tmp_path: Path
) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(exported)
    with open_archive(path) as archive:
        checked = check_archive(archive, nothing)
        changed = bytearray(exported)
        at = exported.index(b"KVTBLK\r\n") + 4100
        changed[at] ^= 1
        with path.open("r+b") as file:
            file.write(changed)
        with target.admin.sink(checked.manifest) as sink, pytest.raises(NoRoom, match="checksum"):
            import_blocks(archive, sink, Present(), nothing)
    assert target.keys() == set()


def take_bytes(data: bytes) -> int:
    """Blocks stored of this archive; 0 when it was refused, as only a TieringError may say."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "x.tar").write_bytes(data)
        bench = Bench(ram=None, local=64)
        admin = Administration(bench.store, alone=True)
        with contextlib.suppress(TieringError), open_archive(root / "x.tar") as archive:
            checked = check_archive(archive, nothing)
            with admin.sink(archive.manifest) as sink:
                import_blocks(archive, sink, admin.present(checked), nothing)
        left = sorted(path.name for path in root.iterdir())
        assert left == ["x.tar"]
        for key in bench.in_tier(0):
            assert key in {block.key for block in samples.sequence(NS, TOKENS)}
        return len(bench.in_tier(0))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_fuzz_any_change_of_a_byte_is_refused_or_harmless(exported: bytes, data: Any) -> None:
    changed = bytearray(exported)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    stored = take_bytes(bytes(changed))
    assert stored in (0, 3)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_fuzz_pieces_moved_doubled_and_cut_out(exported: bytes, data: Any) -> None:
    step = 512
    pieces = [exported[at : at + step] for at in range(0, len(exported), step)]
    for _ in range(data.draw(st.integers(1, 5))):
        source = data.draw(st.integers(0, len(pieces) - 1))
        to = data.draw(st.integers(0, len(pieces) - 1))
        match data.draw(st.sampled_from(["move", "double", "cut", "overwrite"])):
            case "move":
                pieces.insert(to, pieces.pop(source))
            case "double":
                pieces.insert(to, pieces[source])
            case "cut" if len(pieces) > 1:
                pieces.pop(source)
            case "overwrite":
                pieces[to] = pieces[source]
    assert take_bytes(b"".join(pieces)) in (0, 3)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=4096))
def test_fuzz_any_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(ArchiveRefused):
        parse_manifest(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["version", "namespace", "description", "blocks"]), JSON)
def test_fuzz_any_value_in_the_manifest_is_refused(exported: bytes, field: str, value: Any) -> None:
    document = json.loads(members(exported)[0][1])
    if document[field] == value:
        return
    document[field] = value
    with pytest.raises(ArchiveRefused):
        parse_manifest(json.dumps(document).encode())


def test_the_manifest_has_the_same_length_whatever_its_checksums(exported: bytes) -> None:
    manifest = parse_manifest(members(exported)[0][1])
    blocks = tuple(dataclasses.replace(block, sha256="f" * 64) for block in manifest.blocks)
    other = dataclasses.replace(manifest, blocks=blocks)
    assert len(other.to_bytes()) == len(manifest.to_bytes())
    assert parse_manifest(other.to_bytes()) == other
