"""`tiering systemd`: the sidecar and the patched server as services, beside a stock Ollama."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath

if TYPE_CHECKING:
    from ollama_tiering.systemd.plan import InstallPlan, InstallRequest
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
@click.option("--now", is_flag=True, help="Also enable and start the services.")
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
    is written, and the exit code is 9.
    """
    from ollama_tiering.launch.address import parse_address
    from ollama_tiering.systemd import service
    from ollama_tiering.systemd.choice import usual_binary
    from ollama_tiering.systemd.manager import Manager

    request = _request(
        user_mode,
        prefix,
        root,
        run_as=run_as,
        binary=None if sidecar_only else binary.absolute() if binary else usual_binary(),
        models=models.absolute() if models else None,
        address=parse_address(host) if host else None,
    )
    manager = Manager(user_mode=user_mode, root=request.root)
    plan, outcome = service.install(request, manager, dry_run=dry_run, now=now)
    if as_json:
        click.echo(json.dumps(_document(outcome, dry_run) | {"socket": str(plan.service.socket)}))
        return
    lines = [
        *_changes(outcome, written="would write" if dry_run else "wrote"),
        *_stock(outcome),
        *(f"{'beware':<12} {why}" for why in (outcome.rival, outcome.changeable) if why),
        *_next(plan, manager, now=now),
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
        *_changes(outcome, removed="would remove" if dry_run else "removed"),
        *_stock(outcome),
        *(f"{'left':<12} {path}: stored blocks" for path in service.data_left(request)),
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
    if (tree := found["tree"]) is not None:
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


def _changes(
    outcome: InstallOutcome, *, written: str = "wrote", removed: str = "removed"
) -> Iterator[str]:
    changes = outcome.changes
    for word, paths in (
        (written, changes.written),
        ("unchanged", changes.same),
        (removed, [*changes.removed, *outcome.links_removed]),
        ("kept", [f"{path}: changed since it was written" for path in changes.kept]),
        ("was gone", changes.missing),
    ):
        for path in paths:
            yield f"{word:<12} {path}"


def _stock(outcome: InstallOutcome) -> Iterator[str]:
    if not outcome.stock_before:
        yield f"{'stock':<12} no stock Ollama found"
    for path, before in outcome.stock_before.items():
        after = outcome.stock_after[path]
        yield f"{'stock':<12} {path}"
        yield f"{'':<12}   before {before}"
        yield f"{'':<12}   after  {after}"


def _next(plan: InstallPlan, manager: Any, *, now: bool) -> Iterator[str]:
    service = plan.service
    if service.tree:
        yield f"{'tiered':<12} {service.tree.stock}, {service.tree.version}"
    if service.binary:
        yield f"{'server':<12} http://{service.address}"
    yield f"{'look':<12} tiering status --socket {_as_path(service.socket)}"
    if not now:
        yield f"{'next':<12} {manager.command('enable', '--now', *plan.units)}"


def _as_path(socket: Path) -> str:
    return str(socket).replace("%t", "$XDG_RUNTIME_DIR", 1)
