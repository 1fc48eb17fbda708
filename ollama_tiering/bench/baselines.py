"""What stock takes for the same prompt: as it runs the model by default, and at its best.

Its best is the faster of its two ways, with and without flash attention. Each way has a server of
its own, one at a time, so that no two share the cores. Each prompt is computed once, cold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ollama_tiering.bench.table import seconds

if TYPE_CHECKING:
    from ollama_tiering.launch.ollama import Generated

OURS, BEST, DEFAULT = "ours", "best", "default"
NAMES = (OURS, BEST, DEFAULT)


class ColdServer(Protocol):
    """`attention` and `flash` are known when it has answered once."""

    @property
    def attention(self) -> str:
        """How it computes attention, in words."""

    @property
    def flash(self) -> bool | None:
        """Whether it computes with flash attention; None if it does not say."""

    def generate(self, prompt: str, new_tokens: int) -> Generated: ...


# Starts one with flash attention on, off, or (None) as it likes; ends it when left.
Start = Callable[[bool | None], AbstractContextManager[ColdServer]]


@dataclass(frozen=True, slots=True)
class Cold:
    """Seconds to the first token of a prompt of which nothing was known, and
    how it was computed.
    """

    attention: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Baselines:
    """What stock took; None: not measured."""

    best: Cold | None = None
    default: Cold | None = None


NONE = Baselines()


def measure(
    start: Start,
    prompt_of: Callable[[int], str],
    lengths: Sequence[int],
    names: Sequence[str],
    say: Callable[[str], None],
) -> dict[int, Baselines]:
    """Results by length. The way that is the default is not measured a second time for the best."""
    by_default: dict[int, Cold] = {}
    ways: list[dict[int, Cold]] = []
    known: bool | None = None
    if DEFAULT in names:
        known, by_default = _one_server(start, None, prompt_of, lengths, say)
        ways.append(by_default)
    if BEST in names:
        others = (flash for flash in (False, True) if flash is not known)
        ways += [_one_server(start, flash, prompt_of, lengths, say)[1] for flash in others]
    return {
        length: Baselines(
            best=min((way[length] for way in ways), key=lambda cold: cold.seconds)
            if BEST in names
            else None,
            default=by_default.get(length),
        )
        for length in lengths
    }


def _one_server(
    start: Start,
    flash: bool | None,
    prompt_of: Callable[[int], str],
    lengths: Sequence[int],
    say: Callable[[str], None],
) -> tuple[bool | None, dict[int, Cold]]:
    """Whether it used flash attention, and what each length took."""
    with start(flash) as server:
        server.generate(prompt_of(warm_up_tokens(lengths)), 2)
        name, colds = server.attention, {}
        for length in lengths:
            say(f"{length} tokens, cold, {name}")
            taken = server.generate(prompt_of(length), 2).seconds_to_first_token
            say(f"  {seconds(taken)} to the first token")
            colds[length] = Cold(name, taken)
        return server.flash, colds


def warm_up_tokens(lengths: Sequence[int]) -> int:
    """Length of the first prompt, which makes the server read the weights. It differs from every
    measured length, because a measured prompt would otherwise be in memory already.
    """
    return next(tokens for tokens in itertools.count(64) if tokens not in lengths)
