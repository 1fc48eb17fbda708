"""`tiering gc`: removes what nobody can use any more."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.cli.model_names import present_models
from ollama_tiering.cli.rm import kept_sentence
from ollama_tiering.cli.store_options import (
    Duration,
    administration,
    dry_run_option,
    store_options,
)
from ollama_tiering.config import count, format_size
from ollama_tiering.doctor.builds import builds_here

_KINDS = {
    "forbidden": "of models that a rule says not to store",
    "model gone": "of models that are gone",
    "other build": "of builds that are not on this machine any more",
    "unreachable": "whose start is missing",
    "temporary": "of unfinished writes",
    "vacant": "without a block",
}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--older-than", type=Duration(), default=0.0, help="Also remove blocks not used for this time."
)
@click.option(
    "--models",
    type=NamedPath(exists=True, file_okay=False, path_type=Path),
    help="Also remove blocks of models that are not in this models directory.",
)
@dry_run_option
@store_options
def gc(
    older_than: float,
    models: Path | None,
    dry_run: bool,
    socket: Path | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Remove what nobody can use any more.

    That is: leftovers of unfinished writes, damaged files that were put aside, blocks whose chain
    has lost its beginning, blocks of models that a rule says not to store, and directories of
    models without a block. It is also what builds of Ollama stored that are no longer on this
    machine, because no other build can find it; in a directory that machines share, that stays.
    Blocks that are pinned or being read stay.
    """
    present = present_models(models) if models else None
    builds = builds_here() or None
    with administration(socket, config_file, purpose="look" if dry_run else "change") as admin:
        waste = admin.collect(
            older_than_seconds=older_than, models=present, dry_run=dry_run, builds=builds
        )
    if as_json:
        document = {"version": 1, "dry_run": dry_run, "waste": [asdict(one) for one in waste]}
        click.echo(json.dumps(document, indent=1))
        return
    verb = "would remove" if dry_run else "removed"
    for one in waste:
        if one.files or one.kept:
            kind = _KINDS.get(one.kind, one.kind)
            noun = "model" if one.kind == "vacant" else "block"
            text = f"{verb} {count(one.files, noun)} {kind}, {format_size(one.stored_bytes)}"
            click.echo(text + kept_sentence(one.kept))
    if not any(one.files for one in waste):
        click.echo("nothing to remove")
