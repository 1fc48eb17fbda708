"""`tiering demo --context`: a context that does not fit the GPU, as stock plans it, and paged."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import click

from ollama_tiering.config import count, format_size
from ollama_tiering.errors import ResultDiffers

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from ollama_tiering.engines.context_demo import ContextOutcome
    from ollama_tiering.engines.drivers import Scratch

_NOTE = (
    "Seconds are to the first token, with the model loaded; tokens/s are Ollama's own count, of a "
    "model so small that its rates say little about others. Same answer: {tokens} tokens and the "
    "top 5 log probabilities of each. Where the CPU computes some layers, the last bits may differ "
    "without any paging."
)


def run(tag: str | None, *, as_json: bool, keep: bool, quiet: bool) -> None:
    """The command; its help is that of `tiering demo`."""
    from ollama_tiering.engines import context_demo
    from ollama_tiering.engines.context_driver import server_of
    from ollama_tiering.engines.demo import make_prompt
    from ollama_tiering.engines.drivers import Scratch

    def say(text: str) -> None:
        if not quiet:
            click.echo(f"* {text}", err=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    binary = _binary(tag)
    say(f"engine: {binary}")
    with Scratch("demo", keep=keep) as scratch:
        _make_model(scratch)
        prompt = make_prompt(context_demo.PROMPT_TOKENS)
        outcome = context_demo.show(server_of(binary, scratch), prompt, say)
    if as_json:
        click.echo(json.dumps(outcome.as_json(), indent=1))
    else:
        _print(outcome)
    if keep:
        click.echo(f"kept: {scratch.root} and {scratch.ram}", err=True)
    if outcome.failures:
        raise ResultDiffers(
            "; ".join(outcome.failures), hint="run again with --keep and look at the logs"
        )


def _binary(tag: str | None) -> Path:
    """One that pages. It is not built now: without a GPU that would be for nothing."""
    from ollama_tiering.engines.context_driver import paging_binary
    from ollama_tiering.patchset.binary import named_binary
    from ollama_tiering.patchset.build import built_binaries
    from ollama_tiering.patchset.finished import hold
    from ollama_tiering.patchset.upstream import normal_tag

    folder = f"{normal_tag(tag)}-" if tag else ""
    built = [one for one in built_binaries() if one.parent.parent.name.startswith(folder)]
    return hold(paging_binary(named_binary(), built))


def _make_model(scratch: Scratch) -> None:
    """16 KiB of K/V a token, 512 MiB at num_ctx 32768; 16 MiB of weights."""
    from ollama_tiering.models.make import make_model
    from ollama_tiering.models.shapes import make_shape

    shape = make_shape("qwen3-tiny", layers=8, heads=8, kv_heads=8, ctx=1 << 16)
    make_model(shape, scratch.model_file, seed=1)


def _print(outcome: ContextOutcome) -> None:
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table(outcome))
    console.print(_NOTE.format(tokens=len(outcome.runs[0].answer.tokens)), style="dim")
    for line in _ends(outcome):
        console.print(line)


def _ends(outcome: ContextOutcome) -> list[str]:
    """What the figures come to; nothing of a demonstration that failed."""
    if outcome.failures:
        return []
    _, divided, ours = outcome.runs
    plan = ours.plan
    return [
        f"With num_ctx {ours.num_ctx} stock computes {divided.plan.layers_on_gpu} of "
        f"{count(plan.layers, 'layer')} on the GPU; paged, it computes all of them, with "
        f"{format_size(plan.pinned_bytes)} of K/V in pinned memory of the host.",
        "The answer is the one with all K/V on the GPU, bit for bit.",
    ]


def table(outcome: ContextOutcome) -> Table:
    """One row for each run."""
    from rich.table import Table

    gpu = outcome.gpu
    made = Table(
        title=f"{gpu.description}, {format_size(gpu.total_bytes)}, of which at most "
        f"{format_size(outcome.used_bytes)} are used",
        title_justify="left",
    )
    made.add_column("", no_wrap=True)
    for heading in (
        *("num_ctx", "layers on GPU", "VRAM", "K/V in VRAM", "K/V pinned", "K/V on CPU"),
        *("seconds", "tokens/s"),
    ):
        made.add_column(heading, justify="right")
    made.add_column("same answer")
    for run in outcome.runs:
        plan, answer = run.plan, run.answer
        made.add_row(
            run.label,
            str(run.num_ctx),
            f"{plan.layers_on_gpu}/{plan.layers}",
            format_size(plan.vram_bytes),
            *map(_or_none, (plan.kv_vram_bytes, plan.pinned_bytes, plan.kv_cpu_bytes)),
            f"{answer.seconds_to_first_token:.3f}",
            f"{answer.decode_tokens_per_second:.1f}",
            outcome.verdict(run),
            style="red" if outcome.verdict(run) == "NO" else None,
        )
    return made


def _or_none(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"
