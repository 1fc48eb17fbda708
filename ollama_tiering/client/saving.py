"""Blocks as a client writes them: laid out, checksummed, and written to the file that the sidecar
named.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ollama_tiering.client.restored import KINDS
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    BlockPlan,
    Namespace,
    SegmentShape,
    align,
    block_key,
    crc32c,
    plan_block,
)


@dataclass(frozen=True, slots=True)
class Link:
    """One block of a prompt's chain, the tail included."""

    key: BlockKey
    parent: bytes
    tokens: bytes
    extras: list[BlockExtra]  # rows count from the block's start


def chain(ns: Namespace, tokens: bytes, extras: Sequence[BlockExtra]) -> list[Link]:
    block_tokens = int(ns.block_tokens)
    step = block_tokens * TOKEN_BYTES
    links: list[Link] = []
    parent: bytes = ns.digest()
    for index, start in enumerate(range(0, len(tokens), step)):
        first = index * block_tokens
        inside = tokens[start : start + step]
        here = [e for e in extras if first <= e.row < first + len(inside) // TOKEN_BYTES]
        here = [BlockExtra(e.row - first, e.digest) for e in sorted(here, key=lambda e: e.row)]
        links.append(Link(block_key(parent, inside, here), parent, inside, here))
        parent = links[-1].key
    return links


@dataclass(slots=True)
class Filling:
    """A block that is ready to be written."""

    plan: BlockPlan
    parent: bytes
    tail: bool
    payload: list[memoryview]

    def write_to(self, path: Path) -> None:
        """Fills the file that a reservation named. OSError if it is not as a reserved one is."""
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size != self.plan.file_bytes:
                raise OSError(errno.EINVAL, "not a reserved file", str(path))
            for (offset, _), part in zip(self.plan.spans, self.payload, strict=True):
                _write_all(fd, part, offset)
            _write_all(fd, memoryview(self._head()), 0)
        finally:
            os.close(fd)

    def to_bytes(self) -> bytes:
        padded = [bytes(part).ljust(align(part.nbytes), b"\0") for part in self.payload]
        return self._head() + b"".join(padded)

    def _head(self) -> bytes:
        return self.plan.head([crc32c(part) for part in self.payload])


def plan(ns: Namespace, index: int, link: Link, segments: Mapping[Any, Any]) -> Filling:
    """Lays out block `index`. Its rows are keyed by ([child,] layer, "k" or "v")."""
    block_tokens = int(ns.block_tokens)
    rows = len(link.tokens) // TOKEN_BYTES
    places = {(key if len(key) == 3 else (0, *key)): data for key, data in segments.items()}
    order = sorted(places, key=lambda place: (place[0], place[1], KINDS[place[2]]))
    shapes, payload = [], []
    for child, layer, kind in order:
        view = _bytes_of(places[child, layer, kind])
        if not view.nbytes or view.nbytes % rows:
            raise ValueError(f"{view.nbytes} bytes of layer {layer} are not {rows} rows")
        row_bytes = view.nbytes // rows
        shapes.append(SegmentShape(child, layer, KINDS[kind], ns.cache_dtype, row_bytes))
        payload.append(view)
    laid_out = plan_block(
        namespace=ns.digest(),
        parent=link.parent,
        tokens=link.tokens,
        first_position=index * block_tokens,
        shapes=shapes,
        extras=link.extras,
    )
    return Filling(laid_out, link.parent, rows < block_tokens, payload)


def _bytes_of(data: Any) -> memoryview:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).data.cast("B")
    return memoryview(data).cast("B")


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
