"""`tiering warm`: a prompt is computed and stored before somebody waits for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.cli.reach import require_there
from ollama_tiering.config import format_size
from ollama_tiering.errors import TieringError, UsageError

if TYPE_CHECKING:
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.launch.ollama import Api
    from ollama_tiering.warm.prompt import WarmPrompt

_FILE = NamedPath(exists=True, dir_okay=False, allow_dash=True, path_type=Path)


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", default="")
@click.argument("file", required=False, type=_FILE)
@click.option("--system", type=_FILE, help="File with the system prompt.")
@click.option("--tools", type=_FILE, help="File with the tools: JSON, as in a request.")
@click.option(
    "--request",
    "request_",
    type=_FILE,
    help="File with the body of a request to /api/chat or /api/generate, as a client sends it.",
)
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the request, as the client sets it: num_ctx=8192.",
)
@click.option("--pin", is_flag=True, help="Pin what is stored: it is not evicted.")
@click.option(
    "--at-start",
    metavar="NAME",
    help="Keep the prompt under this name: `tiering up` computes it whenever it starts.",
)
@click.option("--kept", is_flag=True, help="Compute all prompts that are kept, as `up` does.")
@click.option("--list", "list_", is_flag=True, help="List the prompts that are kept.")
@click.option("--forget", metavar="NAME", help="Keep a prompt no longer.")
@click.option("--host", help="Where Ollama listens.  [env OLLAMA_HOST; default: 127.0.0.1:11434]")
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def warm(
    model: str,
    file: Path | None,
    system: Path | None,
    tools: Path | None,
    request_: Path | None,
    options: tuple[str, ...],
    pin: bool,
    at_start: str | None,
    kept: bool,
    list_: bool,
    forget: str | None,
    host: str | None,
    socket: Path | None,
    as_json: bool,
) -> None:
    """Compute a prompt and store it, so that the first request that begins with it need not wait.

    MODEL answers one token to what --system, --tools and FILE say (- is standard input), by its own
    template. A later request of any client finds what its prompt has in common with that: the
    system prompt and the tools, as a rule. The options must be those of the client, num_ctx first
    of all.

    With --at-start the prompt is kept, in a file of the state directory that only you can read, and
    `tiering up` computes it after each start. Models with sliding windows or recurrent layers go on
    only where a stored prompt ended, or at its checkpoints: give them the whole prompt.

    Exit code 1 if nothing of the prompt is stored.
    """
    from ollama_tiering.warm import at_start as keeping

    if list_ or forget is not None:
        _kept_names(list_, forget)
        return
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.launch.address import address_of
    from ollama_tiering.launch.ollama import Api

    prompts = [] if kept else [(at_start, _prompt(model, file, system, tools, request_, options))]
    if at_start is not None:
        keeping.keep(at_start, prompts[0][1])
    settings, broken = config.readable({"sidecar.socket": socket})
    require_there(settings.sidecar.socket_path)
    outcomes = []
    with SidecarAdministration(settings.sidecar.socket_path) as admin:
        api = Api(address_of(host))
        for name, prompt in [*prompts, *(keeping.kept() if kept else ())]:
            if isinstance(prompt, TieringError):
                raise prompt
            outcomes.append(_warmed(api, admin, name, prompt, pin=pin, as_json=as_json))
    if as_json:
        click.echo(json.dumps({"version": 1, "prompts": outcomes}, indent=1))
    if broken:
        raise broken
    if not outcomes:
        click.echo("no prompt is kept; keep one with --at-start NAME", err=True)
    if any(not outcome["stored_tokens"] for outcome in outcomes):
        raise TieringError(
            "nothing of the prompt is stored",
            hint="whether the model is tiered, and why not: tiering status",
        )


def _kept_names(list_: bool, forget: str | None) -> None:
    from ollama_tiering.warm import at_start as keeping

    if forget is not None:
        if not keeping.forget(forget):
            raise UsageError(f"no prompt is kept as {forget!r}", hint="tiering warm --list")
        click.echo(f"{forget} is kept no longer; what is stored of it stays")
    if list_:
        for name, prompt in keeping.kept():
            words = str(prompt) if isinstance(prompt, TieringError) else prompt.model
            click.echo(f"{name}  {words}")


def _prompt(
    model: str,
    file: Path | None,
    system: Path | None,
    tools: Path | None,
    request: Path | None,
    options: tuple[str, ...],
) -> WarmPrompt:
    from ollama_tiering.warm.prompt import of_parts, of_request, options_of

    parts = (file, system, tools)
    if [*parts, request].count(Path("-")) > 1:
        raise UsageError(
            "standard input can be one of the files only", hint="write the others to files"
        )
    if request is None:
        text, said, listed = (_text(part) for part in parts)
        return of_parts(model, system=said, tools=listed, text=text, options=options_of(options))
    if any(parts):
        raise UsageError(
            "--request is the whole prompt", hint="leave FILE, --system and --tools out"
        )
    return of_request(_text(request), model, options_of(options))


def _text(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return sys.stdin.read() if path == Path("-") else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint="name a text file in UTF-8"
        ) from None


def _warmed(
    api: Api,
    admin: SidecarAdministration,
    name: str | None,
    prompt: WarmPrompt,
    *,
    pin: bool,
    as_json: bool,
) -> dict[str, Any]:
    from ollama_tiering.launch.names import models_called
    from ollama_tiering.warm.compute import warm as compute

    warmed = compute(api, admin, prompt, models_called(prompt.model))
    pinned = admin.pin(warmed.chain.key.hex()) if pin and warmed.chain else None
    if not as_json:
        click.echo(f"{name or prompt.model}: {warmed.sentence}")
        if pinned:
            click.echo(f"  pinned: {format_size(pinned.pinned_bytes)} in all")
    return {
        "name": name,
        "model": prompt.model,
        "prompt_tokens": warmed.prompt_tokens,
        "stored_tokens": warmed.stored_tokens,
        "seconds": round(warmed.seconds, 3),
        "load_seconds": round(warmed.load_seconds, 3),
        "id": warmed.chain.key.hex() if warmed.chain else None,
        "pinned": pinned is not None,
    }
