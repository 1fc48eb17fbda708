"""Ours beside stock and beside other programs that run the same model file: first token, tokens/s.

The sides are given; this module knows the order. Each side has a process of its own, one at a time,
so that no two share the cores. They take turns, round by round, in alternating order. All get the
same prompt in a round, and a new one in the next. The client measures the seconds from the request
on. Every side's log probabilities of the first token are compared with ours, so that nobody
measures a model that was loaded wrongly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ollama_tiering.bench.baselines import warm_up_tokens
from ollama_tiering.bench.table import seconds
from ollama_tiering.errors import ResultDiffers, TieringError

if TYPE_CHECKING:
    from measure.overhead import PromptCounts
    from ollama_tiering.launch.ollama import Generated

NEW_TOKENS = 64
OURS = "ours"
# Of the 5 best tokens, and the natural logarithm of each common one. With qwen3-0.6b a right model
# is up to 0.2 apart; another rope base, or one token less, has 2 in common or is 1 apart.
LEAST_COMMON, MOST_APART = 3, 0.5
_WARM_ROUNDS = 1000  # beyond those of the measured prompts; ours has stored those before it

Best = Sequence[tuple[str, float]]  # tokens with log probabilities, the best first


class SideDriver(Protocol):
    """An engine with the model loaded."""

    @property
    def engine(self) -> str:
        """Program and version, known when it has answered once."""

    @property
    def built_for(self) -> str:
        """The instructions its library was compiled for, as far as it can be told."""

    def generate(self, prompt: str, new_tokens: int) -> Generated: ...

    def settle(self) -> PromptCounts:
        """Returns when nothing goes on in the background."""


@dataclass(frozen=True, slots=True)
class Side:
    """A program with one setting. If one with `may_fail` fails, this is noted, and the rest goes
    on. `short`: only with the shortest prompt.
    """

    program: str
    setting: str
    start: Callable[[], AbstractContextManager[SideDriver]]
    may_fail: bool = False
    short: bool = False

    @property
    def name(self) -> str:
        return f"{self.program}, {self.setting}"


@dataclass(slots=True)
class SideCase:
    """One side at one prompt length; one number for each round."""

    program: str
    setting: str
    prompt_tokens: int
    engine: str = ""
    built_for: str = ""
    first_seconds: list[float] = field(default_factory=list)
    decode_rates: list[float] = field(default_factory=list)  # tokens/s after the first

    @property
    def name(self) -> str:
        """The name of its side."""
        return f"{self.program}, {self.setting}"

    @property
    def first_median(self) -> float:
        return statistics.median(self.first_seconds)

    @property
    def rate_median(self) -> float:
        return statistics.median(self.decode_rates)

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        own: dict[str, Any] = {"first_median_seconds": self.first_median}
        own["decode_median_rate"] = self.rate_median
        own["first_quartiles_seconds"] = quartiles(self.first_seconds)
        own["decode_quartiles_rate"] = quartiles(self.decode_rates)
        return fields | own


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """What was not measured, and why."""

    name: str
    reason: str

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "reason": self.reason}


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third quartile; of a single value, that value."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def measure(
    sides: Sequence[Side],
    prompt_of: Callable[[int, int], str],
    repeats: Mapping[int, int],
    say: Callable[[str], None],
) -> tuple[list[SideCase], list[NotMeasured]]:
    """`prompt_of(tokens, round)` gives a text; `repeats` are the rounds of each length.
    ResultDiffers if a side's first token is not roughly ours; so ours must be one of the sides.
    """
    cases: dict[tuple[str, int], SideCase] = {}
    failures: dict[str, NotMeasured] = {}
    for number in range(max(repeats.values())):
        now = [length for length, rounds in repeats.items() if number < rounds]
        firsts: dict[tuple[Side, int], Best] = {}
        for side in sides if number % 2 == 0 else sides[::-1]:
            lengths = [length for length in now if not side.short or length == min(repeats)]
            if side.name in failures or not lengths:
                continue
            say(f"round {number + 1}: {side.name}")
            try:
                with side.start() as engine:
                    warm_up = prompt_of(warm_up_tokens(now), _WARM_ROUNDS + number)
                    engine.generate(warm_up, 2)
                    engine.settle()
                    for length in lengths:
                        done = _one(engine, side, prompt_of(length, number), say)
                        firsts[side, length] = done.logprobs[0]
                        _note(cases, side, engine, length, done)
            except ResultDiffers:
                raise
            except TieringError as error:
                if not side.may_fail:
                    raise
                say(f"  failed: {error.message}")
                failures[side.name] = NotMeasured(side.name, _in_a_line(error.message))
        _require_alike(firsts)
    return sorted(cases.values(), key=lambda case: case.prompt_tokens), list(failures.values())


def _in_a_line(message: str) -> str:
    """What happened, and the last line of the log if the message has one."""
    first, *log = message.splitlines()
    return f"{first} {log[-1].strip()}" if log else first


def _one(engine: SideDriver, side: Side, prompt: str, say: Callable[[str], None]) -> Generated:
    """One request. ResultDiffers if a part of its prompt was restored or in memory, or if its
    answer is incomplete.
    """
    done = engine.generate(prompt, NEW_TOKENS)
    if restored := engine.settle().restored_tokens:
        raise ResultDiffers(f"{side.name}: {restored} tokens were restored, not computed")
    if (done.prompt_tokens, len(done.tokens)) != (len(prompt), NEW_TOKENS):
        raise ResultDiffers(
            f"{side.name}: {done.prompt_tokens} tokens were computed and {len(done.tokens)} "
            f"generated, not {len(prompt)} and {NEW_TOKENS}"
        )
    say(f"  {len(prompt)} tokens: {seconds(done.seconds_to_first_token)}, {_rate(done):.1f}/s")
    return done


def _rate(done: Generated) -> float:
    return (len(done.tokens) - 1) / (done.seconds_to_last_token - done.seconds_to_first_token)


def _note(
    cases: dict[tuple[str, int], SideCase],
    side: Side,
    engine: SideDriver,
    length: int,
    done: Generated,
) -> None:
    case = cases.setdefault((side.name, length), SideCase(side.program, side.setting, length))
    case.engine, case.built_for = engine.engine, engine.built_for
    case.first_seconds.append(done.seconds_to_first_token)
    case.decode_rates.append(_rate(done))


def _require_alike(firsts: Mapping[tuple[Side, int], Best]) -> None:
    """ResultDiffers unless every side's best tokens after the same prompt are roughly ours."""
    ours = {length: best for (side, length), best in firsts.items() if side.program == OURS}
    for (side, length), best in firsts.items():
        if why := differs(ours[length], best):
            raise ResultDiffers(f"{side.name}, {length} tokens: is it the same model? {why}")


def differs(ours: Best, others: Best) -> str:
    """How two lists of best tokens differ by more than rounding; empty if they do not."""
    own, found = dict(ours), dict(others)
    common = own.keys() & found.keys()
    if len(common) < LEAST_COMMON:
        return f"{len(common)} of ours are among its {len(found)} best tokens: {ours} and {others}"
    apart = max(abs(own[token] - found[token]) for token in common)
    if apart > MOST_APART:
        return f"log probabilities of the same token differ by {apart:.2f}"
    return ""
