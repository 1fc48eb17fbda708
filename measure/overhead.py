"""What tiering costs when there is nothing to restore: the same requests to two servers of one
binary.

One server has tiering on, the other one off. Every prompt is new, so nothing is found. Requests go
in pairs, in alternating order. Before the next measured request the tiered server finishes storing,
because its work would otherwise slow the other server. What storing costs while requests go on is
measured by the bursts. After each request of a pair its prompt is asked again a few times: the
in-memory hit, with and without tiering.

Both servers are started anew several times. One process can be slower than another of the same
binary as long as it lives, because of where the pages of its weights happen to lie. No number of
pairs between the same two processes removes that from their ratio. The order of starting matters,
too, for two servers that differ in nothing. So each is started first as often as the other, and a
number is the geometric mean of both orders' medians.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import click

from measure.running import main
from ollama_tiering.bench.table import Table, seconds
from ollama_tiering.cli.bench_run import (
    Run,
    attention_of_up,
    attention_option,
    context_for,
    engine_bench,
)
from ollama_tiering.engines.bench_driver import BenchDriver, Untiered
from ollama_tiering.engines.demo import make_prompt
from ollama_tiering.errors import ResultDiffers

if TYPE_CHECKING:
    from ollama_tiering.launch.ollama import Generated

BURST_REQUESTS = 4
HITS = 3  # of each request; their median counts


class PromptCounts(Protocol):
    """Tokens of all prompts since the model was loaded."""

    @property
    def restored_tokens(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...


class PausableServer(Protocol):
    def generate(self, prompt: str, new_tokens: int) -> Generated: ...

    def settle(self) -> PromptCounts:
        """Returns when nothing goes on in the background."""

    def stop(self) -> None: ...
    def resume(self) -> None:
        """Starts what was stopped; the model is loaded."""


@dataclass(frozen=True, slots=True)
class OnOff:
    """The same measure with tiering on and off."""

    on: float
    off: float
    on_was_first: bool = True  # the tiered server was started before the other one

    @property
    def ratio(self) -> float:
        return self.on / self.off


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    unit: str
    better: str  # "lower" or "higher"
    pairs: tuple[OnOff, ...]

    @property
    def median(self) -> float:
        """The geometric mean over both orders of starting, of the medians of the pairs' ratios."""
        return statistics.geometric_mean(self._medians().values())

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the ratios without what the order of starting makes of them."""
        medians, median = self._medians(), self.median
        ratios = [pair.ratio * median / medians[pair.on_was_first] for pair in self.pairs]
        if len(ratios) < 2:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high

    def _medians(self) -> dict[bool, float]:
        """By order; with one start there is only one."""
        orders = {pair.on_was_first for pair in self.pairs}
        return {
            order: statistics.median(p.ratio for p in self.pairs if p.on_was_first is order)
            for order in orders
        }

    def as_json(self) -> dict[str, Any]:
        pairs = [[pair.on, pair.off, pair.on_was_first] for pair in self.pairs]
        low, high = self.quartiles
        return {
            "measure": self.name,
            "median_ratio_on_off": self.median,
            "quartiles": [low, high],
            "pairs_on_off_first": pairs,
        }


def measure(
    on: PausableServer,
    off: PausableServer,
    prompts: Callable[[int], str],
    say: Callable[[str], None],
    *,
    pairs: int,
    starts: int,
    bursts: int,
    burst_requests: int,
    new_tokens: int,
) -> list[Measure]:
    """`prompts(i)` gives a text that shares no beginning with any other. Both servers run at first,
    the tiered one was started before the other, and they are started anew `starts` - 1 times, in
    turns as to which is first, after about as many pairs each time.
    """
    number = 0

    def prompt() -> str:
        nonlocal number
        number += 1
        return prompts(number)

    def load() -> None:  # the first request reads the weights
        for server in (on, off):
            server.generate(prompt(), new_tokens)
            server.settle()

    def pair(index: int) -> None:
        say(f"pair {index + 1} of {pairs}")
        text, found, again = prompt(), {}, {}
        for server in _turning(on, off, index):
            found[server is on] = server.generate(text, new_tokens)
            before = server.settle()
            again[server is on] = _hits(server, text, new_tokens)
            if server is on:
                _require_hits(before, server.settle())
        firsts.append(_pair({side: found[side].seconds_to_first_token for side in found}, start))
        decodes.append(_pair({side: _decode([found[side], *again[side]]) for side in found}, start))
        hits.append(_pair({side: _first(again[side]) for side in found}, start))

    def burst(index: int) -> None:
        say(f"burst {index + 1} of {bursts}")
        texts, taken = [prompt() for _ in range(burst_requests)], {}
        for server in _turning(on, off, index):
            started = time.perf_counter()
            for text in texts:
                server.generate(text, new_tokens)
            taken[server is on] = time.perf_counter() - started
            server.settle()
        walls.append(_pair(taken, start))

    firsts: list[OnOff] = []
    decodes: list[OnOff] = []
    hits: list[OnOff] = []
    walls: list[OnOff] = []
    starts = min(starts, pairs)
    for start in range(starts):
        if start:
            for server in (on, off):
                server.stop()
            for server in _turning(on, off, start):
                server.resume()
        load()
        for index in range(pairs):
            if index * starts // pairs == start:
                pair(index)
        for index in range(bursts):
            if index * starts // bursts == start:
                burst(index)
    measures = [
        Measure("time to first token", "s", "lower", tuple(firsts)),
        Measure("decode, tokens/s", "tokens/s", "higher", tuple(decodes)),
        Measure("time to first token, in-memory hit", "s", "lower", tuple(hits)),
    ]
    if walls:
        name = f"{burst_requests} requests without a pause"
        measures.append(Measure(name, "s", "lower", tuple(walls)))
    return measures


def _turning(on: PausableServer, off: PausableServer, index: int) -> Sequence[PausableServer]:
    return (on, off) if index % 2 == 0 else (off, on)


def _pair(of: Mapping[bool, float], start: int) -> OnOff:
    """Of what was measured with tiering on and off, after start number `start`."""
    return OnOff(of[True], of[False], on_was_first=start % 2 == 0)


def _hits(server: PausableServer, prompt: str, new_tokens: int) -> list[Generated]:
    """In-memory hits of the prompt that this server computed last."""
    taken = []
    for _ in range(HITS):
        taken.append(server.generate(prompt, new_tokens))
        server.settle()
    return taken


def _first(answers: Sequence[Generated]) -> float:
    return statistics.median(answer.seconds_to_first_token for answer in answers)


def _decode(answers: Sequence[Generated]) -> float:
    return statistics.median(answer.decode_tokens_per_second for answer in answers)


def _require_hits(before: PromptCounts, after: PromptCounts) -> None:
    """ResultDiffers unless all but the last token of each was in memory."""
    computed = after.recomputed_tokens - before.recomputed_tokens
    if computed != HITS or after.restored_tokens != before.restored_tokens:
        raise ResultDiffers(
            f"the same prompt {HITS} times again: {computed} tokens were computed, not {HITS}, and "
            f"{after.restored_tokens - before.restored_tokens} restored",
            hint="is the window shorter than prompt and answer? --new-tokens makes them shorter",
        )


def table(
    shape: str,
    prompt_tokens: int,
    new_tokens: int,
    starts: int,
    measures: list[Measure],
    attention: str,
) -> Table:
    rows = []
    for one in measures:
        low, high = one.quartiles
        on, off = (statistics.median(getattr(p, side) for p in one.pairs) for side in ("on", "off"))
        rows.append(
            [
                one.name,
                f"{one.median:.3f}",
                f"{low:.3f} to {high:.3f}",
                str(len(one.pairs)),
                seconds(on) if one.unit == "s" else f"{on:.2f}",
                seconds(off) if one.unit == "s" else f"{off:.2f}",
                one.better,
            ]
        )
    headings = ["", "tiering on ÷ off", "quartiles", "pairs", "on", "off", "better is"]
    notes = [
        f"Prompts of {prompt_tokens:,} tokens that nothing is stored of, {new_tokens} new tokens.",
        f"Attention, with tiering on and off: {attention}.",
        "Two servers of one binary, the same requests to both, in turns. Both were started "
        f"{starts} times, with about as many pairs each, each of them first as often as the other "
        "(or once more): the one that is started first is slower for as long as it lives. The "
        "ratio is the geometric mean of the medians of both orders' pairs.",
        f"In-memory hit: the prompt of the pair asked again, the median of {HITS} requests.",
        f"Decode: the median of these and the first, {1 + HITS} answers of each side of a pair.",
        "In a burst the tiered server stores one answer while it computes the next.",
    ]
    return Table(f"Cost of tiering with nothing to restore, {shape}", headings, rows, notes)


@click.command()
@click.option(
    "--pairs",
    type=click.IntRange(2),
    default=18,
    show_default=True,
    help="Number of requests; each is sent with tiering on and with it off.",
)
@click.option(
    "--starts",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="How often both servers are started anew; at most once per pair.",
)
@click.option(
    "--bursts",
    type=click.IntRange(0),
    default=4,
    show_default=True,
    help=f"Rounds of {BURST_REQUESTS} requests without a pause.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(2),
    default=512,
    show_default=True,
    help="Length of a prompt in tokens.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    help="Length of an answer in tokens.",
)
@attention_option
@engine_bench
def overhead(
    run: Run,
    pairs: int,
    starts: int,
    bursts: int,
    prompt_tokens: int,
    new_tokens: int,
    attention: str | None,
) -> None:
    """Measure what tiering costs when there is nothing to restore."""

    attention = attention or attention_of_up()
    binary, ctx = run.binary(), context_for(prompt_tokens + new_tokens)
    starts = min(starts, pairs)
    requests = starts + pairs + bursts * BURST_REQUESTS
    with (
        run.scratch(stored_tokens=requests * (prompt_tokens + new_tokens)) as scratch,
        contextlib.closing(BenchDriver(binary, scratch, ctx=ctx, attention=attention)) as on,
        contextlib.closing(Untiered(binary, scratch, ctx=ctx, attention=attention)) as off,
    ):
        on.start()
        off.start()
        measures = measure(
            on,
            off,
            lambda number: make_prompt(prompt_tokens, seed=number),
            run.say,
            pairs=pairs,
            starts=starts,
            bursts=bursts,
            burst_requests=BURST_REQUESTS,
            new_tokens=new_tokens,
        )
        how, engine = on.attention, on.engine
    shown = table(run.shape, prompt_tokens, new_tokens, starts, measures, how)
    run.publish(shown, [measure.as_json() for measure in measures], engine, how)


if __name__ == "__main__":
    main(overhead)
