"""Tests that take long begin first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import order

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("file", order.LONGEST)
def test_the_files_are_there(file: str) -> None:
    assert (REPOSITORY / file).is_file()


def test_the_longest_come_first_and_a_file_stays_together() -> None:
    first, second = order.LONGEST[:2]
    few, many = ["tests/a.py::x"], ["tests/b.py::y", "tests/b.py::x"]
    names = [*few, f"{second}::x", *many, f"{first}::b", f"{first}::a"]
    assert sorted(names, key=order.place(names)) == [
        *(f"{first}::b", f"{first}::a", f"{second}::x", *many, *few),
    ]


def test_the_order_is_kept_on_several_processes() -> None:
    script = (REPOSITORY / "scripts/beside.sh").read_text(encoding="utf-8")
    assert "--no-loadscope-reorder" in script
