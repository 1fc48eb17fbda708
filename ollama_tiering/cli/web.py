"""`tiering web`: a page in the browser."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:8434",
    show_default=True,
    help="Where to serve the page. Whoever comes from another machine needs its token.",
)
@click.option("--no-text", is_flag=True, help="Show nothing of what the prompts say.")
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
def web(listen: str, no_text: bool, socket: Path | None) -> None:
    """Serve a page that shows what is stored, restored and computed. Ctrl-C ends it.

    It shows in a browser what `top`, `ls`, `why`, `report`, `status`, `doctor` and `config` show,
    and pins and removes conversations. The page loads nothing from elsewhere. On this machine it is
    there for processes of this user only; every other user and, with --listen, every other machine
    needs the token, which lies in web.token in the state directory.

    Exit code 9 if the address cannot be had.
    """
    from ollama_tiering.cli.web_data import SidecarData
    from ollama_tiering.launch.address import PAGE_PORT, parse_address
    from ollama_tiering.web.security import Door
    from ollama_tiering.web.server import serve
    from ollama_tiering.web.token import page_token

    settings, broken = config.readable({"sidecar.socket": socket})
    address = parse_address(listen, PAGE_PORT)
    door = Door(address, page_token(config.state_dir()))
    data = SidecarData(settings.sidecar.socket_path, text=not no_text)
    ended = threading.Event()
    threading.Thread(target=data.watch, args=[ended], daemon=True).start()

    def ready() -> None:
        click.echo(f"page: {door.first_address}")
        click.echo("stop: Ctrl-C")

    with contextlib.suppress(KeyboardInterrupt):
        serve(data, door, ready)
    ended.set()
    if broken:
        raise broken
