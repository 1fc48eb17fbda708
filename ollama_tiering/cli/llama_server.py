"""`tiering llama-server`: llama.cpp's server with a sidecar, without Ollama."""

from __future__ import annotations

from pathlib import Path

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.config.environment import ENV_LLAMA_SERVER
from ollama_tiering.config.words import flag_note


@click.command("llama-server", context_settings=CONTEXT_SETTINGS)
@click.option(
    "--program",
    type=NamedPath(dir_okay=False, path_type=Path),
    envvar=ENV_LLAMA_SERVER,
    help="A llama-server with the tiering.  "
    f"[env {ENV_LLAMA_SERVER}; default: the latest in the cache]",
)
@click.option(
    "--socket",
    type=NamedPath(path_type=Path),
    help="Unix socket of the sidecar." + flag_note("sidecar.socket"),
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def llama_server(
    program: Path | None, socket: Path | None, quiet: bool, arguments: tuple[str, ...]
) -> None:
    """Start the sidecar if none runs, and llama-server with ARGUMENTS.

    ARGUMENTS are llama-server's own; write two dashes before them. Its cache of prompts is off
    while the sidecar is there, unless they, or LLAMA_ARG_CACHE_RAM, say how large it is. Without a
    model (with --models-dir or --models-preset, say) it starts a llama-server for each one that
    requests name, and all of them use this sidecar.

    Runs until llama-server ends, or until Ctrl-C or SIGTERM. Then llama-server is ended first, and
    a sidecar that was started by this command copies what it has to the disk. The exit code is that
    of llama-server.
    """
    import sys

    from ollama_tiering import config
    from ollama_tiering.launch import plain_server
    from ollama_tiering.patchset.report import Report
    from ollama_tiering.sidecar.engine.listener import place

    loaded = config.load({"sidecar.socket": socket})
    settings = loaded.sidecar
    request = plain_server.PlainRequest(
        program=plain_server.find_program(program),
        arguments=arguments,
        socket=settings.socket_path,
        engine_socket=place(settings),
        cpu_attention=loaded.server.cpu_attention,
    )
    sys.exit(plain_server.run(request, Report(quiet=quiet)))
