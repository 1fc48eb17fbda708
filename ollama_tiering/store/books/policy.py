"""What a store is told about wear, space and age. Values only; 0 means no limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EAGER: Final = "eager"  # written down as soon as the queue allows
SECOND_TOUCH: Final = "second-touch"  # ... when asked for a second time
PRESSURE: Final = "pressure"  # ... when the RAM tier must evict


@dataclass(frozen=True, slots=True)
class StorePolicy:
    admission: str = EAGER
    min_tokens: int = 1  # a shorter prefix is not written down
    daily_write_bytes: int = 0  # to the local tier
    queue_bytes: int = 0  # what may wait to be written down
    queue_seconds: float = 0.0  # ... at the measured speed of the tier below
    tail_seconds: float = 0.0  # a partly filled block waits so long before it is written down
    min_free_percent: float = 0.0  # of the local tier's file system
    ttl_seconds: float = 0.0  # without use; then a block is dropped
