"""`tiering export` and `tiering import`: a conversation's blocks as a file or directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.cli.model_names import known_names, label, of_models
from ollama_tiering.cli.store_options import (
    administration,
    dry_run_option,
    short,
    socket_in_force,
    store_options,
)
from ollama_tiering.config import count, format_size

if TYPE_CHECKING:
    from ollama_tiering.store import Fields
    from ollama_tiering.store.tools.chain_to_export import LeftOut

_DIGITS = 12


@click.command("export", context_settings=CONTEXT_SETTINGS)
@click.argument("chain_id", metavar="ID")
@click.argument("target", type=NamedPath(path_type=Path))
@click.option(
    "--directory", "as_directory", is_flag=True, help="Write a directory instead of a tar."
)
@dry_run_option
@store_options
def export_command(
    chain_id: str,
    target: Path,
    as_directory: bool,
    dry_run: bool,
    socket: Path | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Write a conversation to TARGET, a plain tar or a directory.

    TARGET contains the tokens of the conversation unencrypted, as the store does. It must not exist
    yet, and appears only when all of it is written. A damaged block is an error, unless it belongs
    to a sliding window: then it is left out, and the machine that imports the conversation computes
    its tokens again.
    """
    from ollama_tiering.store.tools.chain_to_export import with_whole_windows
    from ollama_tiering.store.tools.exporting import export_chain

    left_out: list[LeftOut] = []
    with administration(socket, config_file, purpose="look") as admin:
        chain = admin.chain(chain_id)
        if chain.windows and not dry_run:
            with _progress("checking", sum(size for _, size in chain.windows)) as advance:
                chain, left_out = with_whole_windows(chain, admin.opened, advance)
        size = chain.file_bytes
        if not dry_run:
            with _progress("exporting", size) as advance:
                export_chain(
                    chain,
                    admin.opened(chain),
                    target,
                    as_directory=as_directory,
                    progress=advance,
                )
    key, blocks = chain.blocks[-1][0], len(chain.files)
    if as_json:
        document = {
            "version": 1,
            "dry_run": dry_run,
            "id": key.hex(),
            "namespace": chain.namespace.hex(),
            "blocks": blocks,
            "bytes": size,
            "target": str(target),
            "left_out": [{"id": one.key.hex(), "reason": one.reason} for one in left_out],
        }
        click.echo(json.dumps(document, indent=1))
        return
    verb = "would export" if dry_run else "exported"
    name = _name(key, chain.namespace, chain.description)
    click.echo(f"{verb} {name}: {count(blocks, 'block')}, {format_size(size)} to {target}")
    for one in left_out:
        click.echo(f"left out: window block {short(one.key, _DIGITS)}: {one.reason}")


@click.command("import", context_settings=CONTEXT_SETTINGS)
@click.argument("source", type=NamedPath(exists=True, path_type=Path))
@dry_run_option
@store_options
def import_command(
    source: Path, dry_run: bool, socket: Path | None, config_file: Path | None, as_json: bool
) -> None:
    """Store the conversation in SOURCE, which `tiering export` wrote.

    Sizes, headers, checksums and the chain are checked before anything is stored. Nobody can check
    that the tensors belong to their tokens, so import only what you trust. Blocks that are stored
    already stay as they are.
    """
    from ollama_tiering.doctor.engines import engines_here, name_of
    from ollama_tiering.store.tools.archive import open_archive
    from ollama_tiering.store.tools.importing import Imported, check_archive, import_blocks

    with open_archive(source) as archive:
        manifest = archive.manifest
        with _progress("checking", manifest.file_bytes) as advance:
            checked = check_archive(archive, advance)
        with administration(socket, config_file, purpose="look" if dry_run else "store") as admin:
            present = admin.present(checked)
            missing = present.missing(manifest)
            size = sum(block.file_bytes for block in missing)
            total = len(manifest.files)
            done = Imported(total, total - len(missing), len(missing), size)
            if missing and not dry_run:
                with _progress("importing", size) as advance, admin.sink(manifest) as sink:
                    done = import_blocks(archive, sink, present, advance)
    key = manifest.blocks[-1].key
    useless = engines_here(socket_in_force(socket, config_file)).why_useless(manifest.description)
    if as_json:
        document = {
            "version": 1,
            "dry_run": dry_run,
            "useless_here": useless,
            "id": key.hex(),
            "namespace": manifest.namespace.hex(),
            "blocks": done.blocks,
            "present": done.present,
            "stored": done.stored,
            "bytes": done.file_bytes,
        }
        click.echo(json.dumps(document, indent=1))
        return
    name = _name(key, manifest.namespace, manifest.description)
    verb = "would store" if dry_run else "stored"
    there = f"; {count(done.present, 'block')} stored already" if done.present else ""
    what = f"all {count(done.blocks, 'block')} stored already"
    if done.stored:
        what = f"{verb} {count(done.stored, 'block')}, {format_size(size)}{there}"
    click.echo(f"{name}: {what}")
    if useless:
        engine = name_of(manifest.description)
        click.echo(f"of no use here: it was computed by {engine}, and {useless}")


def _name(key: bytes, namespace: bytes, description: Fields) -> str:
    """`1234abcd… of qwen3:0.6b`."""
    return short(key, _DIGITS) + of_models([label(description, namespace, known_names())])


@contextlib.contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda more: progress.update(task, advance=more)
