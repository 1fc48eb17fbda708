"""Whether the gate chooses well: forced to restore, forced to recompute, and left to decide.

Prompts around the length at which both take the same time are asked repeatedly. Before each,
another prompt takes the slot, so that nothing of it is in memory.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ollama_tiering.bench.table import Table

if TYPE_CHECKING:
    from ollama_tiering.engines.drivers import Answer

RESTORE, RECOMPUTE, AUTO = "restore", "recompute", "auto"
BOUND = 1.10
_ROUNDS = 5
_WARM_TOKENS = (600, 700)  # from which the runner learns how fast it computes
_WARM_SEED = 10_000_000  # beyond the seeds of the prompts, which are their lengths


class GatedDriver(Protocol):
    def ask(self, prompt: str, new_tokens: int) -> Answer: ...

    def with_gate(self, gate: str) -> None:
        """Restarts with that setting; what is stored stays."""


@dataclass(frozen=True, slots=True)
class GateChoice:
    """Medians of seconds to the first token. `restored` is how often the gate chose to restore."""

    tier: str
    tokens: int
    restore_seconds: float
    recompute_seconds: float
    auto_seconds: float
    restored: int
    repeat: int
    spread: float  # of the side that varied most: half of what lies between its quartiles, relative

    @property
    def ratio(self) -> float:
        """Against the better side."""
        return self.auto_seconds / min(self.restore_seconds, self.recompute_seconds)

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"ratio_to_better": self.ratio, "met": self.ratio <= BOUND}


def measure(
    engine: GatedDriver,
    make_prompt: Callable[[int, int], str],
    lengths: Sequence[int],
    say: Callable[[str], None],
    *,
    tier: str,
    repeat: int,
) -> list[GateChoice]:
    """`make_prompt(tokens, seed)` gives a text. Texts of two seeds share no beginning."""
    seconds: dict[tuple[str, int], list[float]] = {}
    restored = dict.fromkeys(lengths, 0)
    warm_seeds = itertools.count(_WARM_SEED)  # nothing of these is stored yet
    for asks, gate in itertools.product(_rounds(repeat), (RESTORE, RECOMPUTE, AUTO)):
        engine.with_gate(gate)
        for tokens in _WARM_TOKENS:
            engine.ask(make_prompt(tokens, next(warm_seeds)), 1)
        for tokens in lengths:
            say(f"{tier}, {tokens} tokens, {gate}")
            prompt, other = make_prompt(tokens, tokens), make_prompt(96, tokens + 1)
            engine.ask(prompt, 1)
            for _ in range(asks):
                engine.ask(other, 1)
                answer = engine.ask(prompt, 1)
                seconds.setdefault((gate, tokens), []).append(answer.seconds_to_first_token)
                restored[tokens] += gate == AUTO and answer.restored_tokens > 0
    middle = {case: statistics.median(values) for case, values in seconds.items()}
    spread = {case: _spread(values) for case, values in seconds.items()}
    return [
        GateChoice(
            tier=tier,
            tokens=tokens,
            restore_seconds=middle[RESTORE, tokens],
            recompute_seconds=middle[RECOMPUTE, tokens],
            auto_seconds=middle[AUTO, tokens],
            restored=restored[tokens],
            repeat=repeat,
            spread=max(spread[gate, tokens] for gate in (RESTORE, RECOMPUTE, AUTO)),
        )
        for tokens in lengths
    ]


def _rounds(repeat: int) -> list[int]:
    """How often each way is asked in each round. The ways take turns, because a machine's speed
    changes.
    """
    rounds = min(_ROUNDS, repeat)
    return [repeat // rounds + (number < repeat % rounds) for number in range(rounds)]


def _spread(values: list[float]) -> float:
    """Half the distance between the quartiles ÷ the median."""
    if len(values) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(values, n=4)
    return (third - first) / 2 / middle


def table(shape: str, choices: Sequence[GateChoice], attention: str) -> Table:
    headings = [
        "from",
        "prompt",
        "restore",
        "recompute",
        "gate",
        "it restored",
        "÷ better",
        "spread",
        "",
    ]
    rows = [
        [
            choice.tier,
            f"{choice.tokens:,}",
            f"{1e3 * choice.restore_seconds:.1f} ms",
            f"{1e3 * choice.recompute_seconds:.1f} ms",
            f"{1e3 * choice.auto_seconds:.1f} ms",
            f"{choice.restored} of {choice.repeat}",
            f"{choice.ratio:.2f}",
            f"± {100 * choice.spread:.0f} %",
            "met" if choice.ratio <= BOUND else "not met",
        ]
        for choice in choices
    ]
    notes = [
        "Median seconds to the first token of the same prompt, which is in the tier and not in "
        "memory: with the gate forced either way, and left to itself. The three take turns, "
        f"{_ROUNDS} rounds. Spread: between the quartiles of the side that varied most.",
        f"Attention: {attention}. The bound is {BOUND:g} of the better side. "
        "`local`: there is no RAM tier, blocks are read from the disk past the page cache.",
    ]
    return Table(f"The gate's choice, {shape}", headings, rows, notes)
