from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from ollama_tiering.patchset import elf
from tests.unit.patchset.fake_stock import MACHINE, library


def test_symbols_and_needs_are_read(tmp_path: Path) -> None:
    path = library(
        tmp_path / "lib.so", defined=["a"], wanted=["b"], weak=["c"], needed=["libc.so.6", "x.so"]
    )
    found = elf.read(path)
    assert found == elf.Library(MACHINE, frozenset({"a"}), frozenset({"b"}), ("libc.so.6", "x.so"))


def test_a_library_of_this_system_is_read() -> None:
    """One that Python itself has open."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    name = next(line.split()[-1] for line in maps.splitlines() if "/libc.so" in line)
    found = elf.read(Path(name))
    assert {"malloc", "printf"} <= found.defined
    assert found.machine == MACHINE


def test_a_library_that_is_cut_off_anywhere_is_no_library(tmp_path: Path) -> None:
    whole = library(tmp_path / "lib.so", defined=["a"], wanted=["b"], needed=["c"]).read_bytes()
    path = tmp_path / "cut.so"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"."):
            elf.read(path)


@pytest.mark.parametrize("at", range(0, 64))
@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_a_damaged_head_is_an_error_or_does_not_matter(tmp_path: Path, at: int, value: int) -> None:
    path = library(tmp_path / "lib.so", defined=["a"])
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        assert elf.read(path).defined == {"a"}


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF", bytes(4096)])
def test_something_else_is_no_library(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        elf.read(path)


def test_the_processor_of_a_program_is_read(tmp_path: Path) -> None:
    """Of a program, too, and of one for another processor."""
    assert elf.machine(Path(sys.executable)) == MACHINE
    program = tmp_path / "program"
    library(program)
    content = bytearray(program.read_bytes())
    content[18:20] = elf.MACHINES["arm64"].to_bytes(2, "little")
    program.write_bytes(content)
    assert elf.machine(program) == elf.MACHINES["aarch64"] != elf.MACHINES["x86_64"]
    for other in (b"", b"\x7fELF", b"#!/bin/sh" + bytes(100)):
        program.write_bytes(other)
        assert elf.machine(program) == 0
