"""What of the overlay only stores, restores, counts and reports. It is not part of a build's name,
so that a newer `tiering` finds what the one before has stored.

Whoever changes one of these files answers a question: may wrong rows have been stored by it as it
was, or rows under a wrong name, or are other bytes stored of a row now? Then NUMBER grows by one,
and nothing that was stored before is found. RECORDED is the digest for which this was answered.
With any other one, as while somebody works on these files, they are part of the name, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

NUMBER: Final = 1
RECORDED: Final = "e505f986c9028687"

# Not: what names rows and builds (key.go, variables.go, libraries.go, ...), which bytes a row has
# (rows/, block.go, window.go), and what takes cells or cuts prompts (the runners' files).
FILES: Final = (
    *("kvtier/tiering/", "kvtier/tierpb/", "kvtier/client.go", "kvtier/dial", "kvtier/crc_"),
    *("kvtier/file_", "kvtier/places.go", "kvtier/reserved.go", "kvtier/scatter_linux.go"),
    *("kvtier/resident_linux.go", "kvtier/memory_linux.go", "kvtier/doc.go"),
    *("api/", "anthropic/", "openai/"),  # tell the counts
)


def digest(overlay: Mapping[str, bytes]) -> str:
    """Changes with each of FILES in `overlay`, which has contents by their paths."""
    state = hashlib.sha256()
    for name, content in sorted(overlay.items()):
        if name.startswith(FILES):
            state.update(f"{name}\0{len(content)}\0".encode() + content)
    return state.hexdigest()[:16]


def part_of_name(overlay: Mapping[str, bytes]) -> tuple[int, str]:
    """What a build's name says of them."""
    found = digest(overlay)
    return NUMBER, "" if found == RECORDED else found
