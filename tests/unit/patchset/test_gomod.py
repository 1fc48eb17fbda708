from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ollama_tiering.errors import PatchConflict
from ollama_tiering.patchset import gomod
from ollama_tiering.patchset.manifest import GoRequire

NEED = GoRequire("example.org/m", "v1.2.3", "h1:aaa=", "h1:bbb=")
SUMS = b"golang.org/x/sys v0.37.0 h1:abc=\n"


def test_sums_are_appended_once() -> None:
    once = gomod._with_sums(SUMS, (NEED,))
    assert once == SUMS + b"example.org/m v1.2.3 h1:aaa=\nexample.org/m v1.2.3/go.mod h1:bbb=\n"
    assert gomod._with_sums(once, (NEED,)) == once


def test_a_last_line_without_newline_is_kept_whole() -> None:
    assert gomod._with_sums(SUMS.rstrip(), (NEED,)) == gomod._with_sums(SUMS, (NEED,))


def test_another_sum_for_the_same_module_is_refused() -> None:
    with pytest.raises(PatchConflict, match="another sum"):
        gomod._with_sums(SUMS + b"example.org/m v1.2.3 h1:forged=\n", (NEED,))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(b"module x\n\ngo 1.24.1\n", (1, 24, 1)), (b"go 1.26\n", (1, 26)), (b"", (0,))],
)
def test_the_go_line_is_read(text: bytes, wanted: tuple[int, ...]) -> None:
    assert gomod.go_version_wanted(text) == wanted


def test_nothing_needed_changes_nothing() -> None:
    assert gomod.render(b"module x\n", SUMS, (), "go") == {}


@pytest.mark.go
def test_go_mod_edit_adds_the_requirement(tmp_path: Path) -> None:
    go = shutil.which("go") or pytest.skip("no go on PATH")
    before = b"module x\n\ngo 1.24.1\n\nrequire golang.org/x/sys v0.37.0\n"
    files = gomod.render(before, SUMS, (NEED,), go)
    assert b"example.org/m v1.2.3" in files["go.mod"]
    assert b"golang.org/x/sys v0.37.0" in files["go.mod"]
    with pytest.raises(PatchConflict, match="go mod edit failed"):
        gomod.render(b"not a go.mod {{{\n", SUMS, (NEED,), go)
