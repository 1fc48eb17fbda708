"""`tiering bench`: measurements on the real patched engine, each beside another one of the same
run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.cli.bench_run import (
    Run,
    attention_of_up,
    attention_option,
    context_for,
    engine_bench,
    numbers,
)
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.engines.bench_driver import Untiered
    from ollama_tiering.engines.drivers import Scratch


@click.group(context_settings=CONTEXT_SETTINGS)
def bench() -> None:
    """Run a benchmark on this machine.

    A benchmark starts processes of its own, with a model and directories of its own, and does not
    touch what is stored. It compares each figure with another one of the same run.
    """


@bench.command()
@click.option("--tokens", default="2048,8192", show_default=True, help="Prompt lengths.")
@attention_option
@click.option(
    "--flash",
    type=click.Choice(["on", "off"]),
    help="Whether to use flash attention.  [default: as Ollama chooses]",
)
@click.option(
    "--baselines",
    default="ours,best,default",
    show_default=True,
    help="What a restore is compared with. `ours`: the same engine computes the prompt; `best`, "
    "`default`: stock Ollama does, which takes the longest.",
)
@click.option(
    "--tier",
    type=click.Choice(["ram", "local", "both"]),
    default="both",
    show_default=True,
    help="The tier to restore from; `local` is read as after a reboot.",
)
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="How often to restart."
)
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
    """Measure the time to the first token: computed, and restored after a restart."""
    from ollama_tiering.bench import baselines as stock
    from ollama_tiering.bench import restore as measuring
    from ollama_tiering.bench.restore_table import table as restore_table
    from ollama_tiering.engines.bench_driver import BenchDriver
    from ollama_tiering.engines.choose import stock_beside
    from ollama_tiering.engines.demo import make_prompt

    lengths, names = numbers(tokens), _baselines(baselines, stock.NAMES)
    if lengths[0] <= (least := measuring.hits(repeat)):
        raise UsageError(
            f"--tokens {tokens}: {lengths[0]} is too few", hint=f"give more than {least}"
        )
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


@bench.command("cpu-attention")
@click.option("--tokens", default="8192", show_default=True, help="Prompt lengths.")
@click.option(
    "--only",
    type=click.Choice(["exact", "plain", "flash"]),
    multiple=True,
    help="Measure only this; may be given more than once. `plain`, `flash`: stock without and with "
    "flash attention.  [default: all; flash takes the longest]",
)
@engine_bench
def cpu_attention(run: Run, tokens: str, only: tuple[str, ...]) -> None:
    """Compare our exact attention on the CPU with stock's, inside Ollama.

    This measures the time to the first token and the tokens per second after it.
    """
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
    help="How often to measure each length in each way.",
)
@attention_option
@engine_bench
def gate(run: Run, tokens: str, repeat: int, attention: str | None) -> None:
    """Measure whether the gate chooses well.

    The gate decides for each prompt whether to restore its stored part or to compute it again.
    """
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
