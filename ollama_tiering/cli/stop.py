"""`tiering stop`: ends a `tiering up` that runs in the background, or elsewhere."""

from __future__ import annotations

import click

from ollama_tiering.cli import CONTEXT_SETTINGS


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--host", help="Where Ollama listens.  [env OLLAMA_HOST; default: 127.0.0.1:11434]")
def stop(host: str | None) -> None:
    """Stop `tiering up`, as Ctrl-C does where it runs.

    Ollama stores what its models hold, and the sidecar copies it to the disk; then this command
    ends. If none runs there, it says so, and the exit code is 0. A service is not touched: the
    error names the command that stops it.
    """
    from ollama_tiering.launch import detached
    from ollama_tiering.launch.address import address_of

    address = address_of(host)
    record = detached.stop(address)
    if record is None:
        click.echo(f"no `tiering up` runs at {address.url}")
    else:
        click.echo(f"stopped: {record.url} (process {record.pid})")
