"""What restoring saved: the time to compute what was restored, minus the time that restoring took.

The time to compute follows from the speed that was measured for the same namespace, in long prompts
only. If no speed was measured, there is no value. The value may be negative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

_MINUTE, _HOUR = 60, 3600
_SEEN_SECONDS = 0.005  # less is shown as 0.00 s


class Use(Protocol):
    """Sums of one namespace."""

    @property
    def restored_tokens(self) -> int: ...
    @property
    def restore_seconds(self) -> float: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def prefill_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """The first three fields are about what can be compared. The tokens of the rest were restored
    too.
    """

    restored_tokens: int = 0
    restore_seconds: float = 0.0
    compute_seconds: float = 0.0
    unmeasured_tokens: int = 0

    @classmethod
    def of(cls, uses: Iterable[Use]) -> Self:
        tokens = unmeasured = 0
        restoring = computing = 0.0
        for use in uses:
            rate = tokens_per_second(use)
            if use.restored_tokens and rate is None:
                unmeasured += use.restored_tokens
                continue
            tokens += use.restored_tokens
            restoring += use.restore_seconds
            computing += use.restored_tokens / rate if rate else 0.0
        return cls(tokens, restoring, computing, unmeasured)

    @property
    def seconds(self) -> float | None:
        """Returns None if no speed was measured yet."""
        if self.unmeasured_tokens and not self.restored_tokens:
            return None
        return self.compute_seconds - self.restore_seconds

    def words(self) -> str:
        """`saved 12 min 40 s: 184,320 tokens restored in 3.1 s, computing them takes about …`."""
        seconds = self.seconds
        if seconds is None:
            return f"saved: not measured yet ({self.unmeasured_tokens:,} tokens restored)"
        if not self.restored_tokens and self.restore_seconds < _SEEN_SECONDS:
            return "saved: nothing restored yet"
        said = (
            f"saved {duration(seconds)}: {self.restored_tokens:,} tokens restored in "
            f"{duration(self.restore_seconds)}"
        )
        if self.compute_seconds:
            rate = self.restored_tokens / self.compute_seconds
            said += f", computing them takes about {duration(self.compute_seconds)} at "
            said += f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s"
        if self.unmeasured_tokens:
            said += f" (without {self.unmeasured_tokens:,} restored tokens: not measured yet)"
        return said


def tokens_per_second(use: Use) -> float | None:
    """The measured speed of prefill; None if it was not measured yet."""
    if not use.prefill_tokens or use.prefill_seconds <= 0:
        return None
    return use.prefill_tokens / use.prefill_seconds


def duration(seconds: float) -> str:
    """`0.12 s`, `3.1 s`, `12 min 40 s`, `2 h 5 min`; negative with a minus."""
    sign, left = ("-" if seconds < 0 else ""), abs(seconds)
    if left < 1:
        return f"{sign}{left:.2f} s"
    if left < 9.95:
        return f"{sign}{left:.1f} s"
    whole = round(left)
    if whole < _MINUTE:
        return f"{sign}{whole} s"
    if whole < _HOUR:
        return f"{sign}{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{sign}{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
