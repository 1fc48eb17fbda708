"""What the benchmarks that consist of parts share: choosing the parts, showing the results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.bench.machine import Beginning
    from ollama_tiering.bench.tiers.results import Section


def chosen(only: str, parts: Sequence[str]) -> list[str]:
    """The parts that --only names, in their own order. UsageError for an unknown one."""
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise UsageError(f"--only {only}: no part {unknown}", hint=f"parts are {', '.join(parts)}")
    return [part for part in parts if part in names]


def publish(
    title: str,
    sections: Sequence[Section],
    began: Beginning,
    *,
    as_json: bool,
    out: Path | None,
) -> None:
    """Writes text or JSON to stdout; with `out`, also a report, and a plot of every section beside
    it.
    """
    from ollama_tiering.bench.machine import this_machine
    from ollama_tiering.bench.table import page

    machine = this_machine(began)
    command = shlex.join(["tiering", *sys.argv[1:]])
    plots = [
        out.with_name(f"{out.stem}-{section.name}.svg") if out else None for section in sections
    ]
    tables = [
        (section.table(), plot.name if plot else None)
        for section, plot in zip(sections, plots, strict=True)
    ]
    text = page(title, machine, command, tables)
    if out:
        from ollama_tiering.bench.plot import bars

        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        for section, plot in zip(sections, plots, strict=True):
            if plot:
                bars(plot, section.title, section.axis, section.ratios, log=section.log_axis)
    if as_json:
        document = {"machine": machine.as_json(), "command": command}
        results = [section.as_json() for section in sections]
        click.echo(json.dumps(document | {"results": results}, indent=1))
    else:
        click.echo(text, nl=False)
