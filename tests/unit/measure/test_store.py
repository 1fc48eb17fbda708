"""The measurements of the store: a small run of the real thing, and what counts as met."""

from __future__ import annotations

import math
import re
import shutil
import xml.etree.ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from measure.plot import bars
from measure.results import Ratio
from measure.store.__main__ import store

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
@pytest.mark.timeout(600)  # starts five processes, one after the other
def test_the_report_has_a_table_and_a_plot_for_every_part(tmp_path: Path) -> None:
    out = tmp_path / "store.md"
    command = ["--dir", str(tmp_path), "--mb", "64", "--block-mb", "4", "--out", str(out), "-q"]
    names = ("restore", "put", "lookup", "scale", "weather")
    command += ["--only", ",".join(names), "--records", "640", "--files", "128"]
    done = CliRunner().invoke(store, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = out.read_text(encoding="utf-8")
    assert text == done.stdout
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
