"""The two files of a user interface without a page, from llama.cpp's templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import UnsupportedUpstream
from ollama_tiering.patchset.llama_server import no_page

HEADER = "#pragma once\n#cmakedefine LLAMA_UI_HAS_ASSETS 1\narray<asset, @N_ASSETS@> & all();\n"
CODE = "@ASSET_ARRAYS@\narray<asset, @N_ASSETS@> all {{@ASSET_TABLE@}};\nreturn @USE_GZIP@;\n"


def source(folder: Path, header: str = HEADER) -> Path:
    for name, text in zip(no_page.TEMPLATES, (header, CODE), strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_templates_are_filled_in(tmp_path: Path) -> None:
    assert not no_page.has_templates(tmp_path)
    assert no_page.has_templates(source(tmp_path))
    no_page.write(tmp_path, tmp_path)
    assert (tmp_path / "ui.h").read_text() == ("#pragma once\n\narray<asset, 0> & all();\n")
    assert (tmp_path / "ui.cpp").read_text() == "\narray<asset, 0> all {{}};\nreturn false;\n"


@pytest.mark.parametrize("more", ["@N_FILES@", "#cmakedefine LLAMA_UI_OTHER"])
def test_what_is_asked_for_and_not_known_is_said(tmp_path: Path, more: str) -> None:
    source(tmp_path, HEADER + more + "\n")
    with pytest.raises(UnsupportedUpstream, match=more):
        no_page.write(tmp_path, tmp_path)
