"""`tiering demo`: shows on this machine a restart that keeps its KV cache, or a context that does
not fit the GPU, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.config.words import flag_note
from ollama_tiering.errors import ResultDiffers, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from ollama_tiering.engines.choose import Choice
    from ollama_tiering.engines.demo import DemoOutcome
    from ollama_tiering.engines.drivers import Driver, Scratch

LAYERS = 8  # of the made model: enough that computing the prompt is felt

_NOTE = (
    "Seconds are to the first token, with the model loaded; the prompt's tokens were recomputed, "
    "found in memory or restored. Identical: {tokens} tokens and the top 5 log probabilities of "
    "each, against the in-memory hit. {cold}"
)
_COLD = {
    True: "Attention is exact: a cold run computes the prompt in other batches, and is identical.",
    False: "A cold run computes the prompt in other batches, so its last bits may differ without "
    "any tiering.",
}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--engine",
    type=click.Choice(["auto", "ollama", "reference"]),
    default="auto",
    show_default=True,
    help="What computes: the patched Ollama, or a small engine in numpy that needs no build.",
)
@click.option("--tag", help="Version of Ollama." + flag_note("patch.tag"))
@click.option(
    "--cpu",
    type=click.Choice(["native", "variants"]),
    help="Build for this processor only, or for every one.  "
    "[default: what is built already, else native]",
)
@click.option(
    "--context",
    is_flag=True,
    help="Show a context that does not fit the GPU instead: stock's plan, and K/V paged.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--keep", is_flag=True, help="Keep the model, blocks and logs, and say where.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def demo(
    engine: str,
    tag: str | None,
    cpu: str | None,
    context: bool,
    as_json: bool,
    keep: bool,
    quiet: bool,
) -> None:
    """Answer one prompt four times: computed, from memory, after an unload, and after a restart.

    The demonstration makes a model of its own and starts a sidecar and a server of its own, in
    temporary directories. Exit code 1 if a restored answer differs or nothing was restored.

    With --context it answers one prompt three times, without tiering: with a context that fits the
    GPU, with one that does not, as stock plans that, and with K/V paged. It uses about 1 GiB of the
    GPU and leaves the rest of it alone. Exit code 1 if paged K/V give another answer or leave a
    layer to the CPU, 6 if there is no NVIDIA GPU, or no build of Ollama that can page.
    """
    if context:
        from ollama_tiering.cli import demo_context

        if engine == "reference":
            raise UsageError(
                "--context needs Ollama; the numpy engine has no GPU", hint="leave --engine out"
            )
        demo_context.run(tag, as_json=as_json, keep=keep, quiet=quiet)
        return
    from ollama_tiering.engines import demo as demonstration
    from ollama_tiering.engines.drivers import Scratch

    def say(text: str) -> None:
        if not quiet:
            click.echo(f"* {text}", err=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    choice = _choose(engine, tag, cpu, quiet)
    say(f"engine: {choice.engine} {choice.binary or ''}".rstrip() + f" ({choice.why})")
    started = time.monotonic()
    with Scratch("demo", keep=keep) as scratch:
        _make_model(scratch)
        driver = _driver(choice, scratch)
        with contextlib.closing(driver):
            outcome = demonstration.show(driver, demonstration.make_prompt(), say)
    seconds = time.monotonic() - started
    if as_json:
        more = {"why": choice.why, "seconds": round(seconds, 2)}
        click.echo(json.dumps(outcome.as_json() | more, indent=1))
    else:
        _print(outcome, seconds)
    if keep:
        click.echo(f"kept: {scratch.root} and {scratch.ram}", err=True)
    if outcome.failures:
        raise ResultDiffers(
            "; ".join(outcome.failures), hint="run again with --keep and look at the logs"
        )


def _choose(engine: str, tag: str | None, cpu: str | None, quiet: bool) -> Choice:
    from ollama_tiering.config import load
    from ollama_tiering.engines.choose import choose
    from ollama_tiering.patchset.binary import own_build
    from ollama_tiering.patchset.report import Report
    from ollama_tiering.patchset.upstream import SourceCache, normal_tag

    wanted = normal_tag(tag or load().patch.tag)
    return choose(
        engine,
        source_cached=lambda: SourceCache().has(wanted),
        build=lambda: own_build(Report(quiet=quiet), tag=wanted, cpu=cpu),
    )


def _make_model(scratch: Scratch) -> None:
    from ollama_tiering.models.make import make_model
    from ollama_tiering.models.shapes import make_shape

    make_model(make_shape("qwen3-tiny", layers=LAYERS), scratch.model_file, seed=1)


def _driver(choice: Choice, scratch: Scratch) -> Driver:
    if choice.binary:
        from ollama_tiering.config import ENV_CPU_ATTENTION, load
        from ollama_tiering.engines.ollama_driver import OllamaDriver
        from ollama_tiering.patchset import elf

        # What `up` serves with: against stock's attention the gain would be the kernels', too.
        attention = load().server.cpu_attention
        # Not of this Python: an emulator may run what is for another processor.
        is_x86 = elf.machine(choice.binary) == elf.MACHINES["x86_64"]
        one_answer = attention == "exact" and is_x86
        env = {ENV_CPU_ATTENTION: attention}
        return OllamaDriver(choice.binary, scratch, env=env, one_answer=one_answer)
    from ollama_tiering.engines.reference_driver import ReferenceDriver

    return ReferenceDriver(scratch)


def _print(outcome: DemoOutcome, seconds: float) -> None:
    from rich.console import Console

    from ollama_tiering.engines import demo as demonstration
    from ollama_tiering.protocol.seconds_saved import duration

    console = Console(soft_wrap=False, highlight=False)
    if not console.is_terminal:
        console.width = 110
    console.print(_table(outcome))
    console.print(_note(outcome), style="dim")
    if not outcome.failures:
        sooner = outcome.sooner(demonstration.RESTARTED)
        saved = duration(outcome.saved_seconds(demonstration.RESTARTED))
        console.print(
            f"After a restart of everything the first token came {sooner:.0f} times sooner: "
            f"saved {saved}."
        )
        console.print(
            f"Restored answers are identical, bit for bit. The demonstration took {seconds:.0f} s."
        )
        console.print("With your own prompts: tiering up --web, which shows them in a browser.")


def _note(outcome: DemoOutcome) -> str:
    tokens = len(outcome.rows[0].answer.tokens)
    return _NOTE.format(tokens=tokens, cold=_COLD[outcome.one_answer])


def _table(outcome: DemoOutcome) -> Table:
    from rich.table import Table

    prompt = outcome.rows[0].answer.prompt_tokens
    table = Table(title=f"{outcome.engine}, a prompt of {prompt} tokens", title_justify="left")
    table.add_column("")
    for heading in ("seconds", "recomputed", "from memory", "restored"):
        table.add_column(heading, justify="right")
    table.add_column("identical")
    for row in outcome.rows:
        answer = row.answer
        table.add_row(
            row.label,
            f"{answer.seconds_to_first_token:.3f}",
            f"{answer.recomputed_tokens:,}",
            f"{answer.memory_tokens:,}",
            f"{answer.restored_tokens:,}",
            row.verdict,
            style="red"
            if row.must_agree
            and not (row.identical and (answer.restored_tokens or not row.restored))
            else None,
        )
    return table
