"""`tiering up`: the patched Ollama with its sidecar, in the foreground, with one command."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.config.words import flag_note

if TYPE_CHECKING:
    from ollama_tiering.errors import ConfigError
    from ollama_tiering.launch.address import Address
    from ollama_tiering.launch.process import Child
    from ollama_tiering.launch.running_up import RunningUp
    from ollama_tiering.launch.served import Served
    from ollama_tiering.launch.up import UpRequest
    from ollama_tiering.patchset.llama_server.installation import InstalledOllama
    from ollama_tiering.patchset.report import Report

_STOP = "  stop  "
_CTRL_C = f"{_STOP}Ctrl-C"
_EXAMPLE_MODEL = "qwen3:0.6b"  # small; Ollama fetches it if it is missing


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--tag", help="Version of Ollama." + flag_note("patch.tag"))
@click.option(
    "--source",
    help="URL or local clone to fetch from if the version is not cached yet."
    + flag_note("patch.source"),
)
@click.option(
    "--ollama",
    metavar="auto|DIR",
    help="Serve with the installed Ollama (v0.30 or later), in the usual places or in DIR.",
)
@click.option("--host", help="Where Ollama listens.  [env OLLAMA_HOST; default: 127.0.0.1:11434]")
@click.option(
    "--models",
    type=NamedPath(file_okay=False, path_type=Path),
    help="Directory of the models.  [env OLLAMA_MODELS; default: Ollama's own]",
)
@click.option(
    "--socket",
    type=NamedPath(path_type=Path),
    help="Unix socket of the sidecar." + flag_note("sidecar.socket"),
)
@click.option(
    "--cpu-attention",
    type=click.Choice(["exact", "stock"]),
    help="How models on the CPU compute attention: by our exact kernels, or as stock Ollama."
    + flag_note("server.cpu_attention"),
)
@click.option(
    "--cpu",
    type=click.Choice(["native", "variants"]),
    help="Build for this processor only, or for every one.  "
    "[default: what is built already, else native]",
)
@click.option(
    "--gpu",
    "--cuda",
    "cuda",
    metavar="auto|on|off|stock|stock=PLACE",
    help="GPU code of the build." + flag_note("patch.cuda"),
)
@click.option(
    "--web",
    is_flag=False,
    flag_value="127.0.0.1:8434",
    metavar="[HOST:PORT]",
    help="Serve the page of `tiering web`, too: at 127.0.0.1:8434, or as said.",
)
@click.option("-d", "--detach", is_flag=True, help="Serve in the background, until `tiering stop`.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show each command of the build.")
@click.pass_context
def up(
    context: click.Context,
    /,
    host: str | None,
    models: Path | None,
    socket: Path | None,
    cpu_attention: str | None,
    ollama: str | None,
    web: str | None,
    detach: bool,
    quiet: bool,
    verbose: bool,
    **build: Any,
) -> None:
    """Build the patched Ollama if needed, start the sidecar, serve.

    Which Ollama that is, `tiering patch` says. An installed one (v0.30 or later) is served as stock
    where it was updated since it was patched, also while it serves, or where it cannot be patched.
    So is one where nothing can be built, unless another version was named. One line says why and
    what to do.

    Runs until Ctrl-C or SIGTERM; with -d in the background, until `tiering stop`, and this command
    ends as soon as it serves. Then Ollama stores what its models hold, and the sidecar copies
    it to the disk. Every OLLAMA_* variable is passed on. An installed Ollama is not touched.

    If `tiering up` runs already, this command says so and ends with exit code 0. It ends with 9 if
    another program has the port, or if the running one has another models directory than --models
    names. If the sidecar cannot start, one line says why, and Ollama serves as stock.

    Prompts that `tiering warm --at-start` keeps are computed once Ollama answers.
    """
    from ollama_tiering.launch import first_process

    first_process.stand_before()  # while there is one thread
    from ollama_tiering.cli.already_up import say_already, stopped_by
    from ollama_tiering.launch import up as launching
    from ollama_tiering.launch.address import address_of
    from ollama_tiering.launch.llama_up import program_for
    from ollama_tiering.launch.running_up import AlreadyUp, hold, running
    from ollama_tiering.launch.served import build_or_installed, ready_made
    from ollama_tiering.launch.service_models import left_behind
    from ollama_tiering.launch.unharmed import unharmed
    from ollama_tiering.patchset.report import Report

    address = address_of(host)
    if detach and running(address) is None:  # else it is said below
        from ollama_tiering.launch.detached import begin

        end = f"{_STOP}{stopped_by(address)}"
        context.exit(
            begin(_words(context), address, lambda text: click.echo(text.replace(_CTRL_C, end)))
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a build ends with us
    report = Report(quiet=quiet, verbose=verbose)
    flags = {"sidecar.socket": socket, "server.cpu_attention": cpu_attention}
    request, unreadable = _request(address, models.absolute() if models else None, flags)
    try:
        with hold(address) as held, ExitStack() as uses:
            launching.require_free(address)
            held.write(launching.first_record(request))
            if unreadable is None and (installed := _chosen(ollama, build, report)):
                binary, why = program_for(installed, report, uses)
                request = replace(request, llama_server=True, installed=installed, why_stock=why)
            else:
                served = (
                    ready_made(ollama, build, unreadable)
                    if unreadable
                    else build_or_installed(build, report)
                )
                binary, request = served.binary, _serving(request, served)
            with unharmed(report.warn, "models of another place are not looked for"):
                if models is None and (said := left_behind(request.models_dir)):
                    report.warn(said)
            page = _page(web, request, report, uses) if web else None
            launching.run(
                *(request, binary, held, report),
                lambda record: _ready(request, record, report, page),
            )
    except AlreadyUp as already:
        say_already(request, already.record)


def _request(
    address: Address, models: Path | None, flags: dict[str, Any]
) -> tuple[UpRequest, ConfigError | None]:
    """Bad settings in the file or in a variable cost the cache, not the server. A bad flag is a
    ConfigError.
    """
    from ollama_tiering import config
    from ollama_tiering.errors import ConfigError
    from ollama_tiering.launch.up import UpRequest
    from ollama_tiering.sidecar.engine.listener import place

    try:
        settings = config.load(flags)
    except ConfigError as error:
        _require_good_flags(flags)
        attention = flags["server.cpu_attention"]
        return UpRequest(address, config.default_socket_path(), models, attention), error
    attention, engine = settings.server.cpu_attention, place(settings.sidecar)
    socket = settings.sidecar.socket_path
    request = UpRequest(
        *(address, socket, models, attention),
        engine_socket=engine,
        recheck_seconds=settings.server.recheck_hours * 3600,
        idle_seconds=settings.server.idle_minutes * 60,
    )
    return request, None


def _page(listen: str, request: UpRequest, report: Report, uses: ExitStack) -> Child | None:
    """The process of the page, until `uses` ends. Whatever is wrong with it, Ollama serves."""
    from ollama_tiering.config import ENV_MODELS
    from ollama_tiering.launch.page_beside import page_beside
    from ollama_tiering.launch.unharmed import unharmed

    with unharmed(report.warn, "no page is served"):
        env = {ENV_MODELS: str(request.models)} if request.models else {}
        return uses.enter_context(page_beside(listen, request.socket, env))
    return None


def _serving(request: UpRequest, served: Served) -> UpRequest:
    """As stock, where there is a reason."""
    if not served.why_stock:
        return request
    return replace(
        request,
        cpu_attention=None if served.stands_in else request.cpu_attention,
        why_stock=served.why_stock,
        llama_server=served.installed is not None,
        installed=served.installed,
    )


def _chosen(ollama: str | None, build: dict[str, Any], report: Report) -> InstalledOllama | None:
    """As `choose.chosen`, whose errors say what a person has to do. Any other failure is not to
    cost the server: an installed Ollama that can be found serves.
    """
    from ollama_tiering.errors import TieringError
    from ollama_tiering.patchset.llama_server import choose, installation

    try:
        return choose.chosen(ollama, build)
    except TieringError:
        raise
    except Exception as error:
        found = installation.usual() if ollama is None else None
        if found is None:
            raise
        report.warn(f"{found.program} is served: {type(error).__name__}: {error}")
        return found


def _require_good_flags(flags: dict[str, Any]) -> None:
    from ollama_tiering.config import SETTINGS
    from ollama_tiering.errors import ConfigError

    for setting in SETTINGS:
        if (value := flags.get(setting.key)) is not None:
            try:
                setting.parse(value)
            except (ValueError, TypeError) as error:
                name = setting.key.partition(".")[2].replace("_", "-")
                raise ConfigError(f"flag --{name}: {error}", hint="give another value") from None


def _words(context: click.Context) -> list[str]:
    """The options as they were given, for a process in the background."""
    words: list[str] = []
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "")
        if given is not ParameterSource.COMMANDLINE or option.name == "detach":
            continue
        words.append(max(option.opts, key=len))
        if not (isinstance(option, click.Option) and option.is_flag):
            words.append(str(context.params[option.name or ""]))
    return words


def _ready(
    request: UpRequest, record: RunningUp, report: Report, page: Child | None = None
) -> None:
    from ollama_tiering.cli.already_up import logs_of
    from ollama_tiering.launch.address import Address
    from ollama_tiering.launch.names import first_names
    from ollama_tiering.launch.ollama import Api
    from ollama_tiering.launch.page_beside import address_of_page
    from ollama_tiering.launch.tiers_told import tiers_told
    from ollama_tiering.launch.unharmed import unharmed
    from ollama_tiering.patchset.llama_server import link_tree
    from ollama_tiering.warm import at_start

    where = "" if request.address == Address() else f"OLLAMA_HOST={request.address} "
    click.echo(f"ready: Ollama {Api(request.address).version()} at {request.address.url}")
    if not report.quiet:
        if tree := link_tree.of_binary(Path(record.binary)):
            click.echo(f"  runs  {tree.engine}")
        if not request.why_stock and (tiers := tiers_told(request.socket)):
            click.echo(f"  keeps {tiers}")
        own = set(first_names([request.models_dir]).values())
        model = _EXAMPLE_MODEL if _EXAMPLE_MODEL in own else min(own, default=_EXAMPLE_MODEL)
        click.echo(f"  use   {where}{record.binary} run {model}   (or any client)")
        click.echo("  look  tiering status")
        if page:
            with unharmed(report.warn, "no page is served"):
                click.echo(f"  page  {address_of_page(page)}")
        click.echo(f"  logs  {'  '.join(logs_of(record))}")
        click.echo(_CTRL_C)
    if not request.why_stock:
        at_start.begin(request.address, request.socket, report.say, report.warn)
