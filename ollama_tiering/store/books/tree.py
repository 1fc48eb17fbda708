"""The blocks of all tiers as a forest by parent key, in memory. Pure; the store holds the lock.

Children of one parent are kept sorted by their token bytes: the child that shares the longest
prefix with a prompt is then a neighbour of the place where the prompt's tokens would be inserted.
Compact, for there are many: an only child stands for its list, sets of tiers are shared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ollama_tiering.store.block.key import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    NamespaceId,
    block_key,
)
from ollama_tiering.store.block.window_fields import end_row

NO_LEVELS: Final[frozenset[int]] = frozenset()
TOP_ONLY: Final[frozenset[int]] = frozenset({0})  # compare with `is`: every set is there once
_NEAR: Final = 16  # siblings on either side that are looked at for their windows

_shared: dict[frozenset[int], frozenset[int]] = {NO_LEVELS: NO_LEVELS, TOP_ONLY: TOP_ONLY}


@dataclass(slots=True)
class BlockRecord:
    """One block, in whichever tiers it lies."""

    key: BlockKey
    namespace: NamespaceId
    parent: bytes
    tokens: bytes
    plain_rows: int  # leading rows at which nothing but a token stands; < 0: a window block, and
    # at which row of its parent a window ends with it (window_fields.py)
    file_bytes: int  # of the raw file, which clients see
    last_use: float  # Unix seconds
    created: float = 0.0  # Unix seconds
    hits: int = 0  # how often a prompt matched it; of a window block, how often it was fetched
    levels: frozenset[int] = NO_LEVELS  # indices of the tiers that hold it
    encoded: dict[int, int] = field(default_factory=dict)  # those that hold it encoded: file bytes
    fingerprint: bytes = b""  # which rows these are; empty where the tokens decide their bits
    goes_on: bool = False  # the latest turn wrote it, of a conversation that came back before

    @property
    def wanted(self) -> bool:
        """Whether it is worth more than what was written once."""
        return self.hits > 0 or self.goes_on

    @property
    def rows(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def window(self) -> bool:
        """Whether it is no block of a chain, but has rows of other layers beside its parent's."""
        return self.plain_rows < 0

    def add_level(self, index: int) -> None:
        levels = self.levels | {index}
        self.levels = _shared.setdefault(levels, levels)

    def drop_level(self, index: int) -> None:
        levels = self.levels - {index}
        self.levels = _shared.setdefault(levels, levels)

    def bytes_at(self, level_index: int) -> int:
        """Size of the file at a level that holds it."""
        return self.encoded.get(level_index, self.file_bytes)


