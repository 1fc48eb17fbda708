"""Which variables and libraries are in the namespace: the same lists in Go, in C++ and in
docs/format.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GO = ROOT / "patches/overlay/kvtier/variables.go"
CPP = ROOT / "llama_server/src/kvt_identity.cpp"
LIBRARIES_GO = ROOT / "patches/overlay/kvtier/libraries.go"
LIBRARIES_CPP = ROOT / "llama_server/src/kvt_objects.cpp"
PAGE = ROOT / "docs/format.md"


def _in_go(name: str) -> list[str]:
    listed = re.search(rf"\t{name} += \[\]string{{(.*?)}}\n", GO.read_text(), re.DOTALL)
    assert listed is not None
    return re.findall(r'"(\w+)"', listed[1])


def _in_table() -> dict[str, list[str]]:
    table = PAGE.read_text().split("| of | names begin with |\n|---|---|\n")[1].split("\n\n")[0]
    rows = (line.strip("|").split("|", 1) for line in table.splitlines())
    return {of.strip(): re.findall(r"`(\w+)`", names) for of, names in rows}


def _in_cpp(name: str) -> list[str]:
    listed = re.search(rf"string_view {name}\[\] = {{(.*?)}};", CPP.read_text(), re.DOTALL)
    assert listed is not None
    return re.findall(r'"(\w+)"', listed[1])


def test_the_page_lists_the_variables_that_the_runner_counts() -> None:
    table = _in_table()
    excepted = table.pop("not counted")
    listed = sorted(name for names in table.values() for name in names)
    assert listed == sorted(_in_go("families"))
    assert set(excepted) - {"devices"} == {*_in_go("harmless"), "VISIBLE_DEVICES"}


@pytest.mark.skipif(not CPP.exists(), reason="llama-server's list is elsewhere in this checkout")
@pytest.mark.parametrize("name", ["families", "harmless"])
def test_llama_server_counts_the_same(name: str) -> None:
    assert sorted(_in_cpp(name)) == sorted(_in_go(name))


def _libraries(path: Path, begin: str) -> list[str]:
    return re.findall(r'"([^"]+)"', path.read_text().split(begin)[1].split("\n}")[0])


def test_the_page_lists_the_libraries_that_compute_nothing() -> None:
    listed = _libraries(LIBRARIES_GO, "harmlessLibraries = []string{")
    page = " ".join(PAGE.read_text().split())
    sentence = page.split("names of these begin with ")[1].split(". ")[0]
    assert sorted(re.findall(r"`([^`]+)`", sentence)) == sorted(listed)
    assert len(listed) > 40


@pytest.mark.skipif(not LIBRARIES_CPP.exists(), reason="llama-server's list is elsewhere")
def test_llama_server_takes_the_same_libraries_for_harmless() -> None:
    listed = _libraries(LIBRARIES_CPP, "string_view harmless[] = {")
    assert sorted(listed) == sorted(_libraries(LIBRARIES_GO, "harmlessLibraries = []string{"))
