"""The measurements of the store: small runs of the real thing, and what counts as met."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ollama_tiering.bench.plot import bars
from ollama_tiering.bench.tiers import index_at_start, local_files, scale
from ollama_tiering.bench.tiers.results import Ratio, Section
from ollama_tiering.bench.tiers.rig import OpenRamBlock, RandomBlocks, StoreRig
from ollama_tiering.cli import main
from ollama_tiering.cli.bench import bench
from ollama_tiering.client import PutResult
from ollama_tiering.store import BlockKey, FsTier, NamespaceId, TierKind
from ollama_tiering.store.errors import CorruptBlock
from ollama_tiering.system.filesystems import in_memory

needs_tmpfs = pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or shutil.disk_usage("/dev/shm").free < 256 << 20,
    reason="no room in /dev/shm",
)


def test_a_bound_is_the_least_or_the_most() -> None:
    assert Ratio("a", "", "", 0.9, 0.9).met
    assert not Ratio("a", "", "", 0.89, 0.9).met
    assert Ratio("a", "", "", 2.0, 2.0, at_most=True).met
    assert not Ratio("a", "", "", 2.1, 2.0, at_most=True).met
    assert Ratio("a", "", "", 0.0).met
    assert Ratio("a", "", "", 0.89, 0.9).row()[-2:] == ["≥ 0.9", "not met"]
    assert Ratio("a", "", "", 0.89).row()[-2:] == ["", ""]


def test_a_plot_says_every_row_and_value(tmp_path: Path) -> None:
    ratios = [Ratio("one <thing>", "", "", 0.5, 0.8), Ratio("another", "", "", 1.25)]
    bars(tmp_path / "a.svg", "Title", "÷ memcpy", ratios)
    said, _ = drawn(tmp_path / "a.svg")
    names = ["Title", "one <thing>", "0.5", "another", "1.25"]
    assert said == [*names, *(f"{tick / 5:g}" for tick in range(8)), "÷ memcpy"]


def test_bars_of_a_plot_are_as_long_as_their_values(tmp_path: Path) -> None:
    ratios = [Ratio("a", "", "", value) for value in (0.5, 1, 0, math.inf)]
    bars(tmp_path / "a.svg", "Title", "axis", ratios)
    _, (half, whole, nothing, beyond) = drawn(tmp_path / "a.svg")
    assert half == pytest.approx(whole / 2, abs=0.1)
    assert nothing == 0 < whole < beyond
    ratios = [Ratio("a", "", "", value) for value in (1e-6, 1e-4, 1e-2, 0)]
    bars(tmp_path / "a.svg", "Title", "axis", ratios, log=True)
    said, (least, middle, most, nothing) = drawn(tmp_path / "a.svg")
    assert middle - least == pytest.approx(most - middle, abs=0.11)
    assert nothing == 0 < least
    assert said[-6:-1] == ["1e-06", "1e-05", "0.0001", "0.001", "0.01"]


def test_a_plot_of_nothing_is_one(tmp_path: Path) -> None:
    for log in (False, True):
        bars(tmp_path / "a.svg", "Title", "axis", [], log=log)
        bars(tmp_path / "a.svg", "Title", "axis", [Ratio("a", "", "", 0)], log=log)
        assert drawn(tmp_path / "a.svg")[1] == [0]


def test_a_value_stands_beyond_a_bound_that_is_near(tmp_path: Path) -> None:
    ratios = [Ratio("a", "", "", value, 1) for value in (0.2, 0.98, 1.1)]
    bars(tmp_path / "a.svg", "Title", "axis", ratios)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    colours = re.findall(r'<rect [^>]*height="14" fill="(.*?)"', text)
    assert colours == ["#b5543c", "#b5543c", "#4c8a5b"]
    bounds = [float(at) for at in re.findall(r'<path d="M([\d.]+) \d+v21"', text)]
    labels = [float(at) for at in re.findall(r'<text x="([\d.]+)" y="[\d.]+">[\d.]+<', text)]
    assert labels[0] < bounds[0] == bounds[1] < labels[1] < labels[2]


def drawn(path: Path) -> tuple[list[str], list[float]]:
    """What a plot says, and how long its bars are."""
    tree = xml.etree.ElementTree.parse(path)
    texts = [each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}text")]
    bars_of = [each for each in tree.iter("{http://www.w3.org/2000/svg}rect") if each.get("x")]
    return texts, [float(each.get("width", "")) for each in bars_of]


@needs_tmpfs
def test_what_is_read_from_a_cold_disk_is_not_in_ram(tmp_path: Path) -> None:
    blocks = RandomBlocks.of(1 << 20, 4 << 20)
    rig = StoreRig(tmp_path, 4 << 20)
    try:
        rig.put(blocks, list(blocks.files()))
        rig.store.run_pending()
        found = rig.store.match(blocks.ns.digest(), blocks.keys, blocks.tokens, 64)
        assert [block.tier for block in found] == [TierKind.RAM] * 4
        rig.reboot()
        found = rig.store.match(blocks.ns.digest(), blocks.keys, blocks.tokens, 64)
        assert [block.tier for block in found] == [TierKind.LOCAL] * 4
    finally:
        rig.close()
    assert list(tmp_path.iterdir()) == []


@needs_tmpfs
def test_blocks_of_the_ram_tier_are_read_once_and_checked_where_their_rows_lie(
    tmp_path: Path,
) -> None:
    blocks = RandomBlocks.of(1 << 20, 2 << 20)
    rig = StoreRig(tmp_path, 2 << 20)
    try:
        files = list(blocks.files())
        rig.put(blocks, files)
        leased = rig.store.lease(blocks.ns.digest(), blocks.keys).blocks
        with contextlib.closing(OpenRamBlock(leased[0])) as block:
            rows = bytearray(block.rows_bytes)
            block.read_into(memoryview(rows), check=True)
            written = files[0][1]
            ends = [(s.file_offset, s.file_offset + s.stored_bytes) for s in block.meta.segments]
            assert rows == b"".join(written[start:end] for start, end in ends)
            assert str(leased[0].path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
            assert leased[0].path is not None
            Path(leased[0].path).chmod(0o600)
            with Path(leased[0].path).open("r+b") as file:
                file.seek(ends[-1][1] - 1)
                file.write(bytes([written[ends[-1][1] - 1] ^ 1]))
            block.read_into(memoryview(rows), check=False)
            with pytest.raises(CorruptBlock, match="checksum"):
                block.read_into(memoryview(rows), check=True)
            os.truncate(leased[0].path, ends[0][1])
            with pytest.raises(OSError, match="short read"):
                block.read_into(memoryview(rows), check=False)
        with pytest.raises(RuntimeError, match="is not"):
            OpenRamBlock(leased[0])
    finally:
        rig.close()


@needs_tmpfs
@pytest.mark.timeout(600)  # starts five processes, one after the other
def test_the_report_has_a_table_and_a_plot_for_every_part(tmp_path: Path) -> None:
    out = tmp_path / "store.md"
    command = ["store", "--dir", str(tmp_path), "--mb", "64", "--block-mb", "4", "--out", str(out)]
    command += ["--only", "restore,put,lookup,weather", "--records", "640", "-q"]
    done = CliRunner().invoke(bench, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = out.read_text(encoding="utf-8")
    assert text == done.output
    names = ("restore", "put", "lookup", "weather")
    for name in names:
        assert f"](store-{name}.svg)" in text
        assert (tmp_path / f"store-{name}.svg").stat().st_size > 1000
    for what in (
        "RAM, blocks of 4 MiB, copy",
        "cold disk, blocks of 4 MiB",
        "put, blocks of 4 MiB",
    ):
        assert f"| {what} |" in text
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "store.md",
        *(f"store-{name}.svg" for name in names),
    }


def test_very_many_blocks_and_a_soak(tmp_path: Path) -> None:
    said: list[str] = []
    section = scale.measure(tmp_path, 128, 0.1, said.append)
    values = {ratio.what: ratio.value for ratio in section.ratios}
    assert set(values) == {
        "start, no index",
        "start",
        "memory after look-ups",
        "soak, memory, last quarter",
        "soak, most memory",
    }
    assert all(value > 0 for value in values.values())
    assert "soak of 0.1 minutes" in said
    assert list(tmp_path.iterdir()) == []


def test_a_soak_that_loses_blocks_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = PutResult(rows=512, stored_blocks=8)
    monkeypatch.setattr(scale.BlockClient, "put", lambda *arguments: put)
    with pytest.raises(RuntimeError, match="gone"):
        scale.measure(tmp_path, 128, 0.1, lambda text: None)


@pytest.mark.parametrize(
    "wrong", [["--only", "nonsense"], ["--block-mb", "0"], ["--block-mb", "x"], ["--dir", "/none"]]
)
def test_bad_options_are_one_line_and_exit_code_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "store", *wrong])
    assert caught.value.code == 2
    assert wrong[1] in capsys.readouterr().err


def test_json_has_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from ollama_tiering.bench.tiers import weather

    section = Section("weather", "Weather", "÷ healthy", [Ratio("a", "b", "c", 3.0, 2.0, True)])
    monkeypatch.setattr(weather, "measure", lambda disk, say: section)
    done = CliRunner().invoke(bench, ["store", "--only", "weather", "--json", "-q"])
    (result,) = json.loads(done.output)["results"]
    assert result["section"] == "weather"
    assert result["ratios"][0]["value"] == 3.0
    assert result["ratios"][0]["met"] is False


def test_a_start_is_measured_with_and_without_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "DROP_CACHES", tmp_path / "no" / "such")
    said: list[str] = []
    section = index_at_start.measure(tmp_path, 200, said.append, rounds=1)
    values = {ratio.what: ratio.value for ratio in section.ratios}
    cases = ("64 blocks, cold", "64 blocks, warm", "200 blocks, cold")
    assert [what.split(": ")[0] for what in values] == [case for case in cases for _ in range(6)]
    assert all(value > 0 for value in values.values())
    assert any("200 blocks, cold, without" in text for text in said)
    assert any("inodes and directories stayed in memory" in note for note in section.notes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("index", [True, False])
def test_only_a_start_without_the_index_reads_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bool
) -> None:
    local_files.make_files(tmp_path, 0, 66)
    local_files.make_index(tmp_path, 66)
    paths = list(tmp_path.rglob("*.kvb"))
    assert len(paths) == local_files.read_headers(tmp_path) == 66
    assert all(info.st_size > 7 << 20 for info in (path.stat() for path in paths))
    read: set[BlockKey] = set()
    peek = FsTier.peek

    def noting(tier: FsTier, namespace: NamespaceId, key: BlockKey) -> Any:
        read.add(key)
        return peek(tier, namespace, key)

    monkeypatch.setattr(FsTier, "peek", noting)
    started: list[index_at_start.Start] = []
    index_at_start.run(tmp_path, 66, index, SimpleNamespace(send=started.append))
    assert len(read) == (0 if index else 66)
    assert 0 < started[0].newest <= started[0].known


def test_headers_are_out_of_memory_before_a_cold_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    local_files.make_files(tmp_path, 0, 64)
    local_files.read_headers(tmp_path)
    monkeypatch.setattr(local_files, "DROP_CACHES", tmp_path / "no" / "such")
    found = re.search(r"of 64 headers looked at (\d+) were still", local_files.make_cold(tmp_path))
    assert found is not None
    assert int(found[1]) <= 2  # a page that was read last may be in use a little longer
    local_files.read_headers(tmp_path)
    monkeypatch.setattr(local_files, "DROP_CACHES", tmp_path / "drop_caches")
    assert local_files.make_cold(tmp_path).endswith("of 64 headers looked at 64 were still there")
    assert (tmp_path / "drop_caches").read_text() == "3"
