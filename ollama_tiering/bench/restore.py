"""What a restore saves: time to the first token computed cold, and after a restart of both
processes.

The engine is given; this module only knows the order. The cold run, which takes long, is measured
once per length, the restore several times. After as many further restarts the runner also times a
memcpy of the same bytes. That costs time, so these restarts give no time to the first token.

The reference is the in-memory hit: all of the prompt but its last token is in memory. A cache with
windows has then dropped what the same prompt would need, so the hits use a prompt that grows by one
token from request to request, and the cold run computes it without these tokens.

The gain is against a cold run with the attention that the restoring engine itself uses. Beside it
the table has the time that stock takes for the same prompt (`baselines`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ollama_tiering.bench.baselines import (
    BEST,
    DEFAULT,
    NONE,
    OURS,
    Baselines,
    Cold,
    warm_up_tokens,
)
from ollama_tiering.bench.table import seconds
from ollama_tiering.errors import ResultDiffers

if TYPE_CHECKING:
    from ollama_tiering.engines.drivers import Answer

NEW_TOKENS = 8


class Copying(Protocol):
    """What the runner says of its last restore. Fetching is reading and comparing checksums."""

    @property
    def bytes(self) -> int: ...
    @property
    def lookup_seconds(self) -> float: ...
    @property
    def fetch_seconds(self) -> float: ...
    @property
    def copy_seconds(self) -> float: ...
    @property
    def memcpy_seconds(self) -> float: ...
    @property
    def memcpy_all_seconds(self) -> float: ...


class RestoringDriver(Protocol):
    """`again` restarts both processes; `reboot` also empties RAM; `measure` times a memcpy."""

    @property
    def attention(self) -> str:
        """How it computes attention, in words; known when it has answered."""

    def ask(self, prompt: str, new_tokens: int) -> Answer: ...

    def again(self, *, reboot: bool, measure: bool) -> None: ...

    def last_restore(self) -> Copying: ...


@dataclass(frozen=True, slots=True)
class RestoreCase:
    """One prompt length, restored from one tier."""

    attention: str
    tier: str
    prompt_tokens: int
    restored_tokens: int
    cold_seconds: float
    hit_seconds: float  # median
    restored_seconds: tuple[float, ...]
    restored_bytes: int
    lookup_seconds: float  # this and the following: medians
    fetch_seconds: float
    copy_seconds: float
    memcpy_seconds: float  # one thread
    memcpy_all_seconds: float  # as many threads as the restore
    stock: Baselines = NONE

    @property
    def whole_seconds(self) -> float:
        return self.lookup_seconds + self.fetch_seconds + self.copy_seconds

    @property
    def restored_median(self) -> float:
        return statistics.median(self.restored_seconds)

    @property
    def colds(self) -> dict[str, Cold | None]:
        """What the restore is compared with; None means not measured."""
        ours = Cold(self.attention, self.cold_seconds)
        return {OURS: ours, BEST: self.stock.best, DEFAULT: self.stock.default}

    @property
    def gain(self) -> float:
        """Against the same engine."""
        return self.cold_seconds / self.restored_median

    @property
    def of_hit(self) -> float:
        """Restored ÷ in-memory hit."""
        return self.restored_median / self.hit_seconds

    @property
    def gains(self) -> dict[str, float | None]:
        return {
            name: cold.seconds / self.restored_median if cold else None
            for name, cold in self.colds.items()
        }

    def as_json(self) -> dict[str, Any]:
        fields = {n: getattr(self, n) for n in self.__dataclass_fields__ if n != "stock"}
        colds = {name: cold.as_json() if cold else None for name, cold in self.colds.items()}
        own = {"restored_median_seconds": self.restored_median, "gain": self.gain}
        own["restored_of_hit"] = self.of_hit
        return fields | own | {"cold": colds, "gains": self.gains}


def measure(
    engine: RestoringDriver,
    prompt_of: Callable[[int], str],
    lengths: Sequence[int],
    tiers: Sequence[str],
    say: Callable[[str], None],
    *,
    repeat: int,
) -> list[RestoreCase]:
    """Measures every length from every tier. The weights are read before the first measurement. A
    character of a prompt is a token. ResultDiffers if a restored answer differs from the in-memory
    hit, or begins at another token.
    """
    engine.ask(prompt_of(warm_up_tokens(lengths)), 2)
    cases = []
    for length in lengths:
        prompt = prompt_of(length)
        say(f"{length} tokens: cold")
        first = engine.ask(prompt[: -hits(repeat)], 1)
        if first.restored_tokens:
            raise ResultDiffers(f"the cold run of {length} tokens restored some")
        cold = Cold(engine.attention, first.seconds_to_first_token)
        say(f"  {seconds(cold.seconds)} to the first token, attention {cold.attention}")
        hit = _in_memory(engine, prompt, repeat)
        cases += [_from_tier(engine, prompt, cold, hit, tier, say, repeat) for tier in tiers]
    return cases


def with_stock(
    cases: Sequence[RestoreCase], lengths: Sequence[int], stock: Mapping[int, Baselines]
) -> list[RestoreCase]:
    """The cases of `measure`, each with the time that stock took for its prompt."""
    tiers = len(cases) // len(lengths)
    return [replace(case, stock=stock[lengths[n // tiers]]) for n, case in enumerate(cases)]


@dataclass(frozen=True, slots=True)
class _Hit:
    answer: Answer
    seconds: float  # median


def hits(repeat: int) -> int:
    """How many in-memory hits there are, and so by how many tokens the cold prompt is shorter: one
    more than restarts, because the last one's answer is the reference.
    """
    return repeat + 1


def _in_memory(engine: RestoringDriver, prompt: str, repeat: int) -> _Hit:
    grows = range(1 - hits(repeat), 0)
    answers = [engine.ask(prompt[:left], 1) for left in grows]
    answers.append(engine.ask(prompt, NEW_TOKENS))
    for answer in answers:
        if answer.restored_tokens or answer.memory_tokens != answer.prompt_tokens - 1:
            raise ResultDiffers(
                f"{answer.memory_tokens} of {answer.prompt_tokens} tokens were found in memory, "
                f"{answer.restored_tokens} were restored: no in-memory hit"
            )
    seconds = statistics.median(answer.seconds_to_first_token for answer in answers)
    return _Hit(answers[-1], seconds)


def _from_tier(
    engine: RestoringDriver,
    prompt: str,
    cold: Cold,
    hit: _Hit,
    tier: str,
    say: Callable[[str], None],
    repeat: int,
) -> RestoreCase:
    restored: list[Answer] = []
    reports: list[Copying] = []
    for number in range(2 * repeat):
        beside = number >= repeat
        what = ", with a memcpy beside it" if beside else ""
        say(f"{len(prompt)} tokens: restored from {tier}, {number % repeat + 1} of {repeat}{what}")
        engine.again(reboot=tier == "local", measure=beside)
        answer = engine.ask(prompt, NEW_TOKENS)
        _require_same(hit.answer, answer)
        if beside:
            reports.append(engine.last_restore())
        else:
            restored.append(answer)

    def median(of: Callable[[Copying], float]) -> float:
        return statistics.median(map(of, reports))

    return RestoreCase(
        attention=cold.attention,
        tier=tier,
        prompt_tokens=hit.answer.prompt_tokens,
        restored_tokens=restored[-1].restored_tokens,
        cold_seconds=cold.seconds,
        hit_seconds=hit.seconds,
        restored_seconds=tuple(answer.seconds_to_first_token for answer in restored),
        restored_bytes=reports[-1].bytes,
        lookup_seconds=median(lambda r: r.lookup_seconds),
        fetch_seconds=median(lambda r: r.fetch_seconds),
        copy_seconds=median(lambda r: r.copy_seconds),
        memcpy_seconds=median(lambda r: r.memcpy_seconds),
        memcpy_all_seconds=median(lambda r: r.memcpy_all_seconds),
    )


def _require_same(hit: Answer, restored: Answer) -> None:
    if not restored.restored_tokens:
        raise ResultDiffers("nothing was restored", hint="run again with --keep, read the logs")
    if restored.memory_tokens + restored.restored_tokens != hit.memory_tokens:
        raise ResultDiffers(
            f"{restored.restored_tokens} tokens were restored, and the in-memory hit has "
            f"{hit.memory_tokens}"
        )
    if (hit.tokens, hit.logprobs) != (restored.tokens, restored.logprobs):
        raise ResultDiffers("a restored answer differs from that of the in-memory hit")
