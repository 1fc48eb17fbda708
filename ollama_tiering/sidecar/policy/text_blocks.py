"""The blocks of a text and of its windows, as the Go engines store them (docs/format.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ollama_tiering.sidecar.policy.chains import Chains
from ollama_tiering.sidecar.policy.filling import PlannedFile
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    SegmentShape,
    block_key,
    extras_of,
    plan_block,
    window_end_extra,
    window_extra,
)
from ollama_tiering.store.errors import InvalidBlock


class Text(NamedTuple):
    """Tokens (int32 little endian), what stands beside some of them, and which rows its blocks
    have: a fingerprint for each, or none at all where tokens decide the bits of rows.
    """

    tokens: bytes
    extras: Sequence[BlockExtra] = ()
    fingerprints: Sequence[bytes] = ()


class TextRows(NamedTuple):
    """Rows of a text that are stored in one block. With `cells`: those of a window, in cache child
    `child`; a block that ends the window has the cells of all its rows.
    """

    first: int
    rows: int
    child: int = 0
    cells: Sequence[int] = ()
    ends_window: bool = False

    @property
    def end(self) -> int:
        return self.first + self.rows


class TextBlocks:
    """Of one writer. Used by one thread at a time."""

    def __init__(
        self, chains: Chains, shapes: Sequence[SegmentShape], window_children: Sequence[int]
    ) -> None:
        windows = frozenset(window_children)
        self._chains = chains
        self._shapes = [shape for shape in shapes if shape.child not in windows]
        self._window_shapes = {
            child: [shape for shape in shapes if shape.child == child] for child in windows
        }

    def planned(self, text: Text, wanted: Sequence[TextRows]) -> Iterator[PlannedFile]:
        """InvalidBlock for rows that are no block of the text, or whose block has no name yet."""
        step, count = self._chains.block_tokens, len(text.tokens) // TOKEN_BYTES
        for rows in wanted:
            if not 0 < rows.rows <= step - rows.first % step or rows.end > count:
                raise InvalidBlock(f"rows {rows.first} to {rows.end} are in no block of the text")
        blocks = max((rows.first // step + 1 for rows in wanted), default=0)
        fingerprints = text.fingerprints[:blocks] or [b""] * blocks
        if len(fingerprints) < blocks:
            raise InvalidBlock("it is not said which rows all of the blocks have")
        keys: list[BlockKey] = []
        for piece in self._chains.in_pieces(text.tokens, text.extras, fingerprints):
            keys += piece
        for rows in wanted:
            if rows.cells:
                yield self._window(text, rows, keys)
            else:
                yield self._block(text, rows, keys, fingerprints)

    def _block(
        self,
        text: Text,
        rows: TextRows,
        keys: Sequence[BlockKey],
        fingerprints: Sequence[bytes],
    ) -> PlannedFile:
        step = self._chains.block_tokens
        index, rest = divmod(rows.first, step)
        if rest or rows.end != min(rows.first + step, len(text.tokens) // TOKEN_BYTES):
            raise InvalidBlock(f"rows {rows.first} to {rows.end} are no whole block of the text")
        namespace = self._chains.namespace
        parent: bytes = keys[index - 1] if index else namespace
        plan = plan_block(
            namespace=namespace,
            parent=parent,
            tokens=_tokens(text, rows.first, rows.end),
            first_position=rows.first,
            shapes=self._shapes,
            extras=extras_of(text.extras, rows.first, rows.rows),
            fingerprint=fingerprints[index],
        )
        return PlannedFile(plan, parent, fingerprints[index])

    def _window(self, text: Text, rows: TextRows, keys: Sequence[BlockKey]) -> PlannedFile:
        step = self._chains.block_tokens
        index, place = divmod(rows.first, step)
        begin = rows.end - len(
            rows.cells
        )  # of the window; of a block that does not end one, its own
        if begin != rows.first and not (rows.ends_window and 0 <= begin < rows.first and not place):
            raise InvalidBlock(f"{len(rows.cells)} cells of rows {rows.first} to {rows.end}")
        others = []
        for at in (begin, *range((begin // step + 1) * step, rows.first, step)):
            if at == rows.first:
                break
            end = min((at // step + 1) * step, rows.first)
            extra = window_extra(rows.child, at % step, rows.cells[at - begin : end - begin])
            others.append(block_key(keys[at // step], _tokens(text, at, end), [extra]))
        if rows.ends_window:
            extra = window_end_extra(rows.child, place)
        else:
            extra = window_extra(rows.child, place, rows.cells)
        plan = plan_block(
            namespace=self._chains.namespace,
            parent=keys[index],
            tokens=_tokens(text, rows.first, rows.end),
            first_position=(index + 1) * step,
            shapes=self._window_shapes.get(rows.child, ()),
            extras=[extra],
            cells=rows.cells[rows.first - begin :],
            others=others,
        )
        return PlannedFile(plan, keys[index], b"")


def _tokens(text: Text, first: int, end: int) -> bytes:
    return text.tokens[first * TOKEN_BYTES : end * TOKEN_BYTES]
