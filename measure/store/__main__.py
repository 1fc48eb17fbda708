"""The store by itself, beside what this machine can do without it."""

from __future__ import annotations

from pathlib import Path

import click

from measure.running import main
from measure.sections import Measured, sections
from measure.store import keeping, looking_up, restoring, scale, storing, weather
from ollama_tiering.config import default_local_dir
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset.report import Report

_PARTS = ("restore", "put", "lookup", "scale", "weather", "keep")


@click.command()
@sections(_PARTS)
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
def store(
    parts: list[str],
    report: Report,
    directory: Path | None,
    mb: int,
    block_mb: str,
    records: int,
    files: int,
    soak: float,
) -> Measured:
    """Measure the store by itself: restoring, storing, looking up, failing disks.

    Each figure is compared with what this machine can do without the store, measured in between.
    What the benchmark writes lies in directories of its own and is removed at the end. The part
    `weather` is a remote tier that hangs. The part `keep` replays made-up days of prompts on the
    books of a store whose tier is full.
    """
    sizes, whole = [mib << 20 for mib in _sizes(block_mb)], mb << 20
    disk = directory or _disk_of_the_local_tier()

    def say(text: str) -> None:
        report.say(f"* {text}")

    measures = {
        "restore": lambda: restoring.measure(disk, sizes, whole, say),
        "put": lambda: storing.measure(disk, sizes, whole, say),
        "lookup": lambda: looking_up.measure(records, say),
        "scale": lambda: scale.measure(disk, files, soak, say),
        "weather": lambda: weather.measure(disk, say),
        "keep": lambda: keeping.measure(say),
    }
    return "The store, measured", [measures[part]() for part in parts]


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 512 for part in parts):
        raise UsageError(f"--block-mb {text}: not sizes of 1 to 512", hint="write 1,4,8,32")
    return sorted({int(part) for part in parts})


def _disk_of_the_local_tier() -> Path:
    directory = default_local_dir()
    while not directory.is_dir():
        directory = directory.parent
    return directory


if __name__ == "__main__":
    main(store)
