"""`tiering bench`: measurements on the real patched engine, each against one of the same run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.cli.bench_attention import attention
from ollama_tiering.cli.bench_peers import peers
from ollama_tiering.cli.bench_run import (
    Run,
    attention_of_up,
    attention_option,
    context_for,
    engine_bench,
    numbers,
)
from ollama_tiering.cli.bench_store import store
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.engines.bench_driver import Untiered
    from ollama_tiering.engines.drivers import Scratch

_BURST_REQUESTS = 4


@click.group(context_settings=CONTEXT_SETTINGS)
def bench() -> None:
    """Measure on this machine: everything private, as in `tiering demo`."""


bench.add_command(store)
bench.add_command(attention)
bench.add_command(peers)


@bench.command()
@click.option("--tokens", default="2048,8192", show_default=True, help="Prompt lengths.")
@attention_option
@click.option(
    "--flash",
    type=click.Choice(["on", "off"]),
    help="Flash attention.  [default: as Ollama likes it]",
)
@click.option(
    "--baselines",
    default="ours,best,default",
    show_default=True,
    help="What to compute cold; `best` and `default` are stock's, and take the longest.",
)
@click.option(
    "--tier",
    type=click.Choice(["ram", "local", "both"]),
    default="both",
    show_default=True,
    help="What is restored from; `local` is read as after a reboot.",
)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Restarts.")
@engine_bench
def restore(
    run: Run,
    tokens: str,
    attention: str | None,
    flash: str | None,
    baselines: str,
    tier: str,
    repeat: int,
) -> None:
    """Time to the first token, cold against restored after a restart of both processes."""
    from ollama_tiering.bench import baselines as stock
    from ollama_tiering.bench import restore as measuring
    from ollama_tiering.bench.restore_table import table as restore_table
    from ollama_tiering.engines.bench_driver import BenchDriver
    from ollama_tiering.engines.choose import stock_beside
    from ollama_tiering.engines.demo import make_prompt

    lengths, names = numbers(tokens), _baselines(baselines, stock.NAMES)
    if lengths[0] <= (least := measuring.hits(repeat)):
        raise UsageError(f"--tokens {tokens}: {lengths[0]} is too few", hint=f"more than {least}")
    tiers = ["ram", "local"] if tier == "both" else [tier]
    attention = attention or attention_of_up()
    binary, ctx = run.binary(), context_for(max(lengths))
    plain = stock_beside(binary)

    def prompt_of(length: int) -> str:
        return make_prompt(length, seed=length)

    with run.scratch(stored_tokens=sum(lengths)) as scratch:
        wanted = None if flash is None else flash == "on"
        driver = BenchDriver(binary, scratch, ctx=ctx, attention=attention, flash=wanted)
        with contextlib.closing(driver):
            driver.start()
            cases = measuring.measure(driver, prompt_of, lengths, tiers, run.say, repeat=repeat)
            how, engine = driver.attention, driver.engine

        start = functools.partial(_untiered, plain or binary, scratch, ctx, "stock")
        found = stock.measure(start, prompt_of, lengths, names, run.say)
    cases = measuring.with_stock(cases, lengths, found)
    stocks = "stock Ollama, built without our patches"
    if plain is None:
        stocks = "the same binary with OLLAMA_CPU_ATTENTION=stock, tiering off"
    results = [case.as_json() | {"stock": stocks} for case in cases]
    run.publish(restore_table(run.shape, cases, stocks), results, engine, how)


@bench.command()
@click.option(
    "--pairs",
    type=click.IntRange(2),
    default=15,
    show_default=True,
    help="Requests, each with it on and off.",
)
@click.option(
    "--starts",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Times that both servers are started; at most once a pair.",
)
@click.option(
    "--bursts",
    type=click.IntRange(0),
    default=4,
    show_default=True,
    help=f"Rounds of {_BURST_REQUESTS} requests without a pause.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(2),
    default=512,
    show_default=True,
    help="Length of a prompt.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    help="Length of an answer.",
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
    """What tiering costs with nothing to restore: the same requests with it on and off."""
    from ollama_tiering.bench import overhead as measuring
    from ollama_tiering.engines.bench_driver import BenchDriver, Untiered
    from ollama_tiering.engines.demo import make_prompt

    attention = attention or attention_of_up()
    binary, ctx = run.binary(), context_for(prompt_tokens + new_tokens)
    starts = min(starts, pairs)
    requests = starts + pairs + bursts * _BURST_REQUESTS
    with (
        run.scratch(stored_tokens=requests * (prompt_tokens + new_tokens)) as scratch,
        contextlib.closing(BenchDriver(binary, scratch, ctx=ctx, attention=attention)) as on,
        contextlib.closing(Untiered(binary, scratch, ctx=ctx, attention=attention)) as off,
    ):
        on.start()
        off.start()
        measures = measuring.measure(
            on,
            off,
            lambda number: make_prompt(prompt_tokens, seed=number),
            run.say,
            pairs=pairs,
            starts=starts,
            bursts=bursts,
            burst_requests=_BURST_REQUESTS,
            new_tokens=new_tokens,
        )
        how, engine = on.attention, on.engine
    table = measuring.table(run.shape, prompt_tokens, new_tokens, starts, measures, how)
    run.publish(table, [measure.as_json() for measure in measures], engine, how)


@bench.command("cpu-attention")
@click.option("--tokens", default="8192", show_default=True, help="Prompt lengths.")
@click.option(
    "--only",
    type=click.Choice(["exact", "plain", "flash"]),
    multiple=True,
    help="A setting; may be given more than once.  [default: all; flash takes the longest]",
)
@engine_bench
def cpu_attention(run: Run, tokens: str, only: tuple[str, ...]) -> None:
    """Exact attention on the CPU against stock's: first token and tokens/s inside Ollama."""
    from ollama_tiering.bench import cpu_attention as measuring
    from ollama_tiering.engines.demo import make_prompt

    lengths, binary = numbers(tokens), run.binary()
    settings = {
        "exact": (measuring.EXACT, "exact", None),
        "plain": (measuring.PLAIN, "stock", False),
        "flash": (measuring.FLASH, "stock", None),
    }
    with run.scratch() as scratch:
        ctx = context_for(max(lengths))
        names: list[str] = []
        engines = {
            name: functools.partial(_untiered, binary, scratch, ctx, attention, flash, names)
            for key, (name, attention, flash) in settings.items()
            if not only or key in only
        }
        cases = measuring.measure(
            engines, lambda length: make_prompt(length, seed=length), lengths, run.say
        )
    table = measuring.table(run.shape, cases)
    run.publish(table, [case.as_json() for case in cases], names[0], ", ".join(engines))


