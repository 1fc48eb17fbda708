"""What our library is linked against, as a source that is compiled into it.

When it is loaded, before anything else of it runs, it looks whether the libraries beside it are the
same (`llama_server/src/kvt_linked.h`): Ollama may have been updated since. A build id is taken as
it is; a file without one is known by its bytes, so that links and copies do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import google_crc32c

from ollama_tiering.patchset import elf

FILE: Final = "kvt_linked_table.cpp"
_SOURCE: Final = """\
#include "kvt_linked.h"

namespace {{

constexpr kvt::linked libraries[] = {{
{rows}
}};

__attribute__((constructor(101))) void require_linked() {{
    kvt::require_linked(libraries, sizeof libraries/sizeof *libraries);
}}

}} // namespace
"""


def source(libraries: Iterable[Path]) -> str:
    """C++ that ends the process where one of them is loaded and is another. OSError."""
    rows = [f'    {{ "{path.name.partition(".so")[0]}", "{mark(path)}" }},' for path in libraries]
    return _SOURCE.format(rows="\n".join(rows))


def mark(path: Path) -> str:
    """As `kvt::linked` says."""
    if build_id := elf.build_id(path):
        return f"id:{build_id}"
    content = path.read_bytes()
    return f"file:{len(content)}-{google_crc32c.value(content):08x}"
