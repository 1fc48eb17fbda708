"""`tiering logs`: what the server and the sidecar of `tiering up` wrote."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, echo_path
from ollama_tiering.errors import ServiceError, plain

_POLL_SECONDS = 0.3
_READ_BYTES = 1 << 20


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("which", type=click.Choice(["server", "sidecar", "up", "all"]), default="all")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Lines of each log.",
)
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they come, until Ctrl-C.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port of the server.  [default: the newest]"
)
@click.option("--paths", is_flag=True, help="Print only the paths of the files.")
def logs(which: str, lines: int, follow: bool, port: int | None, paths: bool) -> None:
    """Show the end of the logs of `tiering up`, whether it runs or not; `up` is its own, of -d.

    A service writes to the journal instead: journalctl -u ollama-tiering -u ollama-tiered.
    """
    files = _files(which, port)
    if paths:
        for file in files:
            echo_path(file)
        return
    places = {}
    for file in files:
        click.echo(plain(f"==> {file}"), err=True)
        text, places[file] = _end(file, lines)
        click.echo(text, nl=False)
    while follow:
        _follow(places, lambda file, text: click.echo(text, nl=False))
        time.sleep(_POLL_SECONDS)


def _files(which: str, port: int | None) -> list[Path]:
    """The newest log of each kind. ServiceError if there is none."""
    from ollama_tiering import config

    folder = config.state_dir() / "logs"
    kinds = {"server": "ollama", "sidecar": "sidecar", "up": "up"}  # up: of one in the background
    found = []
    for kind in kinds if which == "all" else [which]:
        pattern = f"{kinds[kind]}-{port or '*'}.log"
        newest = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime)[-1:]
        found += newest
    if not found:
        of_port = f" of port {port}" if port else ""
        raise ServiceError(
            f"no log{of_port} in {folder}",
            hint="`tiering up` writes there; a service writes to the journal: "
            "journalctl -u ollama-tiering -u ollama-tiered",
        )
    return found


def _end(file: Path, lines: int) -> tuple[str, int]:
    """The last lines, and the size at which they end. Of a large file only the end is read."""
    with file.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(0, size - _READ_BYTES))
        text = log.read(size - log.tell()).decode(errors="replace")
    kept = text.splitlines(keepends=True)[-lines:] if lines else []
    return "".join(kept), size


def _follow(places: dict[Path, int], show: Callable[[Path, str], None]) -> None:
    """Shows what was added since; `places` are offsets. A file that was begun
    anew is read from 0.
    """
    for file, at in places.items():
        try:
            size = file.stat().st_size
            if size < at:
                at = 0
            if size > at:
                with file.open("rb") as log:
                    log.seek(at)
                    show(file, log.read(size - at).decode(errors="replace"))
            places[file] = size
        except FileNotFoundError:
            places[file] = 0
