"""Counts and lists the blocks in the books: chains, single blocks, totals, ids.

It copies the list of blocks under the store's lock and works on the copy without the lock, so a
change in between is seen before or after it happened. The time is linear in the number of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ollama_tiering.errors import UsageError
from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import reading
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import AmbiguousId, UnknownId
from ollama_tiering.store.values import BlockLine, ChainLine, Selection, TierUse, Totals

Describe = Callable[[NamespaceId], Fields]

_BUILT_ENGINES: Final = ("ollama-go/", "llama.cpp/")

_DIGEST: Final = "sha256-"
_ID: Final = re.compile(r"[0-9a-f]{4,64}")
_DIGITS: Final = (8, 12, 16, 24, 64)
_CANDIDATES: Final = 8


def build_of(engine: str) -> str:
    """The build in a namespace's `engine`, "ollama-go/0.16.3+<build>"; "" if it names no build."""
    return engine.partition("+")[2]


def of_other_build(engine: str, builds: frozenset[str]) -> bool:
    """Whether this is a build of Ollama that is not among `builds`. Never true of a build that was
    made by hand, because nobody can know where its binary is.
    """
    build = build_of(engine)
    by_hand = build.startswith("exe-")
    return engine.startswith(_BUILT_ENGINES) and build not in builds and not by_hand


class _Sum:
    """Tokens, blocks and bytes from the first stored block of a chain to one of its blocks."""

    __slots__ = ("blocks", "complete", "file_bytes", "tier_blocks", "tier_bytes", "tokens")

    def __init__(self, levels: int, *, complete: bool) -> None:
        self.tokens = self.blocks = self.file_bytes = 0
        self.tier_blocks = [0] * levels
        self.tier_bytes = [0] * levels
        self.complete = complete

    def copy(self) -> _Sum:
        other = _Sum(0, complete=self.complete)
        other.tokens, other.blocks, other.file_bytes = self.tokens, self.blocks, self.file_bytes
        other.tier_blocks, other.tier_bytes = self.tier_blocks[:], self.tier_bytes[:]
        return other


