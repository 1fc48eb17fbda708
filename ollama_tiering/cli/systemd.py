"""`tiering systemd`: the sidecar and the patched server as services, beside a stock Ollama."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath, systemd_lines

if TYPE_CHECKING:
    from ollama_tiering.systemd.plan import InstallRequest
    from ollama_tiering.systemd.service import InstallOutcome

_PATH = NamedPath(path_type=Path)


def _place(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--root", type=_PATH, help="Install below this directory, as if it were /."),
        click.option(
            "--prefix",
            type=_PATH,
            help="Where to put the binary.  [default: /opt/ollama-tiering, with --user "
            "~/.local/lib/ollama-tiering]",
        ),
        click.option(
            "--user",
            "user_mode",
            is_flag=True,
            help="Use your own service manager, not the system's.",
        ),
    ):
        command = option(command)
    return command


@click.group(context_settings=CONTEXT_SETTINGS)
def systemd() -> None:
    """Install the sidecar and the patched Ollama as services of systemd.

    The binary and the unit of a stock Ollama are not touched. Their SHA-256 is shown before and
    after.
    """


@systemd.command()
@_place
@click.option(
    "--run-as",
    metavar="USER",
    help="User that runs both services.  [default: as before, else ollama]",
)
@click.option(
    "--binary", type=_PATH, help="The patched Ollama.  [default: the one that `tiering up` starts]"
)
@click.option(
    "--host",
    help="Where the server listens.  [default: as before, else 127.0.0.1:11434, or 11435 "
    "where ollama.service is installed]",
)
@click.option(
    "--models", type=_PATH, help="Directory of the models.  [default: as before, else Ollama's own]"
)
@click.option("--sidecar-only", is_flag=True, help="Install the sidecar only, and no server.")
@click.option(
    "--web",
    is_flag=False,
    flag_value="127.0.0.1:8434",
    metavar="[HOST:PORT]",
    help="Also serve the page of `tiering web` beside the sidecar, at 127.0.0.1:8434 or as said.  "
    "[default: as before]",
)
@click.option("--no-web", is_flag=True, help="Take the page away again.")
@click.option(
    "--replace",
    is_flag=True,
    help="Put the server in the place of that of ollama.service, by one drop-in of that unit.",
)
@click.option(
    "--restore",
    is_flag=True,
    help="Delete that drop-in, and have ollama.service start its own server again.",
)
@click.option(
    "--now", is_flag=True, help="Also enable and start the services, or restart ollama.service."
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
def install(
    user_mode: bool,
    prefix: Path | None,
    root: Path | None,
    run_as: str | None,
    binary: Path | None,
    host: str | None,
    models: Path | None,
    sidecar_only: bool,
    web: str | None,
    no_web: bool,
    replace: bool,
    restore: bool,
    now: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write units for the sidecar and the patched server, and copy what the server needs.

    Of an Ollama with the Go engine this is its binary. Of an installed one (v0.30 or later) it is
    its tree of links; at each start the service looks whether the tree is made for what is
    installed then, and if not, starts the installed Ollama as stock and says what to do.

    A second run replaces what the first one wrote, and keeps its user, host and models where it
    names no others. A file that somebody changed is never overwritten: the error names it, nothing
    is written, and the exit code is 9. For a user who may not write there it is 2.

    After an update of an installed Ollama (v0.30 or later) two more units have it patched, by
    `tiering patch --wait` as the services' user, and the next start of the service is tiered again.

    With --replace there is no unit of our own for the server: ollama.service starts it, whose unit,
    user, port, models and settings stay as they are. An update of Ollama leaves the drop-in where
    it is; one before v0.30 is served as stock until --replace is repeated.
    """
    from ollama_tiering.errors import UsageError
    from ollama_tiering.launch.address import PAGE_PORT, parse_address
    from ollama_tiering.systemd import service
    from ollama_tiering.systemd.choice import usual_binary
    from ollama_tiering.systemd.manager import Manager

    others = (replace, sidecar_only, run_as, binary, host, models, now, web, no_web)
    if restore and any(others):
        raise UsageError(
            "--restore installs nothing", hint="give it without the options of an install"
        )
    if restore:
        _restore(_request(user_mode, prefix, root), dry_run=dry_run, as_json=as_json)
        return
    if web and no_web:
        raise UsageError("--web and --no-web contradict each other", hint="give one of them")
    if not dry_run:  # said first: much else may be missing, too
        service.require_permitted(_request(user_mode, prefix, root))
    request = _request(
        user_mode,
        prefix,
        root,
        run_as=run_as,
        binary=None if sidecar_only else binary.absolute() if binary else usual_binary(),
        models=models.absolute() if models else None,
        address=parse_address(host) if host else None,
        replaces=replace,
        page=parse_address(web, PAGE_PORT) if web else None,
        without_page=no_web,
    )
    manager = Manager(user_mode=user_mode, root=request.root)
    plan, outcome = service.install(request, manager, dry_run=dry_run, now=now)
    if as_json:
        click.echo(json.dumps(_document(outcome, dry_run) | {"socket": str(plan.service.socket)}))
        return
    lines = [
        *systemd_lines.changes(outcome, written="would write" if dry_run else "wrote"),
        *systemd_lines.stock_digests(outcome),
        *(f"{'beware':<12} {why}" for why in systemd_lines.warnings(outcome)),
        *systemd_lines.what_is_next(plan, outcome, manager, now=now),
    ]
    click.echo("\n".join(lines))


