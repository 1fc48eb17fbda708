"""`tiering verify`: reads every stored block and checks it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.cli.model_names import known_names, label
from ollama_tiering.cli.store_options import Admin, administration, store_options
from ollama_tiering.config import count, format_size
from ollama_tiering.errors import StoreDamaged

if TYPE_CHECKING:
    from ollama_tiering.store.values import Finding, VerifyStep


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--repair", is_flag=True, help="Rename damaged files, remove leftovers, rewrite the index."
)
@store_options
def verify(repair: bool, socket: Path | None, config_file: Path | None, as_json: bool) -> None:
    """Read every block of every tier, and check its header, place and checksums.

    Without --repair nothing is changed. Exit code 8 if a block was damaged or could not be read,
    even if --repair dealt with it. After --repair a second run finds no damage, because damaged
    files are renamed and no longer used.
    """
    findings: list[Finding] = []
    last: VerifyStep | None = None
    purpose: Literal["look", "change"] = "change" if repair else "look"
    with (
        administration(socket, config_file, purpose=purpose) as admin,
        _progress(_Models(admin), quiet=as_json) as show,
    ):
        for step in admin.verify(repair=repair):
            findings += step.findings
            last = step
            show(step)
    assert last is not None
    if as_json:
        click.echo(json.dumps(_document(last, findings, repair), indent=1))
    else:
        click.echo(_summary(last, findings))
    bad = [finding for finding in findings if finding.what in ("damaged", "unreadable")]
    if bad:
        raise StoreDamaged(
            f"{count(len(bad), 'block')} of {last.done_blocks:,} damaged or unreadable",
            hint=None if repair else "`tiering verify --repair` puts damaged blocks out of the way",
        )


class _Show(Protocol):
    def __call__(self, step: VerifyStep) -> None: ...


@contextlib.contextmanager
def _progress(models: _Models, *, quiet: bool) -> Iterator[_Show]:
    """A progress bar on stderr, if that is a terminal; findings on stdout as they come."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("verify", total=None)

        def show(step: VerifyStep) -> None:
            total = max(step.total_blocks, step.done_blocks)
            progress.update(task, total=total, completed=step.done_blocks)
            for finding in () if quiet else step.findings:
                click.echo(_line(finding, models.of(finding)))

        yield show


class _Models:
    """Names of the models to which paths below a tier's directory belong; looked up when needed."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._labels: dict[str, str] | None = None

    def of(self, finding: Finding) -> str:
        if self._labels is None:
            from ollama_tiering.store.values import Selection

            names = known_names()
            found = self._admin.listing(Selection()).descriptions
            self._labels = {ns.hex(): label(f, ns, names) for ns, f in found.items() if f}
        parts = finding.path.split("/")
        return self._labels.get(parts[1], "") if len(parts) > 1 else ""


def _line(finding: Finding, model: str) -> str:
    detail = f": {finding.detail}" if finding.detail else ""
    of = f" ({model})" if model else ""
    done = " (repaired)" if finding.repaired else ""
    return f"{finding.what}  {finding.tier.label} {finding.path}{of}{detail}{done}"


def _summary(last: VerifyStep, findings: list[Finding]) -> str:
    read = f"read {count(last.done_blocks, 'block')}, {format_size(last.done_bytes)}"
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.what] = counts.get(finding.what, 0) + 1
    if not counts:
        return f"{read}: all sound"
    return f"{read}: " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))


def _document(last: VerifyStep, findings: list[Finding], repair: bool) -> dict[str, Any]:
    return {
        "version": 1,
        "repair": repair,
        "blocks": last.done_blocks,
        "bytes": last.done_bytes,
        "findings": [{**asdict(finding), "tier": finding.tier.label} for finding in findings],
    }
