"""What the benchmarks that start an engine share: options, private directories, the record."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import NamedPath
from ollama_tiering.config.words import flag_note
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.bench.machine import Beginning
    from ollama_tiering.bench.table import Table
    from ollama_tiering.engines.drivers import Scratch

Command = Callable[..., None]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
out_option = click.option(
    "--out",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="Write the record to this file, in Markdown.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
attention_option = click.option(
    "--attention",
    type=click.Choice(["exact", "stock"]),
    help="How to compute attention on the CPU.  [default: as `tiering up` does here]",
)
_OPTIONS = (
    click.option(
        "--shape",
        default="qwen3-0.6b",
        show_default=True,
        help="Model to make; `tiering model shapes` lists them.",
    ),
    click.option("--tag", help="Version of Ollama." + flag_note("patch.tag")),
    click.option(
        "--cpu",
        type=click.Choice(["native", "variants"]),
        help="Build for this processor only, or for every one.  "
        "[default: what is built already, else native]",
    ),
    json_option,
    out_option,
    click.option("--keep", is_flag=True, help="Keep the model, blocks and logs, and say where."),
    quiet_option,
)


def engine_bench(command: Command) -> Command:
    """Adds the common options; the command gets a Run in their place."""

    @functools.wraps(command)
    def with_run(**options: Any) -> None:
        common = {field.name: options.pop(field.name) for field in fields(Run) if field.init}
        command(Run(**common), **options)

    for option in reversed(_OPTIONS):
        with_run = option(with_run)
    return with_run


def _begin() -> Beginning:
    from ollama_tiering.bench.machine import begin

    return begin()


@dataclass
class Run:
    """One benchmark, from its options to its record."""

    shape: str
    tag: str | None
    cpu: str | None
    as_json: bool
    out: Path | None
    keep: bool
    quiet: bool
    began: Beginning = field(default_factory=_begin, init=False)

    def say(self, text: str) -> None:
        if not self.quiet:
            click.echo(f"* {text}", err=True)

    def binary(self) -> Path:
        from ollama_tiering.patchset.binary import patched_binary
        from ollama_tiering.patchset.report import Report

        return patched_binary(Report(quiet=self.quiet), tag=self.tag, cpu=self.cpu)

    @contextlib.contextmanager
    def scratch(self, stored_tokens: int = 0) -> Iterator[Scratch]:
        """A Scratch with a model of the shape, and with room for the blocks of that many tokens."""
        from ollama_tiering.engines.drivers import Scratch
        from ollama_tiering.models.make import make_model
        from ollama_tiering.models.shapes import make_shape

        shape = make_shape(self.shape)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with Scratch("bench", keep=self.keep) as scratch:
            scratch.need_bytes(shape.stored_bytes + stored_tokens * shape.kv_bytes_per_token)
            self.say(f"making a model of shape {self.shape}")
            make_model(shape, scratch.model_file, seed=1)
            yield scratch
            if self.keep:
                click.echo(f"kept: {scratch.root} and {scratch.ram}", err=True)

    def publish(
        self, table: Table, results: list[dict[str, Any]], engine: str, attention: str
    ) -> None:
        """Writes Markdown or JSON to stdout, and Markdown to --out; both say what the model is."""
        from ollama_tiering.bench.machine import this_machine
        from ollama_tiering.models.shapes import make_shape

        machine = this_machine(self.began)
        model = make_shape(self.shape).words
        table = replace(table, notes=[*table.notes, f"Model: {model}."])
        command = command_line()
        text = table.markdown(machine, f"{engine}; attention: {attention}", command)
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(text, encoding="utf-8")
        if self.as_json:
            origin: dict[str, Any] = {"machine": machine.as_json(), "engine": engine}
            origin |= {"attention": attention, "model": model}
            click.echo(json.dumps(origin | {"command": command, "results": results}, indent=1))
        else:
            click.echo(text, nl=False)


def command_line() -> str:
    """Returns it as it was typed."""
    program = click.get_current_context().find_root().info_name or "tiering"
    return shlex.join([*program.split(), *sys.argv[1:]])


def attention_of_up() -> str:
    """What `tiering up` would tell the server, by the same settings in the same order, without
    flags.
    """
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
