"""`tiering bench`: measurements on the real patched engine, each against one of the same run."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.cli.bench_attention import attention
from ollama_tiering.cli.bench_store import store
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.bench.table import Table
    from ollama_tiering.launch.drivers import Scratch

Command = Callable[..., Any]

_COMMON = (
    click.option("--shape", default="qwen3-0.6b", show_default=True, help="See `model shapes`."),
    click.option("--tag", help="Version of Ollama.  [default: v0.16.3]"),
    click.option("--cpu", type=click.Choice(["variants", "native"]), help="CPU code of the build."),
    click.option("--json", "as_json", is_flag=True, help="As JSON."),
    click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Markdown here."),
    click.option("--keep", is_flag=True, help="Leave model, blocks and logs, and say where."),
    click.option("-q", "--quiet", is_flag=True, help="No progress."),
)


def _common(command: Command) -> Command:
    for option in reversed(_COMMON):
        command = option(command)
    return command


@click.group(context_settings=CONTEXT_SETTINGS)
def bench() -> None:
    """Measure on this machine: everything private, as in `tiering demo`."""


@bench.command()
@click.option("--tokens", default="2048,8192", show_default=True, help="Prompt lengths.")
@click.option(
    "--flash",
    type=click.Choice(["on", "off", "both"]),
    default="both",
    show_default=True,
    help="Flash attention.",
)
@click.option(
    "--tier",
    type=click.Choice(["ram", "local", "both"]),
    default="both",
    show_default=True,
    help="What is restored from; `local` is read as after a reboot.",
)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Restarts.")
@_common
def restore(
    tokens: str,
    flash: str,
    tier: str,
    repeat: int,
    shape: str,
    tag: str | None,
    cpu: str | None,
    as_json: bool,
    out: Path | None,
    keep: bool,
    quiet: bool,
) -> None:
    """Time to the first token, cold against restored after a restart of both processes."""
    from ollama_tiering.bench import restore as measuring
    from ollama_tiering.launch.bench_driver import BenchDriver
    from ollama_tiering.launch.demo import make_prompt

    lengths = _numbers(tokens)
    flashes = [True, False] if flash == "both" else [flash == "on"]
    tiers = ["ram", "local"] if tier == "both" else [tier]
    say = _teller(quiet)
    binary = _binary(tag, cpu, quiet)
    cases = []
    with _scratch(keep, shape, say) as scratch:
        for setting in flashes:
            driver = BenchDriver(binary, scratch, ctx=_ctx(max(lengths)), flash=setting)
            with contextlib.closing(driver):
                driver.start()
                for length in lengths:
                    prompt = make_prompt(length, seed=length)
                    cold = None
                    for one in tiers:
                        case = measuring.measure(
                            driver, prompt, say, flash=setting, tier=one, repeat=repeat, cold=cold
                        )
                        cold = case.cold_seconds
                        cases.append(case)
            name = driver.name
    results = [case.as_json() for case in cases]
    _publish(measuring.table(shape, cases), results, name, as_json=as_json, out=out)


@bench.command()
@click.option("--pairs", type=click.IntRange(2), default=15, show_default=True)
@click.option("--bursts", type=click.IntRange(0), default=4, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(2), default=512, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True)
@_common
def overhead(
    pairs: int,
    bursts: int,
    prompt_tokens: int,
    new_tokens: int,
    shape: str,
    tag: str | None,
    cpu: str | None,
    as_json: bool,
    out: Path | None,
    keep: bool,
    quiet: bool,
) -> None:
    """What tiering costs with nothing to restore: the same requests with it on and off."""
    from ollama_tiering.bench import overhead as measuring
    from ollama_tiering.launch.bench_driver import BenchDriver, Untiered
    from ollama_tiering.launch.demo import make_prompt

    say = _teller(quiet)
    binary = _binary(tag, cpu, quiet)
    ctx = _ctx(prompt_tokens + new_tokens)
    with (
        _scratch(keep, shape, say) as scratch,
        contextlib.closing(BenchDriver(binary, scratch, ctx=ctx)) as on,
        contextlib.closing(Untiered(binary, scratch, ctx=ctx)) as off,
    ):
        on.start()
        off.start()
        measures = measuring.measure(
            on,
            off,
            lambda number: make_prompt(prompt_tokens, seed=number),
            say,
            pairs=pairs,
            bursts=bursts,
            burst_requests=4,
            new_tokens=new_tokens,
        )
    results = [measure.as_json() for measure in measures]
    table = measuring.table(shape, prompt_tokens, new_tokens, measures)
    _publish(table, results, on.name, as_json=as_json, out=out)


@bench.command("cpu-attention")
@click.option("--tokens", default="8192", show_default=True, help="Prompt lengths.")
@click.option(
    "--only",
    type=click.Choice(["exact", "plain", "flash"]),
    multiple=True,
    help="A setting; may be given more than once.  [default: all; flash takes minutes]",
)
@_common
def cpu_attention(
    tokens: str,
    only: tuple[str, ...],
    shape: str,
    tag: str | None,
    cpu: str | None,
    as_json: bool,
    out: Path | None,
    keep: bool,
    quiet: bool,
) -> None:
    """Exact attention on the CPU against stock's: first token and tokens/s inside Ollama."""
    from ollama_tiering.bench import cpu_attention as measuring
    from ollama_tiering.launch.bench_driver import Untiered
    from ollama_tiering.launch.demo import make_prompt

    lengths = _numbers(tokens)
    say = _teller(quiet)
    binary = _binary(tag, cpu, quiet)
    settings = {
        "exact": (measuring.EXACT, "exact", None),
        "plain": (measuring.PLAIN, "stock", False),
        "flash": (measuring.FLASH, "stock", None),
    }
    names = []
    with _scratch(keep, shape, say) as scratch:

        @contextlib.contextmanager
        def engine(attention: str, flash: bool | None) -> Iterator[Untiered]:
            driver = Untiered(
                binary, scratch, ctx=_ctx(max(lengths)), flash=flash, attention=attention
            )
            with contextlib.closing(driver):
                driver.start()
                names.append(driver.name)
                yield driver

        engines = {
            name: functools.partial(engine, attention, flash)
            for key, (name, attention, flash) in settings.items()
            if not only or key in only
        }
        cases = measuring.measure(
            engines, lambda length: make_prompt(length, seed=length), lengths, say
        )
    results = [case.as_json() for case in cases]
    _publish(measuring.table(shape, cases), results, names[0], as_json=as_json, out=out)


