"""What the store answers with. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.shared_books import SharedBooks
from ollama_tiering.store.books.state import Counters
from ollama_tiering.store.books.terms import Terms
from ollama_tiering.store.tiers import kinds
from ollama_tiering.store.tiers.contract import TierKind, TierStats


class AttachedBlock(NamedTuple):
    """A window block that hangs on a matched one and can be had now."""

    key: BlockKey
    stored_bytes: int
    raw_bytes: int  # once decoded
    expected_seconds: float


class MatchedBlock(NamedTuple):  # made by the dozen in every look-up, so no dataclass
    key: BlockKey
    rows: int  # that match the prompt
    block_rows: int
    tier: TierKind
    stored_bytes: int
    raw_bytes: int  # once decoded
    expected_seconds: float
    attached: tuple[AttachedBlock, ...] = ()
    fingerprint: bytes = b""  # which rows it has, where tokens do not decide their bits


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    key: BlockKey
    namespace: NamespaceId
    tier: TierKind
    path: str | None
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Leased:
    """`blocks` is the leading run of what was asked for that is really there."""

    lease_id: int
    blocks: list[LeasedBlock]


@dataclass(frozen=True, slots=True)
class LeftOver:
    """What is in RAM only after a close, for want of time or by policy: lost with a reboot."""

    blocks: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class AbsentTier:
    """A tier of the settings that was not opened."""

    kind: TierKind
    directory: Path
    budget_bytes: int
    why: str  # names the path
    cure: str

    def __str__(self) -> str:
        return f"{self.why} ({self.cure})"

    @property
    def is_shared(self) -> bool:
        return self.kind in kinds.SHARED


@dataclass(frozen=True, slots=True)
class TierReport:
    kind: TierKind
    directory: Path | None
    budget_bytes: int
    used_bytes: int
    reserved_bytes: int
    blocks: int
    stats: TierStats
    read_bytes_per_second: float
    write_bytes_per_second: float
    suspended: bool
    written_today_bytes: int  # to a disk of this machine; 0 elsewhere
    daily_write_bytes: int  # the limit of that; 0 for none
    disk_full: bool  # nothing is written: below the free-space floor
    surveyed: bool  # all its files are counted
    encoding: str  # of what is written there from now on
    raw_bytes: int  # of its blocks, had they been stored raw
    stored_bytes: int  # of its blocks, physical
    overhead_bytes: int = 0  # of used_bytes: files that are no blocks, e.g. quarantined ones
    resting_seconds: float = 0.0  # until it is tried again
    shared: SharedBooks | None = None
    absent: str = ""  # why it could not be opened, and the cure

    @property
    def state(self) -> str:
        if self.absent:
            return f"left out: {self.absent}"
        if self.suspended:
            return "resting"
        if self.shared is not None and not self.shared.scanned:
            return "scanning" if self.shared.scanning else "not looked at yet"
        return "ok"


REPORTED_NAMESPACES: Final = 1024


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model that is kept otherwise than those of which nothing is known."""

    model: str  # file name
    namespaces: list[NamespaceId]
    terms: Terms
    local_bytes: int
    remote_bytes: int


@dataclass(frozen=True, slots=True)
class StoreReport:
    tiers: list[TierReport]
    counters: Counters
    open_leases: int
    unsaved_blocks: int
    unsaved_bytes: int
    not_written: dict[str, int]  # how often a block did not go to the disk, by reason
    decode_bytes_per_second: float
    q8_0_namespaces: list[NamespaceId]  # whose rows are rounded to q8_0: lossy
    namespaces: list[tuple[NamespaceId, int]]  # those with most blocks, and how many
    oldest_lease_seconds: float = 0.0  # since the oldest open lease was given; 0 without one
    models: list[ModelReport] = field(default_factory=list)
