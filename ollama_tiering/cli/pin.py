"""`tiering pin` and `tiering unpin`: what is never evicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.cli.model_names import known_names, label, of_models
from ollama_tiering.cli.store_options import (
    Admin,
    administration,
    dry_run_option,
    short,
    store_options,
)
from ollama_tiering.config import count, format_size
from ollama_tiering.errors import ServiceError

if TYPE_CHECKING:
    from ollama_tiering.store.values import PinResult

_DIGITS = 12


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("--follow", is_flag=True, help="Also pin what is added to them later.")
@dry_run_option
@store_options
def pin(
    ids: tuple[str, ...],
    follow: bool,
    dry_run: bool,
    socket: Path | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Pin conversations: their blocks are not evicted until `tiering unpin`.

    The ID of a block inside a conversation pins the blocks up to that one, for instance a system
    prompt. Pins survive restarts. They may take at most the share `sidecar.pin_share` of the local
    budget.

    With --follow the pin moves on when later turns are stored: to the longest that the conversation
    goes on with, while that share has room for it. `tiering unpin` ends it, by the ID that was
    named here or by the present one.
    """
    _change(ids, dry_run, socket, config_file, as_json, unpin=False, follow=follow)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@dry_run_option
@store_options
def unpin(
    ids: tuple[str, ...],
    dry_run: bool,
    socket: Path | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Let pinned conversations be evicted again.

    Blocks that another pinned conversation shares stay pinned.
    """
    _change(ids, dry_run, socket, config_file, as_json, unpin=True)


def _change(
    ids: tuple[str, ...],
    dry_run: bool,
    socket: Path | None,
    config_file: Path | None,
    as_json: bool,
    *,
    unpin: bool,
    follow: bool = False,
) -> None:
    results = []
    names = known_names()
    with administration(socket, config_file, purpose="look" if dry_run else "change") as admin:
        for chain_id in ids:
            if unpin:
                result = admin.unpin(chain_id, dry_run=dry_run)
            else:
                result = admin.pin(chain_id, follow=follow, dry_run=dry_run)
            if follow and not result.follows:
                raise ServiceError(
                    f"{chain_id} is pinned, but the running sidecar is older and does not follow",
                    hint="start it anew, then pin once more",
                )
            results.append(result)
            if not as_json:
                model = model_of(admin, chain_id, names)
                click.echo(sentence(result, model, unpin=unpin, dry_run=dry_run))
    if as_json:
        document = {
            "version": 1,
            "dry_run": dry_run,
            "pins": [
                {
                    "id": result.key.hex(),
                    "pinned": not unpin,
                    "follows": result.follows,
                    "changed": result.changed,
                    "blocks": result.blocks,
                    "changed_bytes": result.changed_bytes,
                }
                for result in results
            ],
            "pinned_bytes": results[-1].pinned_bytes,
            "limit_bytes": results[-1].limit_bytes,
        }
        click.echo(json.dumps(document, indent=1))


def model_of(admin: Admin, chain_id: str, names: Mapping[str, str]) -> str:
    """` of NAME` for a sentence; empty for an unknown ID."""
    from ollama_tiering.store.values import Selection

    descriptions = admin.listing(Selection(ids=(chain_id,))).descriptions
    return of_models(label(fields, ns, names) for ns, fields in descriptions.items())


def sentence(result: PinResult, model: str, *, unpin: bool, dry_run: bool) -> str:
    """What was done; `model` as `model_of` says it."""
    name = f"{short(result.key, _DIGITS)}{model}"
    if not result.changed:
        return f"{name} was {'not pinned' if unpin else 'pinned already'}"
    verb = "unpinned" if unpin else "pinned"
    verb += ", and what is added to it later" if result.follows else ""
    verb = f"would be {verb}" if dry_run else verb
    return (
        f"{name} {verb}: {count(result.blocks, 'block')}; pinned in all: "
        f"{format_size(result.pinned_bytes)} of at most {format_size(result.limit_bytes)}"
    )
