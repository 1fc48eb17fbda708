"""What `tiering systemd` prints, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ollama_tiering import config

if TYPE_CHECKING:
    from ollama_tiering.launch.address import Address
    from ollama_tiering.systemd.manager import Manager
    from ollama_tiering.systemd.plan import InstallPlan
    from ollama_tiering.systemd.service import InstallOutcome
    from ollama_tiering.systemd.units import Service


def changes(
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


def stock_digests(outcome: InstallOutcome) -> Iterator[str]:
    if not outcome.stock_before:
        yield f"{'stock':<12} no stock Ollama found"
    for path, before in outcome.stock_before.items():
        after = outcome.stock_after[path]
        yield f"{'stock':<12} {path}"
        yield f"{'':<12}   before {before}"
        yield f"{'':<12}   after  {after}"


def warnings(outcome: InstallOutcome) -> Iterator[str]:
    yield from filter(None, (outcome.rival, outcome.changeable, outcome.not_enabled))


def what_is_next(
    plan: InstallPlan, outcome: InstallOutcome, manager: Manager, *, now: bool
) -> Iterator[str]:
    from ollama_tiering.systemd import replaced
    from ollama_tiering.systemd.units import SIDECAR_UNIT

    service = plan.service
    if service.tree:
        yield f"{'tiered':<12} {service.tree.stock}, {service.tree.version}"
    if service.binary:
        yield f"{'server':<12} http://{service.address}"
    if service.page:
        yield f"{'page':<12} {service.page.url}/{_token_words(service, service.page)}"
    yield f"{'look':<12} tiering status --socket {_as_path(service.socket)}"
    if not now:
        start = manager.command("enable", "--now", *plan.units)
        command = replaced.commands(manager, SIDECAR_UNIT) if outcome.drop_in else start
        yield f"{'next':<12} {_where_one_runs(manager)}{command}"


def _token_words(service: Service, page: Address) -> str:
    """What follows the address of the page: its token, for whoever is not the services' user on
    this machine, as a browser never is of the system's.
    """
    from ollama_tiering.systemd.web_unit import TOKEN

    if service.system:
        return f"?token=TOKEN, and TOKEN is what this prints: sudo cat {TOKEN}"
    return "" if page.is_loopback else f"?token=TOKEN, and TOKEN lies in {config.state_dir()}"


def after_restore(manager: Manager) -> Iterator[str]:
    from ollama_tiering.systemd import replaced

    yield f"{'left':<12} the sidecar's service, unused; all goes with: tiering systemd uninstall"
    if not manager.present:
        yield f"{'next':<12} {_where_one_runs(manager)}{replaced.commands(manager)}"


def _where_one_runs(manager: Manager) -> str:
    return "" if manager.present or manager.other_root else "no systemd runs here; where it does: "


def _as_path(socket: Path) -> str:
    return str(socket).replace("%t", "$XDG_RUNTIME_DIR", 1)