@bench.command()
@click.option("--tokens", default="64,128,256,512,1024", show_default=True, help="Prompt lengths.")
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=9,
    show_default=True,
    help="Runs of each length and way.",
)
@attention_option
@engine_bench
def gate(run: Run, tokens: str, repeat: int, attention: str | None) -> None:
    """Whether the gate chooses the better side: restore or recompute."""
    from ollama_tiering.bench import gate as measuring
    from ollama_tiering.engines.bench_driver import GateDriver
    from ollama_tiering.engines.demo import make_prompt

    lengths, binary = numbers(tokens), run.binary()
    attention = attention or attention_of_up()
    ctx = context_for(max(*lengths, 1024))
    choices = []
    for tier in ("ram", "local"):
        with run.scratch() as scratch:
            driver = GateDriver(binary, scratch, ctx=ctx, attention=attention, ram=tier == "ram")
            with contextlib.closing(driver):
                driver.start()
                choices += measuring.measure(
                    driver,
                    lambda length, seed: make_prompt(length, seed=seed),
                    lengths,
                    run.say,
                    tier=tier,
                    repeat=repeat,
                )
                how, engine = driver.attention, driver.engine
    table = measuring.table(run.shape, choices, how)
    run.publish(table, [choice.as_json() for choice in choices], engine, how)


@contextlib.contextmanager
def _untiered(
    binary: Path,
    scratch: Scratch,
    ctx: int,
    attention: str,
    flash: bool | None,
    names: list[str] | None = None,
) -> Iterator[Untiered]:
    from ollama_tiering.engines.bench_driver import Untiered

    driver = Untiered(binary, scratch, ctx=ctx, attention=attention, flash=flash)
    with contextlib.closing(driver):
        driver.start()
        if names is not None:
            names.append(driver.engine)
        yield driver


def _baselines(text: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--baselines {text}: no {unknown[0]!r}", hint=f"of {','.join(known)}")
    return names
