"""What `tiering status` says of prompts that were computed again because something changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ollama_tiering.config import count
from ollama_tiering.protocol.seconds_saved import duration

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm

_WORTH_SECONDS: Final = 10.0  # a day


def lines(answer: adm.StatResponse) -> Iterator[str]:
    """One line, if it is worth one."""
    lost = answer.partings
    if lost.lost_seconds > _WORTH_SECONDS:
        yield (
            f"computed again in 24 h: {duration(lost.lost_seconds)} in "
            f"{count(lost.requests, 'prompt')}; tiering why says why"
        )


def document(answer: adm.StatResponse) -> dict[str, Any]:
    """Sums up the last 24 hours."""
    return {
        "requests": answer.partings.requests,
        "lost_tokens": answer.partings.lost_tokens,
        "lost_seconds": answer.partings.lost_seconds,
    }
