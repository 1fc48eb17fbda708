"""What the programs that consist of parts share: their options, the parts, showing the results."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import click

from measure.plot import bars
from measure.results import Section
from ollama_tiering.bench.machine import Machine, begin, this_machine
from ollama_tiering.cli.bench_run import command_line, json_option, out_option, quiet_option
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset.report import Report

Measured = tuple[str, list[Section]]  # the title first


def sections(parts: Collection[str]) -> Callable[[Callable[..., Measured]], Callable[..., None]]:
    """Adds the common options. The command gets the parts that --only names, and a Report."""

    def of(command: Callable[..., Measured]) -> Callable[..., None]:
        @functools.wraps(command)
        def whole(only: str, as_json: bool, out: Path | None, quiet: bool, **own: Any) -> None:
            began, wanted = begin(), chosen(only, parts)
            title, found = command(wanted, Report(quiet=quiet), **own)
            publish(title, found, this_machine(began), as_json=as_json, out=out)

        help_only = "Parts to measure, separated by commas."
        only = click.option("--only", default=",".join(parts), show_default=True, help=help_only)
        return only(json_option(out_option(quiet_option(whole))))

    return of


def chosen(only: str, parts: Collection[str]) -> list[str]:
    """The parts that --only names, in their own order. UsageError for an unknown one."""
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise UsageError(f"--only {only}: no part {unknown}", hint=f"parts are {', '.join(parts)}")
    return [part for part in parts if part in names]


def publish(
    title: str, found: Sequence[Section], machine: Machine, *, as_json: bool, out: Path | None
) -> None:
    """Writes text or JSON to stdout; with `out`, also a report, and a plot of every section beside
    it.
    """
    lines = [f"# {title}", "", *machine.lines(), f"- Command: `{command_line()}`"]
    for section in found:
        lines += ["", f"## {section.title}", "", *section.table().lines()]
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            plot = out.with_name(f"{out.stem}-{section.name}.svg")
            bars(plot, section.title, section.axis, section.ratios, log=section.log_axis)
            lines += ["", f"![{section.title}]({plot.name})"]
    text = "\n".join(lines).rstrip() + "\n"
    if out:
        out.write_text(text, encoding="utf-8")
    if as_json:
        document = {"machine": machine.as_json(), "command": command_line()}
        results = [section.as_json() for section in found]
        click.echo(json.dumps(document | {"results": results}, indent=1))
    else:
        click.echo(text, nl=False)
