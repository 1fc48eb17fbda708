"""`tiering ls`: what is stored, one line per conversation or per block."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.cli.model_names import known_names, label
from ollama_tiering.cli.store_options import (
    administration,
    age,
    make_selection,
    selection_options,
    short,
    socket_in_force,
    store_options,
)
from ollama_tiering.config import count, format_size

if TYPE_CHECKING:
    from ollama_tiering.cli.first_words import Words
    from ollama_tiering.store.values import BlockLine, ChainLine, Listing, Totals

    Line = ChainLine | BlockLine

_SORTS: Final[dict[str, Callable[[Any], Any]]] = {  # biggest, longest, latest first
    "used": lambda line: -line.last_use,
    "created": lambda line: -line.created,
    "size": lambda line: -line.file_bytes,
    "tokens": lambda line: -line.tokens,
    "hits": lambda line: -line.hits,
}
_PIPE_WIDTH: Final = 1000  # without a terminal, nothing is cut
_MODEL_WIDTH: Final = 12  # at least: the only column that may be cut
_TEXT_WIDTH: Final = 16  # at least
_PIPE_TEXT_WIDTH: Final = 80
_NARROW: Final = 80  # below it the text is the first to go
_LEFT: Final = ("ID", "MODEL", "TIERS", "NOTE", "TEXT")
_DISPENSABLE: Final = ("OWN", "HITS", "BLOCKS", "TIERS", "NOTE", "USED")

Texts = Mapping[Any, str]  # by the key of a conversation's last block


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--blocks", is_flag=True, help="List single blocks instead of conversations.")
@selection_options
@click.option("--pinned", is_flag=True, help="List only what is pinned.")
@click.option(
    "--sort",
    type=click.Choice([*_SORTS, "model"]),
    default="used",
    show_default=True,
    help="What to sort by.",
)
@click.option("--reverse", is_flag=True, help="Sort the other way round.")
@click.option("--limit", type=click.IntRange(1), help="List at most this many lines.")
@click.option("--no-text", is_flag=True, help="Leave out the column TEXT.")
@store_options
def ls(
    ids: tuple[str, ...],
    blocks: bool,
    pinned: bool,
    sort: str,
    reverse: bool,
    limit: int | None,
    no_text: bool,
    socket: Path | None,
    config_file: Path | None,
    as_json: bool,
    **conditions: Any,
) -> None:
    """List the stored conversations, the last used first.

    Each line is a conversation: a chain of blocks from its first token to its end. SIZE is what the
    chain takes. OWN is the part that no other conversation uses, so `tiering rm ID` would free it.
    TEXT is what the user wrote where this conversation first differs from the others of its model.
    NOTE `other engine`: no engine of this machine will find it. An ID may be shortened as long as
    it is unique. With --blocks, each line is a block; with IDs, the blocks of these conversations,
    in their order.
    """
    selection = make_selection(ids, pinned=pinned, **conditions)
    with administration(socket, config_file, purpose="look") as admin:
        listing = admin.listing(selection, blocks=blocks, words=not (blocks or no_text))
    labels = labels_of(listing)
    lines: list[Line] = [*listing.chains, *listing.blocks]
    if not (blocks and ids):
        by: Callable[[Any], Any] = _SORTS.get(sort) or (lambda line: labels[line.namespace])
        lines.sort(key=by)
    if reverse:
        lines.reverse()
    lines = lines[:limit]
    useless = useless_in(listing, socket_in_force(socket, config_file))
    texts = None if blocks or no_text else texts_of(listing, lines)
    if as_json:
        found = document(listing, lines, labels, texts, useless, blocks=blocks)
        click.echo(json.dumps(found, indent=1))
        return
    if lines:
        _print_table(lines, labels, texts or {}, listing.id_digits, useless)
    click.echo(summary(listing, shown=len(lines), blocks=blocks))


def labels_of(listing: Listing) -> dict[Any, str]:
    """What to call the model of each namespace."""
    names = known_names()
    return {ns: label(fields, ns, names) for ns, fields in listing.descriptions.items()}


def useless_in(listing: Listing, socket: Path) -> dict[Any, str]:
    """Why no engine of this machine finds what is stored, by namespace; empty: one does."""
    from ollama_tiering.doctor.engines import engines_here

    here = engines_here(socket)
    return {ns: here.why_useless(fields) for ns, fields in listing.descriptions.items()}


def texts_of(listing: Listing, lines: Iterable[Any], words: Words | None = None) -> Texts:
    """`words` has read vocabularies before."""
    from ollama_tiering.cli.first_words import Words
    from ollama_tiering.launch.names import models_dirs

    words = words or Words(models_dirs())
    models = {ns: dict(fields).get("model", "") for ns, fields in listing.descriptions.items()}
    return {
        line.key: words.of(models[line.namespace], line.words, line.words_before) for line in lines
    }


def summary(listing: Listing, *, shown: int, blocks: bool) -> str:
    """`3 of 12 chains, 345 blocks, 5.6 GiB (ram 1.2 GiB, local 5.6 GiB)`."""
    selected, stored = listing.selected, listing.stored
    if not stored.blocks:
        return "nothing is stored"
    text = "" if blocks else f"{count(selected.chains, 'conversation')}, "
    if not blocks and selected.chains != stored.chains:
        text = f"{selected.chains:,} of {count(stored.chains, 'conversation')}, "
    text += count(selected.blocks, "block")
    text += f", {format_size(selected.file_bytes)}{_places(selected)}"
    lines = len(listing.chains) + len(listing.blocks)
    return text if shown == lines else f"{text}; {shown:,} shown"


def _places(totals: Totals) -> str:
    uses = [f"{use.tier.label} {format_size(use.stored_bytes)}" for use in totals.tiers]
    return f" ({', '.join(uses)})" if uses else ""


def _print_table(
    lines: Iterable[Line],
    labels: Mapping[Any, str],
    texts: Texts,
    digits: int,
    useless: Mapping[Any, str],
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    columns = _columns(list(lines), labels, digits, useless)
    if any(texts.values()) and console.width >= _NARROW:
        columns["TEXT"] = [texts[line.key] for line in lines]
    columns = _fitting(columns, console.width)
    widths = {heading: _width(heading, cells) for heading, cells in columns.items()}
    if "TEXT" in widths and not console.is_terminal:
        widths["TEXT"] = min(widths["TEXT"], _PIPE_TEXT_WIDTH)
    for heading, least in (("TEXT", _TEXT_WIDTH), ("MODEL", _MODEL_WIDTH)):
        if heading in widths:
            excess = sum(widths.values()) + 2 * (len(widths) - 1) - console.width
            widths[heading] -= max(0, min(excess, widths[heading] - least))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, width in widths.items():
        justify: Literal["left", "right"] = "left" if heading in _LEFT else "right"
        table.add_column(heading, no_wrap=True, overflow="ellipsis", width=width, justify=justify)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)


def _columns(
    lines: list[Line], labels: Mapping[Any, str], digits: int, useless: Mapping[Any, str]
) -> dict[str, list[str]]:
    cells: dict[str, Callable[[Any], str]] = {
        "ID": lambda line: short(line.key, digits),
        "MODEL": lambda line: labels[line.namespace],
        "TOKENS": lambda line: f"{line.tokens:,}",
        "SIZE": lambda line: format_size(line.file_bytes),
    }
    if any(hasattr(line, "own_bytes") for line in lines):
        cells["BLOCKS"] = lambda line: f"{line.blocks:,}"
        cells["OWN"] = lambda line: format_size(line.own_bytes)
    cells |= {
        "TIERS": _tiers,
        "USED": lambda line: age(line.last_use),
        "HITS": lambda line: f"{line.hits:,}",
    }
    notes = _notes(lines, useless)
    if any(notes.values()):
        cells["NOTE"] = lambda line: notes[line.key]
    return {heading: [cell(line) for line in lines] for heading, cell in cells.items()}


def _fitting(columns: dict[str, list[str]], width: int) -> dict[str, list[str]]:
    """Leaves out columns for which a narrow terminal has no room, the least needed first."""
    for heading in _DISPENSABLE:
        widths = {name: _width(name, cells) for name, cells in columns.items()}
        widths["MODEL"] = min(widths["MODEL"], _MODEL_WIDTH)
        if "TEXT" in widths:
            widths["TEXT"] = min(widths["TEXT"], _TEXT_WIDTH)
        if sum(widths.values()) + 2 * (len(widths) - 1) <= width:
            break
        columns.pop(heading, None)
    return columns


def _width(heading: str, cells: list[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, (heading, *cells)))


def _tiers(line: Line) -> str:
    """`ram 3/24 local`: a tier without a number has all of it."""
    blocks = getattr(line, "blocks", 1)
    return " ".join(
        use.tier.label if use.blocks == blocks else f"{use.tier.label} {use.blocks}/{blocks}"
        for use in line.tiers
    )


def _notes(lines: Iterable[Any], useless: Mapping[Any, str]) -> dict[bytes, str]:
    from ollama_tiering.store.values import window_keys

    windows = window_keys(line for line in lines if hasattr(line, "parent"))
    return {
        line.key: _marks(
            line, window=line.key in windows, useless=bool(useless.get(line.namespace))
        )
        for line in lines
    }


def _marks(line: Line, *, window: bool, useless: bool) -> str:
    marks = {
        "other engine": useless,
        "window": window,
        "pinned": line.pinned,
        "in use": line.leased,
        "broken": not line.complete,
    }
    return " ".join(name for name, holds in marks.items() if holds)


def document(
    listing: Listing,
    lines: Iterable[Line],
    labels: Mapping[Any, str],
    texts: Texts | None,
    useless: Mapping[Any, str],
    *,
    blocks: bool,
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "version": 1,
        "blocks" if blocks else "chains": [_entry(line, labels, texts) for line in lines],
        "namespaces": {ns.hex(): dict(fields) for ns, fields in listing.descriptions.items()},
        "selected": _totals(listing.selected),
        "stored": _totals(listing.stored),
        "id_digits": listing.id_digits,
        "useless_here": {ns.hex(): why for ns, why in useless.items() if why},
    }


def _entry(line: Line, labels: Mapping[Any, str], texts: Texts | None) -> dict[str, Any]:
    values = asdict(line)
    for tokens in ("words", "words_before"):
        values.pop(tokens, None)
    values["tiers"] = _tier_list(line.tiers)
    if "parent" in values:
        values["parent"] = values["parent"].hex()
    key, namespace = values.pop("key").hex(), values.pop("namespace").hex()
    text = {} if texts is None else {"text": texts[line.key]}
    model = labels[line.namespace]
    return {"id": key, "namespace": namespace, "model": model, **values, **text}


def _totals(totals: Totals) -> dict[str, Any]:
    return {**asdict(totals), "tiers": _tier_list(totals.tiers)}


def _tier_list(uses: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {"tier": use.tier.label, "blocks": use.blocks, "stored_bytes": use.stored_bytes}
        for use in uses
    ]
