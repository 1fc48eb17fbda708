"""The gate: is having rows from the store expected to be faster than computing them?"""

from __future__ import annotations

from typing import Final

DEFAULT_COPY_RATE: Final = 2e9  # bytes/s of checksum and copy, until the first restore measured it


def restore_pays(
    tokens: int, file_bytes: int, tier_seconds: float, prefill_rate: float, copy_rate: float
) -> bool:
    """`tier_seconds`: until the bytes are in memory; then they are copied at `copy_rate` bytes/s.
    `prefill_rate`: tokens/s. A rate of 0 was not measured yet; without that of prefill it pays.
    """
    if not prefill_rate:
        return True
    return tier_seconds + file_bytes / (copy_rate or DEFAULT_COPY_RATE) < tokens / prefill_rate


def drifted(copy_rate: float) -> float:
    """The rate after the gate has said no: what is never tried is never measured again, so a slow
    one goes back towards the default. A rate that was not measured stays 0.
    """
    if not copy_rate:
        return 0.0
    return copy_rate + max(DEFAULT_COPY_RATE - copy_rate, 0) / 16
