"""The blocks of all tiers as a forest by parent key, in memory. Pure; the store holds the lock.

Children of one parent are kept sorted by their token bytes: the child that shares the longest
prefix with a prompt is then a neighbour of the place where the prompt's tokens would be inserted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ollama_tiering.store.key import TOKEN_BYTES, BlockKey, NamespaceId


@dataclass(slots=True)
class BlockRecord:
    """One block, in whichever tiers it lies."""

    key: BlockKey
    namespace: NamespaceId
    parent: bytes
    tokens: bytes
    plain_rows: int  # leading rows at which nothing but a token stands
    file_bytes: int  # of the raw file, which clients see
    last_use: float  # Unix seconds
    levels: set[int] = field(default_factory=set)  # indices of the tiers that hold it
    encoded: dict[int, int] = field(default_factory=dict)  # those that hold it encoded: file bytes

    @property
    def rows(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def bytes_at(self, level_index: int) -> int:
        """Size of the file at a level that holds it."""
        return self.encoded.get(level_index, self.file_bytes)


class BlockTree:
    def __init__(self) -> None:
        self._records: dict[BlockKey, BlockRecord] = {}
        self._children: dict[bytes, int] = {}
        self._sorted: dict[bytes, list[tuple[bytes, BlockKey]]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self._records.values())

    def get(self, key: BlockKey) -> BlockRecord | None:
        return self._records.get(key)

    def add(self, record: BlockRecord) -> None:
        if record.key in self._records:
            return
        self._records[record.key] = record
        self._children[record.parent] = self._children.get(record.parent, 0) + 1
        if record.plain_rows:
            insort(self._sorted.setdefault(record.parent, []), self._entry(record))

    def discard(self, key: BlockKey) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        left = self._children[record.parent] - 1
        if left:
            self._children[record.parent] = left
        else:
            del self._children[record.parent]
        siblings = self._sorted.get(record.parent)
        if siblings and record.plain_rows:
            del siblings[bisect_left(siblings, self._entry(record))]
            if not siblings:
                del self._sorted[record.parent]

    def child_count(self, key: bytes) -> int:
        return self._children.get(key, 0)

    def ancestors(self, key: bytes) -> Iterator[BlockRecord]:
        """From the block `key` up to the first one of its sequence, as far as they are stored."""
        record = self._records.get(BlockKey(key))
        while record is not None:
            yield record
            record = self._records.get(BlockKey(record.parent))

    def match(
        self, namespace: NamespaceId, keys: Sequence[BlockKey], tokens: bytes, block_tokens: int
    ) -> list[tuple[BlockRecord, int]]:
        """Blocks that start the prompt and how many rows of each match; only the last in part."""
        found: list[tuple[BlockRecord, int]] = []
        step = block_tokens * TOKEN_BYTES
        parent: bytes = namespace
        at = 0
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
            found.append((record, block_tokens))
            parent = key
            at += step
        child, rows = self._best_child(parent, tokens[at : at + step])
        if child is not None:
            found.append((child, rows))
        return found

    def covered_by(self, record: BlockRecord) -> BlockRecord | None:
        """A longer sibling whose tokens start with all of this block's; None when there is none."""
        if record.plain_rows != record.rows:
            return None
        siblings = self._sorted.get(record.parent, [])
        place = bisect_left(siblings, (record.tokens, b""))
        for prefix, key in siblings[place:]:
            if not prefix.startswith(record.tokens):
                break
            if len(prefix) > len(record.tokens):
                return self._records[key]
        return None

    def covers(self, record: BlockRecord) -> list[BlockRecord]:
        """Shorter siblings without children whose tokens this block's start with."""
        shorter = []
        siblings = self._sorted.get(record.parent, [])
        plain = record.tokens[: record.plain_rows * TOKEN_BYTES]
        for length in range(TOKEN_BYTES, len(plain) + 1, TOKEN_BYTES):
            prefix = plain[:length]
            place = bisect_left(siblings, (prefix, b""))
            for tokens, key in siblings[place:]:
                if tokens != prefix:
                    break
                other = self._records[key]
                if (
                    other.tokens == prefix
                    and other.rows < record.rows
                    and not self.child_count(key)
                ):
                    shorter.append(other)
        return shorter

    def _best_child(self, parent: bytes, tokens: bytes) -> tuple[BlockRecord | None, int]:
        siblings = self._sorted.get(parent)
        if not siblings or not tokens:
            return None, 0
        place = bisect_left(siblings, (tokens, b""))
        best: tuple[BlockRecord | None, int] = (None, 0)
        for prefix, key in siblings[max(0, place - 1) : place + 1]:
            rows = common_rows(prefix, tokens)
            if rows > best[1]:
                best = (self._records[key], rows)
        return best

    @staticmethod
    def _entry(record: BlockRecord) -> tuple[bytes, BlockKey]:
        return record.tokens[: record.plain_rows * TOKEN_BYTES], record.key


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
