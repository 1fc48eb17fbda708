"""llama-server's user interface without a page, as Ollama has it, from llama.cpp's own templates.

In August 2026 a program of llama.cpp still wrote these two files (`tools/ui/embed.cpp`); in October
CMake fills in templates. We have no CMake here, and without a page there is little to fill in.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ollama_tiering.errors import UnsupportedUpstream

TEMPLATES: Final = ("tools/ui/ui.h.in", "tools/ui/ui.cpp.in")
_VALUES: Final = {"N_ASSETS": "0", "ASSET_ARRAYS": "", "ASSET_TABLE": "", "USE_GZIP": "false"}
_HAS_PAGE: Final = re.compile(r"^#cmakedefine LLAMA_UI_HAS_ASSETS\b.*$", re.MULTILINE)
_LEFT: Final = re.compile(r"@\w+@|^#cmakedefine.*$", re.MULTILINE)


def has_templates(source: Path) -> bool:
    return all((source / name).is_file() for name in TEMPLATES)


def write(source: Path, folder: Path) -> None:
    """`ui.h` and `ui.cpp`. UnsupportedUpstream for a template that asks for something else."""
    for name in TEMPLATES:
        text = _HAS_PAGE.sub("", (source / name).read_text(encoding="utf-8"))
        for word, value in _VALUES.items():
            text = text.replace(f"@{word}@", value)
        if left := _LEFT.search(text):
            raise UnsupportedUpstream(
                f"{name} of this llama.cpp asks for {left[0]}, which is not known here",
                hint="this Ollama is newer than this `tiering`: update `tiering`",
            )
        (folder / Path(name).name.removesuffix(".in")).write_text(text, encoding="utf-8")
