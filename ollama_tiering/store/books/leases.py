"""Leases: which blocks a client reads, and until when. Pure; the store holds the lock."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ollama_tiering.config import agreeing, count
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.errors import NoRoom

MAX_LEASES: Final = 4096
MAX_LEASED_BLOCKS: Final = 1 << 20  # of all leases; a block may be in many


@dataclass(slots=True)
class Lease:
    keys: list[BlockKey]
    expires: float
    opened: float


class LeaseTable:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # A client that outlives a restart of the sidecar must not release another's lease.
        self._ids = itertools.count(secrets.randbits(48) << 14)
        self._leases: dict[int, Lease] = {}
        self._leased_blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    def check_room(self, blocks: int, *, new: bool = True) -> None:
        """NoRoom: clients that do not release what they were given wait until it expires."""
        if len(self) + new > MAX_LEASES or self._leased_blocks + blocks > MAX_LEASED_BLOCKS:
            raise NoRoom(
                f"{count(len(self), 'lease')} of {count(self._leased_blocks, 'block')} "
                f"{agreeing(len(self), 'is')} open already"
            )

    def open(self, keys: Sequence[BlockKey], expires: float) -> int:
        lease_id = next(self._ids)
        self._leases[lease_id] = Lease(list(keys), expires, self._clock())
        self._leased_blocks += len(keys)
        return lease_id

    def extend(self, lease_id: int, keys: Sequence[BlockKey]) -> bool:
        """Whether the lease was still open, and has these blocks, too, now."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.keys += keys
        self._leased_blocks += len(keys)
        return True

    def renew(self, lease_id: int, expires: float) -> bool:
        """Whether the lease was still open, and is so until then, now."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires = max(lease.expires, expires)
        return True

    def oldest_seconds(self) -> float:
        """Since the oldest open lease was given; 0 when there is none."""
        oldest = next(iter(self._leases.values()), None)
        return self._clock() - oldest.opened if oldest else 0.0

    def close(self, lease_id: int) -> list[BlockKey]:
        """Keys to let go; none when the lease has expired or never was."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        self._leased_blocks -= len(lease.keys)
        return lease.keys

    def expire(self, now: float) -> list[BlockKey]:
        """Keys to let go of all leases whose time is over."""
        over = [lease_id for lease_id, lease in self._leases.items() if lease.expires <= now]
        return [key for lease_id in over for key in self.close(lease_id)]
