"""`tiering top`: what is happening now, live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.cli.reach import require_there
from ollama_tiering.errors import ServiceError

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm

_ASK_SECONDS: Final = 2.0


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--seconds",
    type=click.FloatRange(0.2, 3600),
    default=1.0,
    show_default=True,
    help="Look so often.",
)
@click.option("--once", is_flag=True, help="Show one picture and end.")
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
def top(seconds: float, once: bool, socket: Path | None) -> None:
    """Show live what is stored, restored and computed, and why. Ctrl-C ends it.

    Each request that ends is a line: the tokens of its prompt that were in memory, restored and
    computed, the seconds that restoring saved, and why not more was restored. Where the output is
    no terminal, one picture is printed.
    """
    from rich.console import Console
    from rich.live import Live

    from ollama_tiering.cli.top_view import picture

    settings, broken = config.readable({"sidecar.socket": socket})
    path = settings.sidecar.socket_path
    require_there(path)
    console, watch = Console(), SidecarWatch(path)

    def look() -> object:
        return picture(watch.look(), watch.seen, watch.names, console.height)

    if once or not console.is_terminal:
        console.print(look())
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    live.update(look(), refresh=True)  # type: ignore[arg-type]
                    time.sleep(seconds)
            except KeyboardInterrupt:
                pass
    if broken:
        raise broken


class SidecarWatch:
    """Asks a sidecar again and again, and keeps what ended between two answers. Not thread-safe."""

    def __init__(self, socket: Path) -> None:
        from ollama_tiering.cli.top_state import Watched

        self.seen = Watched()
        self.names: dict[str, str] = {}  # of models, by file name
        self._socket = socket
        self._named: set[str] = set()  # looked for: a GGUF outside of all stores has no name

    def look(self) -> adm.StatResponse | None:
        """None if no sidecar answers now. ServiceError for one of another user's."""
        answer = _answer(self._socket)
        if answer and (new := {runner.model for runner in answer.runners} - self._named):
            self.names.update(_names(answer))
            self._named.update(new)
        if answer:
            self.names.update({use.model: use.name for use in answer.model_uses if use.name})
            self.seen.take(answer, time.time(), self.names)
        return answer


def _answer(path: Path) -> adm.StatResponse | None:
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.system.listener import Stranger

    try:
        with SidecarAdministration(path) as admin:
            return admin.stat(timeout_seconds=_ASK_SECONDS)
    except Stranger:
        raise
    except ServiceError:
        return None


def _names(answer: adm.StatResponse) -> dict[str, str]:
    from ollama_tiering.cli import status_use

    return status_use.names(answer)
