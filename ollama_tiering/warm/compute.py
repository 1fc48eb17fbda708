"""Has the server compute a prompt, and waits until the sidecar has stored it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from ollama_tiering.launch.ollama import Api
from ollama_tiering.store import DEFAULT_BLOCK_TOKENS
from ollama_tiering.store.values import ChainLine, Listing, Selection
from ollama_tiering.warm.prompt import WarmPrompt

STORED_SECONDS: Final = 15.0  # after the answer; a conversation takes a second or two
_ASK_SECONDS: Final = 0.2
_WORTH_SAYING_SECONDS: Final = 0.1


class Listings(Protocol):
    def listing(self, selection: Selection) -> Listing: ...


@dataclass(frozen=True, slots=True)
class Warmed:
    """`chain` is the stored conversation that has the prompt's first `stored_tokens`, if any."""

    prompt_tokens: int
    seconds: float  # to the first token, with the loading of the model
    load_seconds: float
    chain: ChainLine | None

    @property
    def stored_tokens(self) -> int:
        return min(self.chain.tokens, self.prompt_tokens) if self.chain else 0

    @property
    def sentence(self) -> str:
        took = f"{self.seconds:.1f} s"
        if self.load_seconds >= _WORTH_SAYING_SECONDS:
            took += f", {self.load_seconds:.1f} s of them to load the model"
        stored = f"{self.stored_tokens:,} of {self.prompt_tokens:,} tokens are stored"
        return f"{stored}; the answer took {took}"

    @property
    def whole(self) -> bool:
        """Whether all of its blocks are stored, but for the last if that is not full."""
        return (
            self.stored_tokens >= self.prompt_tokens // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS
        )


def warm(
    api: Api,
    store: Listings,
    prompt: WarmPrompt,
    models: tuple[str, ...],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    stored_seconds: float = STORED_SECONDS,
) -> Warmed:
    """`models`: the file names that the model may have. ServiceError if no server answers."""
    begun = clock()
    answer = api.compute(prompt.path, prompt.request)
    answered = clock()
    tokens = int(answer.get("prompt_eval_count") or 0)
    load_seconds = int(answer.get("load_duration") or 0) / 1e9
    while True:
        chain = _stored(store, prompt.model, models, begun, tokens)
        warmed = Warmed(tokens, answered - begun, load_seconds, chain)
        if warmed.whole or clock() - answered > stored_seconds:
            return warmed
        sleep(_ASK_SECONDS)


def _stored(
    store: Listings, model: str, models: tuple[str, ...], begun: float, tokens: int
) -> ChainLine | None:
    """The conversation of the model that was used since, and has most of so many tokens and fewest
    of others.
    """
    selection = Selection(model=model, models=models)
    lines = [line for line in store.listing(selection).chains if line.last_use >= int(begun)]
    return max(
        lines,
        key=lambda line: (min(line.tokens, tokens), -line.tokens, line.last_use),
        default=None,
    )
