"""`tiering config`: the settings in force, and where each comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS

if TYPE_CHECKING:
    from ollama_tiering.config.origins import InForce


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option(
    "--set", "only_set", is_flag=True, help="Show only settings that differ from the default."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def config(keys: tuple[str, ...], only_set: bool, as_json: bool) -> None:
    """Show every setting, its value, and where the value comes from.

    KEY is a setting such as `sidecar.ram_budget`, or a section such as `patch`. The command changes
    nothing: to change a setting, edit the file that the last line names. If a value is not valid,
    the others are shown all the same, then what is wrong with it; the exit code is 10.
    """
    from ollama_tiering.config import config_file
    from ollama_tiering.config.origins import in_force
    from ollama_tiering.errors import UsageError, did_you_mean

    found, broken = in_force()
    known = {row.key for row in found} | {row.key.partition(".")[0] for row in found}
    for key in keys:
        if key not in known:
            raise UsageError(
                f"no such setting: {key}{did_you_mean(key, known)}", hint="tiering config"
            )
    rows = [
        row
        for row in found
        if (not keys or row.key in keys or row.key.partition(".")[0] in keys)
        and (not only_set or row.origin != "default")
    ]
    file = config_file()
    if as_json:
        click.echo(json.dumps(document(rows, file), indent=1))
    else:
        _show(rows, file)
    if broken:
        raise broken


def document(rows: list[InForce], file: Path) -> dict[str, Any]:
    """What `--json` prints."""
    settings = {
        row.key: {
            "value": str(row.value) if isinstance(row.value, Path) else row.value,
            "origin": row.origin,
            "variable": row.variable,
        }
        for row in rows
    }
    return {"version": 1, "file": str(file), "exists": file.is_file(), "settings": settings}


def _show(rows: list[InForce], file: Path) -> None:
    width = max((len(row.key) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row.key:<{width}}  {row.shown}  ({row.origin})")
    click.echo(f"file: {file}{'' if file.is_file() else ' (not there)'}")
