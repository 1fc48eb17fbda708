"""What the benchmarks that start an engine have in common: options, a place to work, the record."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.config.words import flag_note
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.bench.table import Table
    from ollama_tiering.engines.drivers import Scratch

Command = Callable[..., None]

_OPTIONS = (
    click.option("--shape", default="qwen3-0.6b", show_default=True, help="See `model shapes`."),
    click.option("--tag", help="Version of Ollama." + flag_note("patch.tag")),
    click.option(
        "--cpu",
        type=click.Choice(["native", "variants"]),
        help="CPU code of the build.  [default: what is built already, else native]",
    ),
    click.option("--json", "as_json", is_flag=True, help="As JSON."),
    click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Markdown here."),
    click.option("--keep", is_flag=True, help="Leave model, blocks and logs, and say where."),
    click.option("-q", "--quiet", is_flag=True, help="No progress."),
)
attention_option = click.option(
    "--attention",
    type=click.Choice(["exact", "stock"]),
    help="Attention on the CPU.  [default: what `tiering up` uses here]",
)


def engine_bench(command: Command) -> Command:
    """Adds the common options; the command gets a Run in their place."""

    @functools.wraps(command)
    def with_run(
        shape: str,
        tag: str | None,
        cpu: str | None,
        as_json: bool,
        out: Path | None,
        keep: bool,
        quiet: bool,
        **own: Any,
    ) -> None:
        command(Run(shape, tag, cpu, as_json, out, keep, quiet), **own)

    for option in reversed(_OPTIONS):
        with_run = option(with_run)
    return with_run


class Run:
    """One benchmark, from its options to its record."""

    def __init__(
        self,
        shape: str,
        tag: str | None,
        cpu: str | None,
        as_json: bool,
        out: Path | None,
        keep: bool,
        quiet: bool,
    ) -> None:
        from ollama_tiering.bench.machine import begin

        self.began = begin()
        self.shape, self.quiet = shape, quiet
        self._tag, self._cpu = tag, cpu
        self._as_json, self._out, self._keep = as_json, out, keep

    def say(self, text: str) -> None:
        if not self.quiet:
            click.echo(f"* {text}", err=True)

    def binary(self) -> Path:
        from ollama_tiering.patchset.binary import patched_binary
        from ollama_tiering.patchset.report import Report

        return patched_binary(Report(quiet=self.quiet), tag=self._tag, cpu=self._cpu)

    @contextlib.contextmanager
    def scratch(self, stored_tokens: int = 0) -> Iterator[Scratch]:
        """With a model of the shape in it, and room for blocks of so many tokens."""
        from ollama_tiering import extras
        from ollama_tiering.engines.drivers import Scratch

        extras.need("models")
        from ollama_tiering.models.make import make_model
        from ollama_tiering.models.shapes import make_shape

        shape = make_shape(self.shape)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with Scratch("bench", keep=self._keep) as scratch:
            scratch.need_bytes(shape.stored_bytes + stored_tokens * shape.kv_bytes_per_token)
            self.say(f"making a model of shape {self.shape}")
            make_model(shape, scratch.model_file, seed=1)
            yield scratch
            if self._keep:
                click.echo(f"kept: {scratch.root} and {scratch.ram}", err=True)

    def publish(
        self, table: Table, results: list[dict[str, Any]], engine: str, attention: str
    ) -> None:
        """Markdown or JSON to stdout, Markdown to --out; both say what the model is."""
        from ollama_tiering.bench.machine import this_machine
        from ollama_tiering.models.shapes import make_shape

        machine = this_machine(self.began)
        model = make_shape(self.shape).words
        table = replace(table, notes=[*table.notes, f"Model: {model}."])
        command = shlex.join(["tiering", *sys.argv[1:]])
        text = table.markdown(machine, f"{engine}; attention: {attention}", command)
        if self._out:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(text, encoding="utf-8")
        if self._as_json:
            origin: dict[str, Any] = {"machine": machine.as_json(), "engine": engine}
            origin |= {"attention": attention, "model": model}
            click.echo(json.dumps(origin | {"command": command, "results": results}, indent=1))
        else:
            click.echo(text, nl=False)


def attention_of_up() -> str:
    """What `tiering up` would tell the server: flags apart, the same settings in the same order."""
    from ollama_tiering import config

    return config.load().server.cpu_attention


def numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 1 for part in parts):
        raise UsageError(f"--tokens {text}: not a list of numbers", hint="write 2048,8192")
    return sorted({int(part) for part in parts})  # twice the same prompt would not be cold


def context_for(tokens: int) -> int:
    """Room for prompt and answer, in whole steps."""
    return -(-(tokens + 64) // 256) * 256