bench.add_command(store)
bench.add_command(attention)


@bench.command()
@click.option("--tokens", default="64,128,256,512,1024", show_default=True, help="Prompt lengths.")
@click.option("--repeat", type=click.IntRange(1), default=9, show_default=True)
@_common
def gate(
    tokens: str,
    repeat: int,
    shape: str,
    tag: str | None,
    cpu: str | None,
    as_json: bool,
    out: Path | None,
    keep: bool,
    quiet: bool,
) -> None:
    """Whether the gate chooses the better side: restore or recompute."""
    from ollama_tiering.bench import gate as measuring
    from ollama_tiering.launch.bench_driver import GateDriver
    from ollama_tiering.launch.demo import make_prompt

    lengths = _numbers(tokens)
    say = _teller(quiet)
    binary = _binary(tag, cpu, quiet)
    choices = []
    for tier in ("ram", "local"):
        with (
            _scratch(keep, shape, say) as scratch,
            contextlib.closing(
                GateDriver(binary, scratch, ctx=_ctx(max(*lengths, 1024)), ram=tier == "ram")
            ) as driver,
        ):
            driver.start()
            choices += measuring.measure(
                driver,
                lambda length, seed: make_prompt(length, seed=seed),
                lengths,
                say,
                tier=tier,
                repeat=repeat,
            )
            name = driver.name
    results = [choice.as_json() for choice in choices]
    _publish(measuring.table(shape, choices), results, name, as_json=as_json, out=out)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 1 for part in parts):
        raise UsageError(f"--tokens {text}: not a list of numbers", hint="write 2048,8192")
    return sorted({int(part) for part in parts})  # twice the same prompt would not be cold


def _ctx(tokens: int) -> int:
    """Room for prompt and answer, in whole steps."""
    return -(-(tokens + 64) // 256) * 256


def _binary(tag: str | None, cpu: str | None, quiet: bool) -> Path:
    from ollama_tiering.cli.up import patched_binary
    from ollama_tiering.patchset.report import Report

    return patched_binary(Report(quiet=quiet), tag=tag, cpu=cpu)


def _teller(quiet: bool) -> Callable[[str], None]:
    return lambda text: None if quiet else click.echo(f"* {text}", err=True)


@contextlib.contextmanager
def _scratch(keep: bool, shape: str, say: Callable[[str], None]) -> Iterator[Scratch]:
    from ollama_tiering.launch.drivers import Scratch
    from ollama_tiering.models.make import make_model
    from ollama_tiering.models.shapes import make_shape

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Scratch("bench", keep=keep) as scratch:
        say(f"making a model of shape {shape}")
        make_model(make_shape(shape), scratch.model_file, seed=1)
        yield scratch
        if keep:
            click.echo(f"kept: {scratch.root} and {scratch.ram}", err=True)


def _publish(
    table: Table, results: list[dict[str, Any]], engine: str, *, as_json: bool, out: Path | None
) -> None:
    from ollama_tiering.bench.machine import this_machine

    machine = this_machine()
    engine = engine.partition(" (")[0]  # a path says nothing to a reader
    command = shlex.join(["tiering", *sys.argv[1:]])
    text = table.markdown(machine, engine, command)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    if as_json:
        document = {"machine": machine.as_json(), "engine": engine, "command": command}
        click.echo(json.dumps(document | {"results": results}, indent=1))
    else:
        click.echo(text, nl=False)
