"""`tiering sidecar`: the service that keeps the blocks, in the foreground until
SIGTERM or SIGINT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ollama_tiering import config
from ollama_tiering.cli import NamedPath
from ollama_tiering.config import agreeing, count, format_size
from ollama_tiering.config.words import flag_note

_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.option(
    "--socket",
    type=NamedPath(path_type=Path),
    help="Unix socket to listen on." + flag_note("sidecar.socket"),
)
@click.option(
    "--ram-dir",
    type=NamedPath(path_type=Path),
    help="Directory of the RAM tier, on tmpfs." + flag_note("sidecar.ram_dir"),
)
@click.option(
    "--ram-gb",
    metavar="SIZE",
    help="Budget of the RAM tier, in GiB or as 500MB; 0 for none."
    + flag_note("sidecar.ram_budget"),
)
@click.option(
    "--local",
    type=NamedPath(path_type=Path),
    help="Directory of the local tier." + flag_note("sidecar.local_dir"),
)
@click.option(
    "--local-gb",
    metavar="SIZE",
    help="Budget of the local tier, in GiB or as 500GB; 0 for none."
    + flag_note("sidecar.local_budget"),
)
@click.option(
    "--remote",
    type=NamedPath(path_type=Path),
    help="Directory of the remote tier, which several machines may share (NFS)."
    + flag_note("sidecar.remote_dir"),
)
@click.option(
    "--remote-gb",
    metavar="SIZE",
    help="Budget of the remote directory, in GiB or as 2TB, for all machines together."
    + flag_note("sidecar.remote_budget"),
)
@click.option(
    "--log-level",
    type=click.Choice(_LEVELS),
    help="How much to log on stderr." + flag_note("sidecar.log_level"),
)
@click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    help="Log lines of text, or one JSON object per line." + flag_note("sidecar.log_format"),
)
@click.option(
    "--metrics-port",
    type=int,
    help="Port for Prometheus metrics, on loopback; 0 for none."
    + flag_note("sidecar.metrics_port"),
)
@click.option(
    "--config",
    "config_file",
    type=NamedPath(path_type=Path),
    help="Read this settings file instead of the usual one.",
)
def sidecar(
    socket: Path | None,
    ram_dir: Path | None,
    ram_gb: str | None,
    local: Path | None,
    local_gb: str | None,
    remote: Path | None,
    remote_gb: str | None,
    log_level: str | None,
    log_format: str | None,
    metrics_port: int | None,
    config_file: Path | None,
) -> None:
    """Run the sidecar, the service that keeps blocks in RAM and on disk for the patched Ollama.

    It runs in the foreground. One line on stdout says when it is ready; a service manager that sets
    NOTIFY_SOCKET is told, too. On SIGTERM or Ctrl-C it copies to the disk what is in RAM only, for
    at most 10 s, and ends. On SIGHUP it reads its settings again; docs/configuration.md says which
    of them change at once.
    """
    overrides: dict[str, Any] = {
        "sidecar.socket": socket,
        "sidecar.ram_dir": ram_dir,
        "sidecar.ram_budget": ram_gb,
        "sidecar.local_dir": local,
        "sidecar.local_budget": local_gb,
        "sidecar.remote_dir": remote,
        "sidecar.remote_budget": remote_gb,
        "sidecar.log_level": log_level,
        "sidecar.log_format": log_format,
        "sidecar.metrics_port": metrics_port,
    }
    settings = config.load_sidecar(overrides, path=config_file)
    from ollama_tiering.sidecar import logs  # gRPC is slow to import: not for --help
    from ollama_tiering.sidecar.server import serve

    logs.configure(settings.log_format, settings.log_level)
    left = serve(
        settings,
        ready=lambda line: click.echo(line),
        reread=lambda: config.load_sidecar(overrides, path=config_file),
    )
    if left.blocks:
        click.echo(
            f"sidecar stopped: {count(left.blocks, 'block')} ({format_size(left.left_bytes)}) "
            f"{agreeing(left.blocks, 'is')} in RAM only, until the machine reboots; the next start "
            "goes on from there"
        )
    else:
        click.echo("sidecar stopped: everything is on disk")
