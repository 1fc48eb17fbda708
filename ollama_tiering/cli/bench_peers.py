"""`tiering bench peers`: ours beside stock and beside llama.cpp and ik_llama.cpp, in one run."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli.bench_run import (
    Run,
    attention_of_up,
    context_for,
    engine_bench,
    numbers,
)
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.bench.peers import Failure, Side
    from ollama_tiering.engines.drivers import Scratch
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
    help="Runs of each side, for each length; or one number for all.",
)
@click.option("--threads", type=click.IntRange(1), help="Of each side.  [default: physical cores]")
@click.option(
    "--only",
    type=click.Choice(_BESIDE),
    multiple=True,
    help="What to put beside ours; may be given more than once.  [default: all; `default` and "
    "`best` are stock's]",
)
@click.option(
    "--short",
    type=click.Choice(_BESIDE),
    multiple=True,
    help="What to run with the shortest prompt only; may be given more than once.",
)
@click.option(
    "--peers",
    type=click.Path(file_okay=False, path_type=Path),
    help="Virtual environment of the peers; one that is there is taken as it is.  [default: one "
    "below the cache, with pinned wheels]",
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
    """First token and tokens/s beside stock, llama.cpp and ik_llama.cpp, in turns.

    llama.cpp and ik_llama.cpp come as wheels, with and without flash attention; one that cannot
    be installed or does not load the model is left out, and the record says why.
    """
    import psutil

    from ollama_tiering.bench import peers as measuring
    from ollama_tiering.bench.peers_table import table as peers_table
    from ollama_tiering.patchset.report import Report

    repeats, binary = _repeats(tokens, repeat), run.binary()
    threads = threads or psutil.cpu_count(logical=False) or 1
    place = _Place(binary, context_for(max(repeats)), threads)
    wanted = {name: name in short for name in only or _BESIDE}
    stored_tokens = sum(length * rounds for length, rounds in repeats.items())
    with run.scratch(stored_tokens=stored_tokens) as scratch:
        attentions: list[str] = []
        sides = [_ours(place, scratch, attentions), *_stock(place, scratch, wanted)]
        others, absent = _others(place, scratch, wanted, peers, Report(quiet=run.quiet))
        cases, failures = measuring.measure(
            [*sides, *others],
            prompt_of,
            repeats,
            run.say,
        )
    table = peers_table(
        run.shape,
        cases,
        [*absent, *failures],
        threads=place.threads,
        batch_tokens=_BATCH_TOKENS,
        stock=place.stock_words,
    )
    results = [case.as_json() for case in cases]
    results += [failure.as_json() for failure in (*absent, *failures)]
    engine = next(case.engine for case in cases if case.program == measuring.OURS)
    run.publish(table, results, engine, attentions[-1])


def prompt_of(tokens: int, number: int) -> str:
    """That of a round. No two share a beginning, or an engine would have a part in memory."""
    from ollama_tiering.engines.demo import make_prompt

    return make_prompt(tokens, seed=_SEEDS * (number + 2) + tokens)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is alike for all sides."""

    binary: Path
    ctx: int
    threads: int

    @property
    def stock(self) -> Path:
        from ollama_tiering.engines.choose import stock_beside

        return stock_beside(self.binary) or self.binary

    @property
    def stock_words(self) -> str:
        if self.stock != self.binary:
            return "stock Ollama, built without our patches"
        return "the same binary with OLLAMA_CPU_ATTENTION=stock, tiering off"


def _ours(place: _Place, scratch: Scratch, attentions: list[str]) -> Side:
    """As `tiering up` serves it; what the runner says of its attention is added to the list."""
    from ollama_tiering.bench.peers import OURS, Engine, Side
    from ollama_tiering.engines.bench_driver import BenchDriver

    asked_for = attention_of_up()

    @contextlib.contextmanager
    def start() -> Iterator[Engine]:
        driver = BenchDriver(
            place.binary, scratch, ctx=place.ctx, attention=asked_for, threads=place.threads
        )
        with contextlib.closing(driver):
            driver.start()
            yield driver
            attentions.append(driver.attention)

    return Side(OURS, f"{asked_for} attention", start)


def _stock(place: _Place, scratch: Scratch, wanted: Mapping[str, bool]) -> list[Side]:
    """As it comes, and each other way it has: one of them is its best. `wanted` says of each side
    whether it is to run with the shortest prompt only.
    """
    from ollama_tiering.bench.peers import Engine, Side
    from ollama_tiering.engines.bench_driver import Untiered

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
        begin: Callable[[], AbstractContextManager[Engine]] = functools.partial(start, flash)
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
) -> tuple[list[Side], list[Failure]]:
    """The peers with and without flash attention, and those that can't be had."""
    from ollama_tiering.bench.peers import Engine, Failure, Side
    from ollama_tiering.engines.peers import environment
    from ollama_tiering.engines.peers.driver import PeerDriver, Settings

    peers = [peer for peer in environment.PEERS if peer.name in wanted]
    if not peers:
        return [], []
    python, absent = environment.python_with(peers, folder, report)

    @contextlib.contextmanager
    def start(settings: Settings) -> Iterator[Engine]:
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
    return sides, [Failure(name, reason) for name, reason in absent.items()]


def _flash_words(flash: bool) -> str:
    return f"{'with' if flash else 'without'} flash attention"


def _repeats(tokens: str, repeat: str) -> dict[int, int]:
    """Runs by length."""
    lengths, runs = tokens.split(","), repeat.split(",")
    numbers(tokens)  # says what is wrong with them
    if not all(part.strip().isdecimal() and int(part) for part in runs):
        raise UsageError(f"--repeat {repeat}: not a list of numbers", hint="write 3,1")
    if len(runs) not in (1, len(lengths)):
        raise UsageError(f"--repeat {repeat}: one number, or one for each of {tokens}")
    return dict(zip(map(int, lengths), map(int, runs * len(lengths)), strict=False))
