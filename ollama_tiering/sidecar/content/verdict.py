"""Whether files that an engine has loaded are what they are called. Pure.

A name of the form sha256-... claims what is in the file, as those of Ollama's blobs do. Blocks of a
file that is not so are neither stored nor served: they would be found by those who have the right
one. Any other name claims nothing, and the digest itself is needed in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.sidecar.content.contents import BEING_READ, Content

_BLOB: Final = re.compile(r"sha256-([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class FilesVerdict:
    """Of all files of one engine. With neither a reason nor doubt they are sound."""

    pending: str = ""  # why it is not known yet
    refusal: str = ""  # why nothing of the model is stored or restored, as long as it is loaded
    digests: tuple[str, ...] = ()  # hex, of every file; only of sound ones


def claimed(name: str) -> str:
    """The digest that a file's name claims, in hex; empty where it claims none."""
    found = _BLOB.fullmatch(name)
    return found[1] if found else ""


def verdict(files: Sequence[LoadedFile], contents: Sequence[Content]) -> FilesVerdict:
    """A refusal counts more than a file that is still being read."""
    for file, content in zip(files, contents, strict=True):
        if content.doubt and not content.passing:
            return FilesVerdict(refusal=content.doubt)
        if content.digest and claimed(file.name) not in ("", content.digest):
            return FilesVerdict(refusal=damaged(file.path, content.digest))
    if not all(content.digest for content in contents):
        doubts = [content.doubt for content in contents if content.doubt]
        return FilesVerdict(pending=next(iter(doubts), BEING_READ))
    return FilesVerdict(digests=tuple(content.digest for content in contents))


def damaged(path: str, digest: str) -> str:
    return (
        f"{path!a} is damaged: its content is sha256-{digest[:12]}..., not what its name says; "
        "`ollama rm` the model and pull it again"
    )
