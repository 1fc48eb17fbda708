"""Why requests computed more of their prompts than the last token: sums by reason, and short names.

A reason is a number of the protocol's `Shortfall`. A number that this program does not know comes
from a newer runner. It is kept, counted, and shown as `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from ollama_tiering.store import block_store_pb2 as pb

_PREFIX: Final = "SHORTFALL_"
_OTHER: Final = "other"
_MOST_REASONS: Final = 48  # numbers below it, so that what is kept and sent stays small


def name(reason: int) -> str:
    """`nothing_stored`, for JSON and as a label of the metrics."""
    if reason not in pb.Shortfall.values():
        return _OTHER
    return pb.Shortfall.Name(reason).removeprefix(_PREFIX).lower()


NAMES: Final = (*map(name, pb.Shortfall.values()), _OTHER)


@dataclass(frozen=True, slots=True)
class Shortfalls:
    """Reason -> (requests, tokens of their prompts that they computed)."""

    by_reason: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Iterable[pb.ShortfallCount]) -> Self:
        sums: dict[int, tuple[int, int]] = {}
        for count in counts:
            requests, tokens = sums.get(count.reason, (0, 0))
            sums[count.reason] = (requests + count.requests, tokens + count.tokens)
        return cls(sums)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of `document`. ValueError or TypeError for anything else."""
        sums = {}
        for reason, (requests, tokens) in document.items():
            if type(requests) is not int or type(tokens) is not int:
                raise ValueError(f"{requests!r}, {tokens!r} are no counts")
            sums[int(reason)] = (requests, tokens)
        return cls(sums)

    def document(self) -> dict[str, list[int]]:
        """The sums as a document for a file."""
        return {str(reason): list(counts) for reason, counts in self.by_reason.items()}

    def plus(self, other: Self, sign: int = 1) -> Self:
        sums = dict(self.by_reason)
        for reason, (requests, tokens) in other.by_reason.items():
            before = sums.get(reason, (0, 0))
            sums[reason] = (before[0] + sign * requests, before[1] + sign * tokens)
        return type(self)({reason: counts for reason, counts in sums.items() if any(counts)})

    def has_fallen(self, before: Self) -> bool:
        """Whether some sum is smaller than it was."""
        differences = self.plus(before, -1).by_reason.values()
        return any(requests < 0 or tokens < 0 for requests, tokens in differences)

    def fits(self, requests: int, tokens: int) -> bool:
        """Whether these sums are possible for that many requests, which
        computed that many tokens.
        """
        known = all(0 <= reason < _MOST_REASONS for reason in self.by_reason)
        counts = list(self.by_reason.values())
        return (
            known
            and all(min(pair) >= 0 for pair in counts)
            and sum(pair[0] for pair in counts) <= requests
            and sum(pair[1] for pair in counts) <= tokens
        )

    def messages(self) -> Iterator[pb.ShortfallCount]:
        for reason, (requests, tokens) in sorted(self.by_reason.items()):
            yield pb.ShortfallCount(
                reason=reason,  # type: ignore[arg-type]
                requests=requests,
                tokens=tokens,
            )

    def by_name(self) -> dict[str, tuple[int, int]]:
        """The sums under every known name; (0, 0) if there is nothing."""
        sums = dict.fromkeys(NAMES, (0, 0))
        for reason, (requests, tokens) in self.by_reason.items():
            before = sums[name(reason)]
            sums[name(reason)] = (before[0] + requests, before[1] + tokens)
        return sums


NONE: Final = Shortfalls()

# What was found could not be read, or was gone by then.
NOT_THERE: Final = (pb.SHORTFALL_DAMAGED, pb.SHORTFALL_UNREADABLE, pb.SHORTFALL_BLOCKS_GONE)
# The look-up found no more. All other reasons have nothing to do with what is stored.
OF_LOOK_UP: Final = (
    pb.SHORTFALL_UNSPECIFIED,
    pb.SHORTFALL_NOTHING_STORED,
    pb.SHORTFALL_ENDS,
    pb.SHORTFALL_DIFFERS,
    pb.SHORTFALL_TOO_SHORT,
    pb.SHORTFALL_WINDOW_MISSING,
    pb.SHORTFALL_STATE_MISSING,
)
