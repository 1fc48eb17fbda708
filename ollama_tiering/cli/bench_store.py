"""`tiering bench store`: the store by itself, beside what this machine can do without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering import extras
from ollama_tiering.cli.bench_sections import chosen, publish
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.bench.tiers.results import Section

_PARTS = ("restore", "put", "lookup", "scale", "index", "encoding", "weather")


@click.command()
@click.option(
    "--only",
    default=",".join(_PARTS),
    show_default=True,
    help="Parts to measure, separated by commas.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="A directory on the disk to measure.  [default: where the local tier is]",
)
@click.option(
    "--mb",
    type=click.IntRange(64),
    default=256,
    show_default=True,
    help="MiB to write or read in each run.",
)
@click.option("--block-mb", default="1,4,8,32", show_default=True, help="Sizes of blocks in MiB.")
@click.option(
    "--records",
    type=click.IntRange(64),
    default=1_000_000,
    show_default=True,
    help="How many blocks the store has when keys are looked up.",
)
@click.option(
    "--files",
    type=click.IntRange(64),
    default=100_000,
    show_default=True,
    help="How many files a start has to count.",
)
@click.option(
    "--soak",
    type=click.FloatRange(0),
    default=0.0,
    help="Also put the store under load for this many minutes, and watch its memory.  "
    "[default: none]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the record to this file, in Markdown, with plots beside it.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def store(
    only: str,
    directory: Path | None,
    mb: int,
    block_mb: str,
    records: int,
    files: int,
    soak: float,
    as_json: bool,
    out: Path | None,
    quiet: bool,
) -> None:
    """Measure the store by itself: restoring, storing, looking up, encodings, failing disks.

    Each figure is compared with what this machine can do without the store, measured in between.
    What the benchmark writes lies in directories of its own and is removed at the end. The part
    `weather` is a remote tier that hangs.
    """
    from ollama_tiering.bench.machine import begin

    began, parts = begin(), chosen(only, _PARTS)
    if "encoding" in parts:
        extras.need("models")
    sizes = [mib << 20 for mib in _sizes(block_mb)]
    disk = directory or _disk_of_the_local_tier()

    def say(text: str) -> None:
        if not quiet:
            click.echo(f"* {text}", err=True)

    sections = [_measure(part, disk, sizes, mb << 20, records, files, soak, say) for part in parts]
    publish("The store, measured", sections, began, as_json=as_json, out=out)


def _measure(
    part: str,
    disk: Path,
    block_bytes: list[int],
    total_bytes: int,
    records: int,
    files: int,
    soak_minutes: float,
    say: Callable[[str], None],
) -> Section:
    if part == "restore":
        from ollama_tiering.bench.tiers import restoring

        return restoring.measure(disk, block_bytes, total_bytes, say)
    if part == "put":
        from ollama_tiering.bench.tiers import storing

        return storing.measure(disk, block_bytes, total_bytes, say)
    if part == "lookup":
        from ollama_tiering.bench.tiers import looking_up

        return looking_up.measure(records, say)
    if part == "scale":
        from ollama_tiering.bench.tiers import scale

        return scale.measure(disk, files, soak_minutes, say)
    if part == "index":
        from ollama_tiering.bench.tiers import index_at_start

        return index_at_start.measure(disk, files, say)
    if part == "encoding":
        from ollama_tiering.bench.tiers import encodings

        return encodings.measure(say)
    from ollama_tiering.bench.tiers import weather

    return weather.measure(disk, say)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 512 for part in parts):
        raise UsageError(f"--block-mb {text}: not sizes of 1 to 512", hint="write 1,4,8,32")
    return sorted({int(part) for part in parts})


def _disk_of_the_local_tier() -> Path:
    from ollama_tiering.config import default_local_dir

    directory = default_local_dir()
    while not directory.is_dir():
        directory = directory.parent
    return directory
