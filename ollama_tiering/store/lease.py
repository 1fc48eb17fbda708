"""Leases: which blocks a client reads, and until when. Pure; the store holds the lock."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ollama_tiering.store.key import BlockKey


@dataclass(frozen=True, slots=True)
class Lease:
    keys: tuple[BlockKey, ...]
    expires: float
    opened: float


class LeaseTable:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # A client that outlives a restart of the sidecar must not release another's lease.
        self._ids = itertools.count(secrets.randbits(48) << 14)
        self._leases: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, keys: Sequence[BlockKey], expires: float) -> int:
        lease_id = next(self._ids)
        self._leases[lease_id] = Lease(tuple(keys), expires, self._clock())
        return lease_id

    def oldest_seconds(self) -> float:
        """Since the oldest open lease was given; 0 when there is none."""
        oldest = next(iter(self._leases.values()), None)
        return self._clock() - oldest.opened if oldest else 0.0

    def close(self, lease_id: int) -> tuple[BlockKey, ...]:
        """Keys to unpin; none when the lease has expired or never was."""
        lease = self._leases.pop(lease_id, None)
        return lease.keys if lease else ()

    def expire(self, now: float) -> list[BlockKey]:
        """Keys to unpin of all leases whose time is over."""
        over = [lease_id for lease_id, lease in self._leases.items() if lease.expires <= now]
        return [key for lease_id in over for key in self.close(lease_id)]
