"""`tiering up`: the patched Ollama with its sidecar, in the foreground, with one command."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.config.words import flag_note

if TYPE_CHECKING:
    from ollama_tiering.errors import ConfigError
    from ollama_tiering.launch.address import Address
    from ollama_tiering.launch.record import Record
    from ollama_tiering.launch.up import Request
    from ollama_tiering.patchset.report import Report

_EXAMPLE_MODEL = "qwen3:0.6b"  # small; Ollama fetches it where there is none yet


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--tag", help="Version of Ollama." + flag_note("patch.tag"))
@click.option(
    "--source",
    help="URL or local clone, where the version is not cached yet." + flag_note("patch.source"),
)
@click.option("--host", help="Where Ollama listens.  [env OLLAMA_HOST; default: 127.0.0.1:11434]")
@click.option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    help="Models directory.  [env OLLAMA_MODELS; default: Ollama's own]",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="Unix socket of the sidecar." + flag_note("sidecar.socket"),
)
@click.option(
    "--cpu-attention",
    type=click.Choice(["exact", "stock"]),
    help="Attention of models on the CPU." + flag_note("server.cpu_attention"),
)
@click.option(
    "--cpu",
    type=click.Choice(["native", "variants"]),
    help="CPU code of the build.  [default: what is built already, else native]",
)
@click.option(
    "--cuda",
    type=click.Choice(["auto", "on", "off"]),
    help="GPU code of the build." + flag_note("patch.cuda"),
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show each command of the build.")
def up(
    host: str | None,
    models: Path | None,
    socket: Path | None,
    cpu_attention: str | None,
    quiet: bool,
    verbose: bool,
    **build: Any,
) -> None:
    """Build the patched Ollama if needed, start the sidecar, serve.

    Runs until Ctrl-C or SIGTERM: Ollama stores what its models hold, then the sidecar writes it
    down. Every OLLAMA_* variable is passed on. An installed Ollama is not touched. If it is up
    already, this says so and ends with exit code 0; if something else has the port, or it is up
    with another models directory than --models names, with 9. If the sidecar cannot start, one
    line says why and Ollama serves as stock.
    """
    from ollama_tiering.cli.already_up import say_already
    from ollama_tiering.launch import up as launching
    from ollama_tiering.launch.address import address_of
    from ollama_tiering.launch.record import AlreadyUp, claim
    from ollama_tiering.patchset.binary import patched_binary
    from ollama_tiering.patchset.report import Report

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a build ends with us
    report = Report(quiet=quiet, verbose=verbose)
    address = address_of(host)
    flags = {"sidecar.socket": socket, "server.cpu_attention": cpu_attention}
    request, unreadable = _request(address, models.absolute() if models else None, flags)
    try:
        with claim(address) as held:
            launching.require_free(address)
            held.write(launching.first_record(request))
            binary = _built_binary(unreadable) if unreadable else patched_binary(report, **build)
            launching.run(
                request, binary, held, report, lambda record: _ready(request, record, report)
            )
    except AlreadyUp as already:
        say_already(request, already.record)


def _request(
    address: Address, models: Path | None, flags: dict[str, Any]
) -> tuple[Request, ConfigError | None]:
    """Settings in a file or variable that cannot be used cost the cache, not the server. A flag
    that cannot is a ConfigError.
    """
    from ollama_tiering import config
    from ollama_tiering.errors import ConfigError
    from ollama_tiering.launch.up import Request

    try:
        settings = config.load(flags)
    except ConfigError as error:
        _require_good_flags(flags)
        why = f"{error.message} ({error.hint})"
        attention = flags["server.cpu_attention"]
        socket = config.default_socket_path()
        return Request(address, socket, models, attention, why_stock=why), error
    attention = settings.server.cpu_attention
    return Request(address, settings.sidecar.socket_path, models, attention), None


def _require_good_flags(flags: dict[str, Any]) -> None:
    from ollama_tiering.config import SETTINGS
    from ollama_tiering.errors import ConfigError

    for setting in SETTINGS:
        if (value := flags.get(setting.key)) is not None:
            try:
                setting.parse(value)
            except (ValueError, TypeError) as error:
                name = setting.key.partition(".")[2].replace("_", "-")
                raise ConfigError(f"flag --{name}: {error}", hint="name another") from None


def _built_binary(unreadable: ConfigError) -> Path:
    """Nothing is built by settings that cannot be read: what is there serves."""
    from ollama_tiering.patchset.binary import ready_binary

    binary = ready_binary()
    if binary is None:
        raise unreadable
    return binary


def _ready(request: Request, record: Record, report: Report) -> None:
    from ollama_tiering.cli.already_up import logs_of
    from ollama_tiering.launch.address import Address
    from ollama_tiering.launch.names import first_names
    from ollama_tiering.launch.ollama import Api

    where = "" if request.address == Address() else f"OLLAMA_HOST={request.address} "
    click.echo(f"ready: Ollama {Api(request.address).version()} at {request.address.url}")
    if not report.quiet:
        own = set(first_names([request.models_dir]).values())
        model = _EXAMPLE_MODEL if _EXAMPLE_MODEL in own else min(own, default=_EXAMPLE_MODEL)
        click.echo(f"  use   {where}{record.binary} run {model}   (or any client)")
        click.echo("  look  tiering status")
        click.echo(f"  logs  {'  '.join(logs_of(record))}")
        click.echo("  stop  Ctrl-C")
