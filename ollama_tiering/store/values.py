"""What the store holds, as people and tools see it: values only.

A chain is one conversation: a leaf of the block tree and everything that leads to it. Its id is the
key of its last block in hex; any prefix that no other block shares stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import TierKind


@dataclass(frozen=True, slots=True)
class Selection:
    """Which chains a command means. Every condition must hold; without a condition it means all."""

    ids: tuple[str, ...] = ()  # hex prefixes
    model: str = ""  # part of the model's name, prefix of its digest, or of the namespace in hex
    models: tuple[str, ...] = ()  # file names of the models that are meant by it
    older_than_seconds: float = 0.0  # not used for this time
    min_tokens: int = 0
    min_bytes: int = 0
    tier: TierKind | None = None  # at least one block there
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class TierUse:
    tier: TierKind
    blocks: int
    stored_bytes: int  # physical


@dataclass(frozen=True, slots=True)
class BlockLine:
    key: BlockKey
    namespace: NamespaceId
    parent: bytes
    rows: int
    tokens: int  # from the start of the conversation to the end of this block, or of the one it
    # hangs on
    file_bytes: int
    tiers: tuple[TierUse, ...]
    created: float  # Unix seconds
    last_use: float
    hits: int  # how often a prompt matched it; of a window block, how often it was fetched
    children: int
    pinned: bool
    leased: bool
    complete: bool  # everything that leads to it is stored


def window_keys(blocks: Iterable[BlockLine]) -> set[BlockKey]:
    """The window blocks among these blocks. Their `tokens` do not go beyond the end of the block
    that they hang on, which must be among these blocks, too.
    """
    lines = list(blocks)
    tokens: dict[bytes, int] = {line.key: line.tokens for line in lines}
    return {line.key for line in lines if tokens.get(line.parent) == line.tokens}


@dataclass(frozen=True, slots=True)
class ChainLine:
    key: BlockKey  # of its last block
    namespace: NamespaceId
    tokens: int
    blocks: int
    file_bytes: int  # of all its blocks, those it shares with other chains too
    own_blocks: int  # that no other chain uses: what `rm` takes
    own_bytes: int
    tiers: tuple[TierUse, ...]
    created: float  # of its own blocks: first made, last used, most often hit
    last_use: float
    hits: int
    pinned: bool
    leased: bool
    complete: bool
    words: bytes = (
        b""  # int32 token ids around the first difference from other chains, if asked for
    )
    words_before: int = 0  # how many of them come before that difference


@dataclass(frozen=True, slots=True)
class Totals:
    """Each block is counted once, however many chains share it."""

    chains: int = 0
    blocks: int = 0
    file_bytes: int = 0
    tiers: tuple[TierUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """Either `chains` or `blocks` is filled, least recently used first."""

    chains: list[ChainLine]
    blocks: list[BlockLine]
    descriptions: dict[NamespaceId, Fields]
    selected: Totals
    stored: Totals
    id_digits: int  # how many hex digits distinguish all stored blocks


@dataclass(frozen=True, slots=True)
class PinResult:
    key: BlockKey
    blocks: int
    changed_bytes: int  # pinned now, or no longer
    pinned_bytes: int  # in all, afterwards
    limit_bytes: int
    changed: bool
    follows: bool = False  # what is added later, too


@dataclass(slots=True)
class Removal:
    """What was removed, or would be. `kept` counts blocks of the selection by the reason why they
    stay. `waiting_blocks` are out of use but stay on the remote tier until it answers;
    `waiting_for` says why.
    """

    chains: int = 0
    blocks: int = 0
    stored_bytes: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    waiting_blocks: int = 0
    waiting_for: str = ""

    def add(self, other: Removal) -> None:
        self.chains += other.chains
        self.blocks += other.blocks
        self.stored_bytes += other.stored_bytes
        for reason, count in other.kept.items():
            self.kept[reason] = self.kept.get(reason, 0) + count


@dataclass(frozen=True, slots=True)
class Waste:
    """One kind of thing that a collection removes."""

    kind: str  # expired, model gone, unreachable, quarantined, temporary, vacant
    files: int
    stored_bytes: int
    kept: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finding:
    tier: TierKind
    what: str  # damaged, unreadable, unknown format, temporary, quarantined, foreign
    path: str  # below the tier's directory
    detail: str = ""
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """How far a verification is, and what it has found since the last step."""

    done_blocks: int
    total_blocks: int  # as known at the start; others come and go meanwhile
    done_bytes: int
    findings: tuple[Finding, ...] = ()
