"""What `tiering status` says of a runner's last request, of why prompts were computed, and of what
is still to be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from ollama_tiering.config import count
from ollama_tiering.protocol.shortfalls import Shortfalls, name
from ollama_tiering.store import block_store_pb2 as pb

# What to do about each: docs/operations.md.
WORDS: Final[dict[int, str]] = {
    pb.SHORTFALL_UNSPECIFIED: "no reason is known, which is a fault of the tiering",
    pb.SHORTFALL_NOTHING_STORED: "nothing stored begins like this prompt",
    pb.SHORTFALL_ENDS: "what is stored of the prompt ends",
    pb.SHORTFALL_DIFFERS: "prompt differs from the stored one",
    pb.SHORTFALL_TOO_SHORT: "shorter than min_tokens",
    pb.SHORTFALL_GATE: "gate: recomputing is faster",
    pb.SHORTFALL_RECOMPUTE: "set to recompute (OLLAMA_KV_TIER_GATE)",
    pb.SHORTFALL_SIDECAR_AWAY: "sidecar was away, tiering paused",
    pb.SHORTFALL_SIDECAR_LATE: "sidecar did not answer in time",
    pb.SHORTFALL_SIDECAR_ERROR: "sidecar answered with an error",
    pb.SHORTFALL_NO_MEMORY: "no memory to read it into",
    pb.SHORTFALL_DAMAGED: "stored blocks damaged",
    pb.SHORTFALL_UNREADABLE: "stored blocks could not be opened",
    pb.SHORTFALL_BLOCKS_GONE: "stored blocks went before they were read",
    pb.SHORTFALL_FILES_LATE: "the files were not read in time",
    pb.SHORTFALL_HANGING: "a fetch from before still hangs",
    pb.SHORTFALL_NO_CELLS: "free cells are missing",
    pb.SHORTFALL_SHIFTED: "what is in memory is not exact any more (context shift)",
    pb.SHORTFALL_MEMORY_GONE: "what was in memory was gone when its turn came",
    pb.SHORTFALL_NOT_LOOKED_UP: "not looked up (image, other LoRA scales, or its client had gone)",
    pb.SHORTFALL_NOT_TEXT: "only what comes before an image is looked up: up to the first",
    pb.SHORTFALL_FAILED: "restoring failed, Ollama's log says how",
    pb.SHORTFALL_WINDOW_MISSING: "no sliding window is stored for where the match ends",
    pb.SHORTFALL_STATE_MISSING: "recurrent layers go on from the last stored checkpoint only",
    pb.SHORTFALL_UNCHECKED: "the model's file is being checked, or is refused",
}
_OTHER: Final = "another reason, which this version does not know"
_AT: Final = (
    pb.SHORTFALL_ENDS,
    pb.SHORTFALL_DIFFERS,
    pb.SHORTFALL_NOT_TEXT,
    pb.SHORTFALL_WINDOW_MISSING,
    pb.SHORTFALL_STATE_MISSING,
)


def lines(runner: pb.RunnerReport) -> Iterator[str]:
    """Leaves out what a runner of an older version does not report."""
    yield from by_reason(runner.shortfalls, runner.min_tokens)
    if runner.HasField("last_request"):
        last = runner.last_request
        yield (
            f"  last request: {count(last.prompt_tokens, 'prompt token')} = "
            f"{last.memory_tokens:,} in memory + {last.restored_tokens:,} restored + "
            f"{recomputed(last):,} recomputed"
        )
        if words := why(runner):
            yield f"    {words}"
    if runner.to_store:
        yield f"  {count(runner.to_store, 'conversation', 'is')} still to be stored"


def by_reason(counts: Iterable[pb.ShortfallCount], min_tokens: int = 0) -> Iterator[str]:
    """The sums of each reason, that of most tokens first. `min_tokens` of 0 is not known."""
    sums = Shortfalls.of(counts).by_reason
    if sums:
        yield "  recomputed, by reason:"
    for reason, (requests, tokens) in sorted(sums.items(), key=lambda one: -one[1][1]):
        of = f"{count(tokens, 'token')} of {count(requests, 'request')}"
        yield f"    {of}: {_words(reason, min_tokens)}"


def documents(counts: Iterable[pb.ShortfallCount]) -> list[dict[str, Any]]:
    return [
        {"reason": name(one.reason), "requests": one.requests, "tokens": one.tokens}
        for one in counts
    ]


def last_document(runner: pb.RunnerReport) -> dict[str, Any] | None:
    """Returns None if no request has ended. `reason` and `why` are null if nothing was missing."""
    if not runner.HasField("last_request"):
        return None
    last, words = runner.last_request, why(runner)
    return {
        "prompt_tokens": last.prompt_tokens,
        "memory_tokens": last.memory_tokens,
        "restored_tokens": last.restored_tokens,
        "recomputed_tokens": recomputed(last),
        "reason": name(last.shortfall) if words else None,
        "at_token": last.at_token if words and last.shortfall in _AT else None,
        "why": words,
    }


def recomputed(last: pb.LastRequest) -> int:
    return max(0, last.prompt_tokens - last.memory_tokens - last.restored_tokens)


def why(runner: pb.RunnerReport) -> str | None:
    """Why the last request computed more than the last token, which is always computed."""
    last = runner.last_request
    if recomputed(last) <= 1:
        return None
    words = _words(last.shortfall, runner.min_tokens)
    if last.shortfall == pb.SHORTFALL_TOO_SHORT and last.memory_tokens:  # how a chat goes on
        return f"next turn: {count(recomputed(last), 'new token')}, {words}"
    return f"{words} at token {last.at_token:,}" if last.shortfall in _AT else words


def _words(reason: int, min_tokens: int) -> str:
    words = WORDS.get(reason, _OTHER)
    if reason == pb.SHORTFALL_TOO_SHORT and min_tokens:
        return f"{words} ({min_tokens})"
    return words
