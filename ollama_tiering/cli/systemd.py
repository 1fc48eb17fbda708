"""`tiering systemd`: the sidecar and the patched server as services, beside a stock Ollama."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS

if TYPE_CHECKING:
    from ollama_tiering.systemd.plan import Plan, Request
    from ollama_tiering.systemd.service import Outcome

_PATH = click.Path(path_type=Path)


def _place(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Machine-readable."),
        click.option("--root", type=_PATH, help="Everything below DIR, as if it were /."),
        click.option(
            "--prefix",
            type=_PATH,
            help="Where the binary goes.  [default: /opt/ollama-tiering, with --user "
            "~/.local/lib/ollama-tiering]",
        ),
        click.option(
            "--user", "user_mode", is_flag=True, help="Your own service manager, not the system's."
        ),
    ):
        command = option(command)
    return command


@click.group(context_settings=CONTEXT_SETTINGS)
def systemd() -> None:
    """Install the sidecar and the patched Ollama as services of systemd.

    A stock Ollama's binary and unit are not touched; their hashes are shown before and after.
    """


@systemd.command()
@_place
@click.option("--run-as", metavar="USER", help="User of both services.  [default: ollama]")
@click.option("--binary", type=_PATH, help="The patched Ollama.  [default: the newest built]")
@click.option(
    "--host",
    help="Where it listens.  [default: 127.0.0.1:11434, or 11435 "
    "where ollama.service is installed]",
)
@click.option("--models", type=_PATH, help="Models directory.  [default: Ollama's own]")
@click.option("--sidecar-only", is_flag=True, help="No server, only the block store service.")
@click.option("--now", is_flag=True, help="Also enable and start them.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing.")
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
    """Write units for the sidecar and the patched server, and copy that server into its prefix.

    A second time it replaces what it wrote. A file that a person changed is never overwritten:
    exit code 9 names it, and nothing is written.
    """
    from ollama_tiering.launch.address import parse_address
    from ollama_tiering.systemd import service
    from ollama_tiering.systemd.manager import Manager

    request = _request(
        user_mode,
        prefix,
        root,
        run_as=run_as,
        binary=None if sidecar_only else binary.absolute() if binary else _newest_binary(),
        models=models.absolute() if models else None,
        address=parse_address(host) if host else None,
    )
    manager = Manager(user_mode=user_mode, root=request.root)
    plan, outcome = service.install(request, manager, dry_run=dry_run, now=now)
    if as_json:
        click.echo(json.dumps(_document(outcome, dry_run) | {"socket": str(plan.service.socket)}))
        return
    lines = [
        *_changes(outcome, dry_run, written="would write" if dry_run else "wrote"),
        *_stock(outcome),
        *_next(plan, manager, now=now),
    ]
    click.echo("\n".join(lines))


@systemd.command()
@_place
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
def uninstall(
    user_mode: bool, prefix: Path | None, root: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Stop the services and remove exactly what install wrote.

    A file that a person changed is kept and named. Stored blocks stay.
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
        *_changes(outcome, dry_run, removed="would remove" if dry_run else "removed"),
        *_stock(outcome),
        *(f"{'left':<12} {path}: stored blocks" for path in service.data_left(request)),
    ]
    click.echo("\n".join(lines))


@systemd.command()
@_place
def status(user_mode: bool, prefix: Path | None, root: Path | None, as_json: bool) -> None:
    """Show what is installed, whether it is as it was written, and what runs."""
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
    for path, state in found["files"].items():
        click.echo(f"{'as written' if state == 'same' else state:<12} {path}")
    for path, file in found["stock"].items():
        note = "" if file["as_installed"] else "  (was another when the services were installed)"
        click.echo(f"{'stock':<12} {path} sha256 {file['sha256']}{note}")


def _request(user_mode: bool, prefix: Path | None, root: Path | None, **more: Any) -> Request:
    from ollama_tiering.systemd.plan import Request

    return Request(
        user_mode=user_mode,
        prefix=prefix.absolute() if prefix else None,
        root=root.absolute() if root else None,
        **more,
    )


def _newest_binary() -> Path:
    from ollama_tiering.errors import UsageError
    from ollama_tiering.patchset.binary import ready_binary

    found = ready_binary()
    if found is None:
        raise UsageError(
            "no patched Ollama is built yet",
            hint="build one: tiering patch; or name one with --binary (with sudo: root has no "
            "builds of yours); or --sidecar-only",
        )
    return found


def _document(outcome: Outcome, dry_run: bool) -> dict[str, Any]:
    return {"installed": True, "dry_run": dry_run, **asdict(outcome)}


def _changes(
    outcome: Outcome, dry_run: bool, *, written: str = "wrote", removed: str = "removed"
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


def _stock(outcome: Outcome) -> Iterator[str]:
    if not outcome.stock_before:
        yield f"{'stock':<12} no stock Ollama found"
    for path, before in outcome.stock_before.items():
        after = outcome.stock_after[path]
        yield f"{'stock':<12} {path}"
        yield f"{'':<12}   before {before}"
        yield f"{'':<12}   after  {after}"


def _next(plan: Plan, manager: Any, *, now: bool) -> Iterator[str]:
    service = plan.service
    if service.binary:
        yield f"{'server':<12} http://{service.address}"
    yield f"{'look':<12} tiering status --socket {_as_path(service.socket)}"
    if not now:
        yield f"{'next':<12} {manager.command('enable', '--now', *plan.units)}"


def _as_path(socket: Path) -> str:
    return str(socket).replace("%t", "$XDG_RUNTIME_DIR", 1)