class BlockTree:
    def __init__(self) -> None:
        self._records: dict[BlockKey, BlockRecord] = {}
        self._children: dict[bytes, BlockRecord | list[BlockRecord]] = {}
        self._namespaces: dict[NamespaceId, NamespaceId] = {}  # each once in memory
        self._counts: Counter[NamespaceId] = Counter()
        self._window_counts: Counter[NamespaceId] = Counter()  # those without any are not in it
        self._ends: dict[bytes, list[int]] = {}  # rows of a block at which windows end, in order

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self._records.values())

    def get(self, key: BlockKey) -> BlockRecord | None:
        return self._records.get(key)

    def add(self, record: BlockRecord) -> None:
        if record.key in self._records:
            return
        record.namespace = self._namespaces.setdefault(record.namespace, record.namespace)
        parent = self._records.get(BlockKey(record.parent))
        if parent is not None:
            record.parent = parent.key  # the same bytes, once in memory
        elif record.parent == record.namespace:
            record.parent = record.namespace
        record.goes_on = not record.hits and self._goes_on(parent)  # else a start takes minutes
        self._records[record.key] = record
        self._counts[record.namespace] += 1
        if record.window:
            self._window_counts[record.namespace] += 1
            if end := end_row(record.plain_rows):
                insort(self._ends.setdefault(record.parent, []), end)
        siblings = self._children.get(record.parent)
        if siblings is None:
            self._children[record.parent] = record
        elif isinstance(siblings, list):
            insort(siblings, record, key=_entry)
        else:
            self._children[record.parent] = sorted((siblings, record), key=_entry)

    def _goes_on(self, parent: BlockRecord | None) -> bool:
        """Whether what is written after `parent` is the latest turn of a conversation. Each turn
        finds all that was written before it, so hits count the turns since: ... 2, 1, and what is
        new. After a beginning that prompts share they fall from many to 1, or to 0 at once.

        Looks at the blocks of one turn, for the first block of the next.
        """
        if parent is None or parent.hits > 1:
            return False
        if not parent.hits:
            return parent.goes_on
        before = (record.hits for record in self.ancestors(parent.parent))
        return next((hits for hits in before if hits > 1), 0) == 2

    def discard(self, key: BlockKey) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        self._counts[record.namespace] -= 1
        if not self._counts[record.namespace]:
            del self._counts[record.namespace]
        if record.window:
            self._window_counts[record.namespace] -= 1
            if not self._window_counts[record.namespace]:
                del self._window_counts[record.namespace]
            self._discard_end(record)
        siblings = self._children[record.parent]
        if not isinstance(siblings, list):
            del self._children[record.parent]
            return
        del siblings[bisect_left(siblings, _entry(record), key=_entry)]
        if len(siblings) == 1:
            self._children[record.parent] = siblings[0]

    def _discard_end(self, window: BlockRecord) -> None:
        if end := end_row(window.plain_rows):
            ends = self._ends[window.parent]
            del ends[bisect_left(ends, end)]
            if not ends:
                del self._ends[window.parent]

    def counts(self, most: int) -> list[tuple[NamespaceId, int]]:
        """Namespaces and how many blocks each has, those with most blocks first."""
        return self._counts.most_common(most)

    def children(self, key: bytes) -> Sequence[BlockRecord]:
        below = self._children.get(key)
        if below is None:
            return ()
        return below if isinstance(below, list) else (below,)

    def child_count(self, key: bytes) -> int:
        """Blocks that a chain goes on with; window blocks are none."""
        children = self.children(key)
        return len(children) - _window_count(children)

    def windows(self, key: bytes, most: int | None = None) -> Sequence[BlockRecord]:
        """The window blocks that hang on a block; any `most` of them where there are more."""
        children = self.children(key)
        count = _window_count(children)
        return children[: count if most is None else min(count, most)]

    def windows_ending(self, key: bytes, rows: int) -> int:
        """How many windows end within the first rows of a block. None of them is looked at."""
        return bisect_right(self._ends.get(key, ()), rows)

    def is_end(self, record: BlockRecord) -> bool:
        """Whether a chain ends with it. A window block whose block is gone stands for itself, or
        nobody would ever remove it.
        """
        if record.window:
            return record.parent not in self._records
        return not self.child_count(record.key)

    def has_windows(self, namespace: NamespaceId) -> bool:
        """Whether any of its blocks has some: where not, a look-up need not ask each."""
        return namespace in self._window_counts

    def shared_rows(self, record: BlockRecord) -> int | None:
        """Leading rows that it shares with the sibling nearest to it; None: it has no sibling."""
        siblings = self.children(record.parent)
        at = bisect_left(siblings, _entry(record), key=_entry)
        around = siblings[max(0, at - 1) : at + 2]
        near = [other for other in around if other is not record and not other.window]
        prefix = _prefix(record)
        return max((common_rows(_prefix(other), prefix) for other in near), default=None)

    def ancestors(self, key: bytes) -> Iterator[BlockRecord]:
        """Yields the block `key` and those before it, up to the first one of its sequence, as far
        as they are stored.
        """
        record = self._records.get(BlockKey(key))
        while record is not None:
            yield record
            record = self._records.get(BlockKey(record.parent))

    def match(
        self, namespace: NamespaceId, keys: Sequence[BlockKey], tokens: bytes, block_tokens: int
    ) -> list[tuple[BlockRecord, int]]:
        """Blocks that start the prompt and how many rows of each match; only the last in part."""
        step = block_tokens * TOKEN_BYTES
        run = self.run(namespace, namespace, keys, tokens, 0, step)
        at = len(run) * step
        parent: bytes = run[-1].key if run else namespace
        whole = [(record, block_tokens) for record in run]
        return whole + self.best_child(parent, tokens[at : at + step])

    def run(
        self,
        namespace: NamespaceId,
        parent: bytes,
        keys: Sequence[BlockKey],
        tokens: bytes,
        at: int,
        step: int,
    ) -> list[BlockRecord]:
        """Those of `keys` that follow `parent` one after the other and hold `tokens` from byte
        `at` on, `step` bytes each; up to the first that does not.
        """
        chain: list[BlockRecord] = []
        records = self._records
        for key in keys:
            record = records.get(key)
            if (
                record is None
                or record.parent != parent
                or record.tokens != tokens[at : at + step]
                or record.namespace != namespace
            ):
                break
            chain.append(record)
            parent = key
            at += step
        return chain

    def same_tokens(
        self, parent: bytes, tokens: bytes, extras: Sequence[BlockExtra]
    ) -> list[BlockRecord]:
        """The children that hold these tokens, and these extras besides, whatever their rows are:
        where the tokens do not decide the bits of rows there may be several.
        """
        siblings = self.children(parent)
        plain = tokens[: extras[0].row * TOKEN_BYTES] if extras else tokens
        same: list[BlockRecord] = []
        first = bisect_left(siblings, (plain, False, b""), key=_entry)
        for index in range(first, len(siblings)):  # a slice would copy thousands
            record = siblings[index]
            if _prefix(record) != plain:
                break
            if record.window or record.tokens != tokens:
                continue
            named = extras or record.plain_rows < record.rows
            if named and record.key != block_key(parent, tokens, extras, record.fingerprint):
                continue  # something else stands beside the tokens
            same.append(record)
        return same

    def sharing(self, parent: bytes, prefix: bytes, most: int) -> list[BlockRecord]:
        """The children whose tokens begin with these; any `most` of them where there are more."""
        siblings = self.children(parent)
        first = bisect_left(siblings, (prefix, False, b""), key=_entry)
        first = max(first, _window_count(siblings))
        candidates = siblings[first : first + most]
        return [record for record in candidates if _prefix(record).startswith(prefix)]

    def covered_by(self, record: BlockRecord) -> BlockRecord | None:
        """A longer sibling whose tokens start with all of this block's; None when there is none."""
        if record.plain_rows != record.rows:
            return None
        siblings = self.children(record.parent)
        for other in siblings[bisect_left(siblings, (record.tokens, False, b""), key=_entry) :]:
            prefix = _prefix(other)
            if not prefix.startswith(record.tokens):
                break
            if len(prefix) > len(record.tokens):
                return other
        return None

    def covers(self, record: BlockRecord) -> list[BlockRecord]:
        """Shorter siblings without children whose tokens this block's start with."""
        siblings = self.children(record.parent)
        if len(siblings) - (record.key in self._records) <= 0:
            return []
        shorter = []
        plain = _prefix(record)
        for length in range(TOKEN_BYTES, len(plain) + 1, TOKEN_BYTES):
            prefix = plain[:length]
            for other in siblings[bisect_left(siblings, (prefix, False, b""), key=_entry) :]:
                if _prefix(other) != prefix:
                    break
                if (
                    other.tokens == prefix
                    and other.rows < record.rows
                    and not self.child_count(other.key)
                ):
                    shorter.append(other)
        return shorter

    def best_child(self, parent: bytes, tokens: bytes) -> list[tuple[BlockRecord, int]]:
        """The child that shares the most leading rows with `tokens`, and how many; or nothing. Of
        those that share as many (answers to one prompt) one on which a window ends within them.
        """
        siblings = self.children(parent)
        if not siblings or not tokens:
            return []
        insertion = bisect_left(siblings, (tokens, False, b""), key=_entry)
        best: list[tuple[BlockRecord, int]] = []
        at = insertion
        for number in range(max(0, insertion - 1), min(insertion + 1, len(siblings))):
            rows = common_rows(_prefix(siblings[number]), tokens)
            if rows > (best[0][1] if best else 0):
                best, at = [(siblings[number], rows)], number
        if best and self.has_windows(best[0][0].namespace):
            return [(self._with_windows(siblings, at, best[0][1]), best[0][1])]
        return best

    def _with_windows(self, siblings: Sequence[BlockRecord], at: int, rows: int) -> BlockRecord:
        """The one with the most windows that end within `rows` rows; siblings[at] if none has."""
        shared = _prefix(siblings[at])[: rows * TOKEN_BYTES]
        most = 0
        best = siblings[at]
        near = siblings[max(0, at - _NEAR) : at + _NEAR + 1]
        for other in near:
            if _prefix(other).startswith(shared):
                ends = self.windows_ending(other.key, rows)
                if ends > most:
                    most, best = ends, other
        return best


_FIRST_OF_CHAIN: Final = (b"", True, BlockKey(b""))  # before every entry that is no window's


def _prefix(record: BlockRecord) -> bytes:
    return record.tokens[: max(record.plain_rows, 0) * TOKEN_BYTES]


def _entry(record: BlockRecord) -> tuple[bytes, bool, BlockKey]:
    return _prefix(record), not record.window, record.key


def _window_count(siblings: Sequence[BlockRecord]) -> int:
    """They come first."""
    if not siblings or not siblings[0].window:
        return 0
    if siblings[-1].window:  # the chain ends here
        return len(siblings)
    return bisect_left(siblings, _FIRST_OF_CHAIN, key=_entry)


def common_rows(a: bytes, b: bytes) -> int:
    """Leading token ids that two int32 sequences share."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
