"""`tiering doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.errors import plain

if TYPE_CHECKING:
    from ollama_tiering.doctor.check import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> int:
    """Check this machine: tools, source, builds, tiers, the port, and what runs.

    Nothing is changed. Each line says ok, warn (it works, but not as well as it could) or fail.
    Exit code 1 if a check fails.
    """
    from ollama_tiering.doctor.examine import examine

    found = examine()
    if as_json:
        click.echo(json.dumps([asdict(check) for check in found], indent=1))
    else:
        for check in found:
            _say(check)
        click.echo(_summary(found))
    return int(any(check.state == "fail" for check in found))


def _say(check: Check) -> None:
    click.echo(
        f"{click.style(f'{check.state:<4}', _COLOURS[check.state])}  {check.name}: ", nl=False
    )
    click.echo(plain(check.finding))
    if check.cure:
        click.echo(f"      -> {plain(check.cure)}")


def _summary(found: list[Check]) -> str:
    counts = {state: sum(check.state == state for check in found) for state in _COLOURS}
    return ", ".join(f"{count} {state}" for state, count in counts.items())
