"""`tiering report`: what each day asked for, where its tokens came from, what that saved, and what
was written to the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.cli.reach import require_there
from ollama_tiering.cli.report_days import Reported, of_days, of_models, reported, sum_of
from ollama_tiering.config import count, format_size
from ollama_tiering.protocol.seconds_saved import duration

_HEADINGS: Final = (
    *("day", "requests", "prompt tokens", "in memory", "restored", "computed", "saved"),
    *("parted", "written"),
)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--days",
    type=click.IntRange(1, 400),
    default=30,
    show_default=True,
    help="The last days of the calendar, today's included.",
)
@click.option("--model", default="", help="A part of a model's name; other models do not count.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", type=NamedPath(path_type=Path), help="Write a page with pictures there.")
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
def report(days: int, model: str, as_json: bool, html: Path | None, socket: Path | None) -> None:
    """Show what each day asked for, where its tokens came from, and what restoring saved; how many
    prompts parted from what is stored (`tiering why`), and how much was written to the disk.

    Each day is a line, then each model. The sidecar keeps these sums for 400 days, in the state
    directory; they hold names of models and numbers, no text. Seconds saved are counted by the
    speed of computing that was measured for a model until then.
    """
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.system.durable_file import replace_file

    settings, broken = config.readable({"sidecar.socket": socket})
    path = settings.sidecar.socket_path
    require_there(path)
    with SidecarAdministration(path) as admin:
        found = reported(admin.days(days), model)
    if html is not None:
        from ollama_tiering.cli.report_page import page

        replace_file(html, page(found, days))
        click.echo(f"wrote {html}", err=as_json)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
    elif html is None:
        for line in lines(found, days):
            click.echo(line)
    if broken:
        raise broken


def lines(found: Sequence[Reported], days: int) -> Iterator[str]:
    if not found:
        yield f"no request has ended in the last {count(days, 'day')}"
        return
    by_day, by_model = of_days(found), of_models(found)
    rows = [_row(date, sums) for date, sums in by_day.items()]
    if len(by_day) > 1:
        rows.append(_row("all days", sum_of(found)))
    if len(by_model) > 1:
        rows += [_row(name, sums) for name, sums in by_model.items()]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row in (_HEADINGS, *rows):
        first, *others = (
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()


def _row(what: str, sums: Reported) -> tuple[str, ...]:
    parts = (sums.memory_tokens, sums.restored_tokens, sums.recomputed_tokens)
    shares = (f"{100 * part / sums.prompt_tokens:.0f} %" if part else "-" for part in parts)
    numbers = f"{sums.requests:,}", f"{sums.prompt_tokens:,}"
    saved = duration(sums.saved_seconds) if sums.restored_tokens else "-"
    written = format_size(sums.written_bytes) if sums.written_bytes else "-"
    return (what, *numbers, *shares, saved, f"{sums.partings:,}" if sums.partings else "-", written)