def _restore(request: InstallRequest, *, dry_run: bool, as_json: bool) -> None:
    from ollama_tiering.systemd import service
    from ollama_tiering.systemd.manager import Manager

    manager = Manager(user_mode=request.user_mode, root=request.root)
    outcome = service.restore(request, manager, dry_run=dry_run)
    if as_json:
        empty: dict[str, Any] = {"installed": False}
        click.echo(json.dumps(_document(outcome, dry_run) if outcome else empty))
        return
    if outcome is None:
        click.echo("nothing is in the place of ollama.service")
        return
    lines = [
        *systemd_lines.changes(outcome, removed="would remove" if dry_run else "removed"),
        *systemd_lines.stock_digests(outcome),
        *systemd_lines.after_restore(manager),
    ]
    click.echo("\n".join(lines))


@systemd.command()
@_place
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def uninstall(
    user_mode: bool, prefix: Path | None, root: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Stop the services and remove exactly what install wrote.

    A file that somebody changed is kept and named. Stored blocks stay.
    """
    from ollama_tiering.systemd import service
    from ollama_tiering.systemd.manager import Manager

    request = _request(user_mode, prefix, root)
    manager = Manager(user_mode=user_mode, root=request.root)
    outcome = service.uninstall(request, manager, dry_run=dry_run)
    if as_json:
        empty: dict[str, Any] = {"installed": False}
        click.echo(json.dumps(_document(outcome, dry_run) if outcome else empty, indent=1))
        return
    if outcome is None:
        click.echo(f"nothing is installed in {request.place}")
        return
    lines = [
        *systemd_lines.changes(outcome, removed="would remove" if dry_run else "removed"),
        *systemd_lines.stock_digests(outcome),
        *(f"{'left':<12} {path}: stored blocks" for path in service.data_left(request)),
        *(f"{'left':<12} {path}: made after updates" for path in service.trees_left(request)),
    ]
    click.echo("\n".join(lines))


@systemd.command()
@_place
def status(user_mode: bool, prefix: Path | None, root: Path | None, as_json: bool) -> None:
    """Show what is installed, whether it was changed since, and what runs."""
    from ollama_tiering.systemd import service
    from ollama_tiering.systemd.manager import Manager

    request = _request(user_mode, prefix, root)
    manager = Manager(user_mode=user_mode, root=request.root)
    found: dict[str, Any] = service.look(request, manager)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    if not found["installed"]:
        click.echo(f"nothing is installed in {request.place}")
    for name, unit in found["units"].items():
        click.echo(f"{unit['state'] or 'not asked':<12} {name}")
    replaces = found["replaces"]
    if replaces:
        click.echo(f"{'in place of':<12} ollama.service, by {replaces['drop_in']}")
    if (tree := replaces or found["tree"]) is not None:
        stock = f"as stock: {tree['why_stock']}; {tree['cure']}"
        click.echo(f"{'next start':<12} {stock if tree['why_stock'] else 'tiered'}")
    if found["rival"]:
        click.echo(f"{'beware':<12} {found['rival']}")
    for path, state in found["files"].items():
        click.echo(f"{'as written' if state == 'same' else state:<12} {path}")
    for path, file in found["stock"].items():
        note = "" if file["as_installed"] else "  (was another when the services were installed)"
        click.echo(f"{'stock':<12} {path} sha256 {file['sha256']}{note}")


def _request(
    user_mode: bool, prefix: Path | None, root: Path | None, **more: Any
) -> InstallRequest:
    from ollama_tiering.systemd.plan import InstallRequest

    return InstallRequest(
        user_mode=user_mode,
        prefix=prefix.absolute() if prefix else None,
        root=root.absolute() if root else None,
        **more,
    )


def _document(outcome: InstallOutcome, dry_run: bool) -> dict[str, Any]:
    return {"installed": True, "dry_run": dry_run, **asdict(outcome)}