class Lister:
    """One view of the books."""

    def __init__(self, state: StoreState, describe: Describe) -> None:
        self._state = state
        self.records = reading.records(state, expire=True)
        self._describe = describe
        self._fields: dict[NamespaceId, Fields] = {}
        self._sums: dict[BlockKey, _Sum] = {}  # of blocks after which chains differ

    def description(self, namespace: NamespaceId) -> Fields:
        if namespace not in self._fields:
            self._fields[namespace] = self._describe(namespace)
        return self._fields[namespace]

    @property
    def id_digits(self) -> int:
        for digits in _DIGITS:
            if len({record.key[: digits // 2] for record in self.records}) == len(self.records):
                break
        return digits

    def resolve(self, prefix: str) -> BlockRecord:
        """The one block whose id begins like this. A window block stands for the block that it
        hangs on. UsageError, UnknownId, AmbiguousId.
        """
        text = prefix.strip().lower()
        if not _ID.fullmatch(text):
            raise UsageError(
                f"{prefix[:80]!r} is no id", hint="4 to 64 hex digits; `tiering ls` shows ids"
            )
        start = bytes.fromhex(text[: len(text) // 2 * 2])
        found = [
            r for r in self.records if r.key.startswith(start) and r.key.hex().startswith(text)
        ]
        if not found:
            raise UnknownId(f"no block with id {text} is stored", hint="`tiering ls` shows ids")
        if len(found) > 1:
            names = [record.key.hex()[: max(16, len(text) + 4)] for record in found[:_CANDIDATES]]
            more = f" and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
            raise AmbiguousId(
                f"id {text} is that of {len(found)} blocks: {', '.join(sorted(names))}{more}",
                hint="give more digits",
            )
        above = self._state.tree.get(BlockKey(found[0].parent)) if found[0].window else None
        return above or found[0]

    def ends(self, selection: Selection) -> list[BlockRecord]:
        """The last blocks of the selected chains: leaves, or the blocks that ids name."""
        if selection.ids:
            found = {record.key: record for record in map(self.resolve, selection.ids)}
            return list(found.values())
        return [record for record in self.records if self._state.tree.is_end(record)]

    def chains(self, selection: Selection) -> Iterator[ChainLine]:
        for record in self.ends(selection):
            if not self._of_model(record.namespace, selection):
                continue
            line = self.chain(record)
            if self._fits(line, line.own_bytes, selection):
                yield line

    def blocks(self, selection: Selection) -> Iterator[BlockLine]:
        """Yields the selected blocks; with ids those of their chains, first to last, each before
        its window blocks.
        """
        records: Iterable[BlockRecord] = self.records
        if selection.ids:
            chains = (self.path(record) for record in self.ends(selection))
            records = {
                record.key: record
                for chain in chains
                for block in chain
                for record in self._with_windows(block)
            }.values()
        ends: dict[BlockKey, tuple[int, bool]] = {}
        for record in records:
            if not self._of_model(record.namespace, selection):
                continue
            line = self._block(record, ends)
            if self._fits(line, line.file_bytes, selection):
                yield line

    def chain(self, record: BlockRecord) -> ChainLine:
        """The chain that ends with this block."""
        state = self._state
        total = self._sum(record)
        own = [record]
        for above in self._above(record):
            if state.tree.child_count(above.key) > 1:
                break
            own.append(above)
        if state.tree.child_count(record.key):
            own = []  # other chains go on from here
        mine = own or [record]
        return ChainLine(
            key=record.key,
            namespace=record.namespace,
            tokens=total.tokens,
            blocks=total.blocks,
            file_bytes=total.file_bytes,
            own_blocks=len(own),
            own_bytes=sum(one.file_bytes for block in own for one in self._with_windows(block)),
            tiers=self._uses(total.tier_blocks, total.tier_bytes),
            created=min(block.created for block in mine),
            last_use=max(block.last_use for block in mine),
            hits=max(block.hits for block in mine),
            pinned=state.pins.keeps(record.key),
            leased=any(state.held(block.key) for block in mine),
            complete=total.complete,
        )

    def path(self, record: BlockRecord) -> list[BlockRecord]:
        """The blocks from the first stored block of the chain to this one."""
        return [record, *self._above(record)][::-1]

    def everything(self) -> Totals:
        """Totals of all that is stored."""
        chains = sum(map(self._state.tree.is_end, self.records))
        file_bytes = sum(record.file_bytes for record in self.records)
        sums = reading.level_sums(self._state)
        counts, sizes = [blocks for blocks, _ in sums], [stored for _, stored in sums]
        return Totals(chains, len(self.records), file_bytes, self._uses(counts, sizes))

    def totals(self, ends: Iterable[BlockRecord]) -> Totals:
        """Totals of the chains that end with these blocks."""
        seen: dict[BlockKey, BlockRecord] = {}
        chains = 0
        for end in ends:
            chains += 1
            at: BlockRecord | None = end
            while at is not None and at.key not in seen:
                seen[at.key] = at
                at = self._state.tree.get(BlockKey(at.parent))
        return self._totals([one for at in seen.values() for one in self._with_windows(at)], chains)

    def totals_of_blocks(self, lines: Iterable[BlockLine]) -> Totals:
        records = (self._state.tree.get(line.key) for line in lines)
        return self._totals([record for record in records if record is not None], 0)

    def other_build(self, namespace: NamespaceId, builds: frozenset[str]) -> bool:
        """Whether a build of Ollama stored it that is not among `builds`. No other build can find
        that.
        """
        return of_other_build(dict(self.description(namespace)).get("engine", ""), builds)

    def gone_model(self, namespace: NamespaceId, present: frozenset[str]) -> bool:
        """Whether the namespace names a model file that is not among those present."""
        model = dict(self.description(namespace)).get("model", "")
        return model.startswith(_DIGEST) and model not in present

    def _totals(self, records: Iterable[BlockRecord], chains: int) -> Totals:
        levels = self._state.levels
        blocks = file_bytes = 0
        counts, sizes = [0] * len(levels), [0] * len(levels)
        for record in records:
            blocks += 1
            file_bytes += record.file_bytes
            for index in tuple(record.levels):
                counts[index] += 1
                sizes[index] += levels[index].lru.stored_bytes(record.key)
        return Totals(chains, blocks, file_bytes, self._uses(counts, sizes))

    def _sum(self, record: BlockRecord) -> _Sum:
        state = self._state
        path: list[BlockRecord] = []
        at: BlockRecord | None = record
        while at is not None and at.key not in self._sums:
            path.append(at)
            at = state.tree.get(BlockKey(at.parent))
        if at is not None:
            total = self._sums[at.key].copy()
        else:
            total = _Sum(len(state.levels), complete=self._starts(path[-1]))
        for block in reversed(path):
            total.tokens += block.rows
            for one in self._with_windows(block):
                total.blocks += 1
                total.file_bytes += one.file_bytes
                for index in tuple(one.levels):
                    total.tier_blocks[index] += 1
                    total.tier_bytes[index] += state.levels[index].lru.stored_bytes(one.key)
            if state.tree.child_count(block.key) > 1:
                self._sums[block.key] = total.copy()
        return total

    def _block(self, record: BlockRecord, ends: dict[BlockKey, tuple[int, bool]]) -> BlockLine:
        state = self._state
        path: list[BlockRecord] = []
        at: BlockRecord | None = record
        while at is not None and at.key not in ends:
            path.append(at)
            at = state.tree.get(BlockKey(at.parent))
        tokens, complete = ends[at.key] if at is not None else (0, self._starts(path[-1]))
        for block in reversed(path):
            tokens += 0 if block.window else block.rows
            ends[block.key] = tokens, complete
        tokens, complete = ends[record.key]
        uses = [
            TierUse(
                state.levels[index].tier.kind, 1, state.levels[index].lru.stored_bytes(record.key)
            )
            for index in sorted(tuple(record.levels))
        ]
        return BlockLine(
            key=record.key,
            namespace=record.namespace,
            parent=record.parent,
            rows=record.rows,
            tokens=tokens,
            file_bytes=record.file_bytes,
            tiers=tuple(uses),
            created=record.created,
            last_use=record.last_use,
            hits=record.hits,
            children=state.tree.child_count(record.key),
            pinned=state.pins.keeps(record.key),
            leased=state.held(record.key),
            complete=complete,
        )

    def _with_windows(self, record: BlockRecord) -> tuple[BlockRecord, ...]:
        """The block, and what hangs on it."""
        return (record, *self._state.tree.windows(record.key))

    def _starts(self, record: BlockRecord) -> bool:
        """Whether no block before it is missing. A block that is just being
        written is not missing.
        """
        return record.parent == record.namespace or record.parent in self._state.writing

    def _above(self, record: BlockRecord) -> Iterator[BlockRecord]:
        above = self._state.tree.ancestors(record.key)
        next(above, None)
        return above

    def _uses(self, counts: list[int], sizes: list[int]) -> tuple[TierUse, ...]:
        levels = self._state.levels
        return tuple(
            TierUse(level.tier.kind, counts[level.index], sizes[level.index])
            for level in levels
            if counts[level.index]
        )

    def _of_model(self, namespace: NamespaceId, selection: Selection) -> bool:
        """A digest matches by its beginning, and only if no name does."""
        wanted = selection.model.lower()
        if not wanted:
            return True
        model = dict(self.description(namespace)).get("model", "").lower()
        if model in selection.models:
            return True
        if not model.startswith(_DIGEST):
            return wanted in model or namespace.hex().startswith(wanted)
        by_digest = model.removeprefix(_DIGEST).startswith(wanted.removeprefix(_DIGEST))
        return not selection.models and (by_digest or namespace.hex().startswith(wanted))

    def _fits(self, line: ChainLine | BlockLine, size: int, selection: Selection) -> bool:
        age = self._state.wall_clock() - line.last_use
        return (
            (age >= selection.older_than_seconds or not selection.older_than_seconds)
            and line.tokens >= selection.min_tokens
            and size >= selection.min_bytes
            and (selection.tier is None or any(use.tier is selection.tier for use in line.tiers))
            and (line.pinned or not selection.pinned)
        )
