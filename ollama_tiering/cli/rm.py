"""`tiering rm`: removes conversations from the store."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.cli.model_names import known_names, label, of_models
from ollama_tiering.cli.store_options import (
    Admin,
    administration,
    dry_run_option,
    make_selection,
    selection_options,
    short,
    store_options,
)
from ollama_tiering.config import count, format_size
from ollama_tiering.errors import TieringError, UsageError

if TYPE_CHECKING:
    from ollama_tiering.store.values import ChainLine, Listing, Removal, Selection


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selection_options
@click.option("--all", "everything", is_flag=True, help="Remove every conversation.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@dry_run_option
@store_options
def rm(
    ids: tuple[str, ...],
    everything: bool,
    yes: bool,
    dry_run: bool,
    socket: Path | None,
    config_file: Path | None,
    as_json: bool,
    **conditions: Any,
) -> None:
    """Remove conversations from the store.

    Name them by ID, or by conditions that must all hold. Blocks stay, and are counted, if another
    conversation needs them, if they are pinned, or if they are being read. If you name the ID of a
    pinned conversation, nothing is removed, and the exit code is 1. The command asks first, unless
    you give --yes.
    """
    chosen = bool(ids) or any(conditions.values())
    if chosen == everything:
        raise UsageError(
            "--all takes no IDs and no conditions" if everything else "say what to remove",
            hint="give IDs (`tiering ls`), conditions, or --all",
        )
    if not (yes or dry_run) and (as_json or not sys.stdin.isatty()):
        raise UsageError("cannot ask before removing", hint="add --yes, or --dry-run to look first")
    selection = make_selection(ids, **conditions)
    with administration(socket, config_file, purpose="look" if dry_run else "change") as admin:
        about = about_of(admin, selection)
        if not (yes or dry_run):
            planned = admin.remove(selection, dry_run=True)
            if not planned.blocks and not planned.waiting_blocks:
                click.echo(sentence(planned, about, dry_run=True))
                return
            click.echo(sentence(planned, about, dry_run=True), err=True)
            click.confirm("Remove?", abort=True, err=True)
        done = admin.remove(selection, dry_run=dry_run)
    if as_json:
        document = {"version": 1, "dry_run": dry_run, **asdict(done)}
        click.echo(json.dumps(document | {"pinned_chains": about.pinned_chains}, indent=1))
    else:
        click.echo(sentence(done, about, dry_run=dry_run))


@dataclass(frozen=True, slots=True)
class AboutRemoval:
    """What a removal is of (` of qwen3:0.6b`), and how many pinned conversations it leaves."""

    models: str
    pinned_chains: int


def about_of(admin: Admin, selection: Selection) -> AboutRemoval:
    """TieringError if a conversation that is named by its ID is pinned."""
    listing = admin.listing(selection)
    pinned = [chain for chain in listing.chains if chain.pinned]
    if selection.ids and pinned:
        raise _pinned(admin, pinned, listing.id_digits)
    return AboutRemoval(of_models(_models(listing)), len(pinned))


def _models(listing: Listing) -> set[str]:
    """Names of the models whose conversations go."""
    names = known_names()
    going = {chain.namespace for chain in listing.chains if not chain.pinned}
    return {label(listing.descriptions.get(ns, ()), ns, names) for ns in going}


def _pinned(admin: Admin, pinned: list[ChainLine], digits: int) -> TieringError:
    """The error with the way out: a pin lies on the conversation itself, or on one that continues
    it.
    """
    names = [short(chain.key, digits) for chain in pinned]
    own = all(admin.unpin(chain.key.hex(), dry_run=True).changed for chain in pinned)
    way = f"tiering unpin {' '.join(names)}" if own else "tiering ls --pinned shows what keeps it"
    verb = "is" if len(names) == 1 else "are"
    return TieringError(f"{', '.join(names)} {verb} pinned; nothing was removed", hint=way)


def kept_sentence(kept: Mapping[str, int]) -> str:
    reasons = [f"{count(blocks, 'block')} {reason}" for reason, blocks in sorted(kept.items())]
    return f"; stays: {', '.join(reasons)}" if reasons else ""


def sentence(removal: Removal, about: AboutRemoval, *, dry_run: bool) -> str:
    """What was removed, or would be, and what stays."""
    verb = "would remove" if dry_run else "removed"
    chains = count(removal.chains, "conversation")
    what = f"{chains}{about.models}, {count(removal.blocks, 'block')}"
    rest = kept_sentence(removal.kept) + _waiting_sentence(removal)
    if about.pinned_chains:
        rest += f"; {count(about.pinned_chains, 'pinned conversation')} kept (tiering ls --pinned)"
    if not removal.blocks:
        return f"nothing to remove{rest}"
    return f"{verb} {what}, {format_size(removal.stored_bytes)}{rest}"


def _waiting_sentence(removal: Removal) -> str:
    if not removal.waiting_blocks:
        return ""
    return (
        f"; on the remote tier {count(removal.waiting_blocks, 'block')} may stay for now, not used "
        f"any more, until they can be removed ({removal.waiting_for})"
    )
