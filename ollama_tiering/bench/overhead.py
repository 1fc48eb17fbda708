"""What tiering costs when there is nothing to restore: the same requests to two servers of one
binary.

One server has tiering on, the other not. Every prompt is new, so nothing is found. Requests go in
pairs, the order turning each time; a number is the median of the ratios of the pairs. Between two
measured requests the tiered server has finished storing, or its work would be counted against the
other one; what storing costs while requests go on is the business of the bursts. After each request
of a pair its prompt is asked again a few times: the in-memory hit, with and without tiering.

Both servers are started anew several times. Where the pages of its weights happen to lie makes one
process slower than another of the same binary for as long as it lives, and no number of pairs
between the same two processes takes that out of their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ollama_tiering.bench.table import Table, seconds
from ollama_tiering.errors import ResultDiffers

HITS = 3  # of each request; their median counts


class Generated(Protocol):
    @property
    def seconds_to_first_token(self) -> float: ...
    @property
    def decode_tokens_per_second(self) -> float: ...


class Counts(Protocol):
    """Tokens of all prompts since the model was loaded."""

    @property
    def restored_tokens(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...


class Server(Protocol):
    def generate(self, prompt: str, new_tokens: int) -> Generated: ...

    def settle(self) -> Counts:
        """Returns when nothing goes on in the background."""

    def stop(self) -> None: ...
    def resume(self) -> None:
        """Starts what was stopped; the model is loaded."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same measure with tiering on and off."""

    on: float
    off: float

    @property
    def ratio(self) -> float:
        return self.on / self.off


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    unit: str
    better: str  # "lower" or "higher"
    pairs: tuple[Pair, ...]

    @property
    def median(self) -> float:
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def quartiles(self) -> tuple[float, float]:
        ratios = [pair.ratio for pair in self.pairs]
        if len(ratios) < 2:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high

    def as_json(self) -> dict[str, Any]:
        pairs = [[pair.on, pair.off] for pair in self.pairs]
        low, high = self.quartiles
        return {
            "measure": self.name,
            "median_ratio_on_off": self.median,
            "quartiles": [low, high],
            "pairs_on_off": pairs,
        }


def measure(
    on: Server,
    off: Server,
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
    and are started anew `starts` - 1 times, after about as many pairs each time.
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

    load()
    firsts, decodes, hits = [], [], []
    for index in range(pairs):
        if index and index * starts // pairs > (index - 1) * starts // pairs:  # a share is full
            for server in (on, off):
                server.stop()
            for server in _turning(on, off, index):
                server.resume()
            load()
        say(f"pair {index + 1} of {pairs}")
        text, found, again = prompt(), {}, {}
        for server in _turning(on, off, index):
            found[server is on] = server.generate(text, new_tokens)
            before = server.settle()
            again[server is on] = _hits(server, text, new_tokens)
            if server is on:
                _require_hits(before, server.settle())
        firsts.append(Pair(*(found[side].seconds_to_first_token for side in (True, False))))
        decodes.append(Pair(*(_decode([found[side], *again[side]]) for side in (True, False))))
        hits.append(Pair(*(_first(again[side]) for side in (True, False))))
    walls = []
    for index in range(bursts):
        say(f"burst {index + 1} of {bursts}")
        texts, taken = [prompt() for _ in range(burst_requests)], {}
        for server in _turning(on, off, index):
            started = time.perf_counter()
            for text in texts:
                server.generate(text, new_tokens)
            taken[server is on] = time.perf_counter() - started
            server.settle()
        walls.append(Pair(taken[True], taken[False]))
    measures = [
        Measure("time to first token", "s", "lower", tuple(firsts)),
        Measure("decode, tokens/s", "tokens/s", "higher", tuple(decodes)),
        Measure("time to first token, in-memory hit", "s", "lower", tuple(hits)),
    ]
    if walls:
        name = f"{burst_requests} requests without a pause"
        measures.append(Measure(name, "s", "lower", tuple(walls)))
    return measures


def _turning(on: Server, off: Server, index: int) -> Sequence[Server]:
    return (on, off) if index % 2 == 0 else (off, on)


def _hits(server: Server, prompt: str, new_tokens: int) -> list[Generated]:
    """Of a prompt that was the last one this server computed."""
    taken = []
    for _ in range(HITS):
        taken.append(server.generate(prompt, new_tokens))
        server.settle()
    return taken


def _first(answers: Sequence[Generated]) -> float:
    return statistics.median(answer.seconds_to_first_token for answer in answers)


def _decode(answers: Sequence[Generated]) -> float:
    return statistics.median(answer.decode_tokens_per_second for answer in answers)


def _require_hits(before: Counts, after: Counts) -> None:
    """All but the last token of each was in memory."""
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
        "Two servers of one binary, the same requests to both, in turns; the ratio is the median "
        f"of the pairs' ratios. Both were started {starts} times, with about as many pairs each.",
        f"In-memory hit: the prompt of the pair asked again, the median of {HITS} requests.",
        f"Decode: the median of these and the first, {1 + HITS} answers of each side of a pair.",
        "In a burst the tiered server stores one answer while it computes the next.",
    ]
    return Table(f"Cost of tiering with nothing to restore, {shape}", headings, rows, notes)
