"""Installs, examines and removes the services. The stock Ollama is hashed before and after each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import ResultDiffers
from ollama_tiering.launch.address import parse_address
from ollama_tiering.launch.service_unit import DROP_IN, UNIT_NAME
from ollama_tiering.patchset.llama_server.link_tree import RECORD
from ollama_tiering.store import ram_place
from ollama_tiering.systemd import access, replaced, rival, stock, tree_start
from ollama_tiering.systemd.as_before import as_before
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.manifest import Changes, Installed, InstallManifest
from ollama_tiering.systemd.plan import InstallPlan, InstallRequest, make_plan
from ollama_tiering.systemd.tree_start import TREE, WhyStock
from ollama_tiering.systemd.units import DIRECTORY, PATH_UNIT, SERVER_UNIT, SIDECAR_UNIT, WEB_UNIT


@dataclass(slots=True)
class InstallOutcome:
    changes: Changes
    units: list[str]
    stock_before: dict[str, str]
    stock_after: dict[str, str]
    stock_installed: dict[str, str] = field(default_factory=dict)
    links_removed: list[str] = field(default_factory=list)
    rival: str = ""  # what would take the server's port, and the cure
    changeable: str = ""  # who else could change what the services import, and the cure
    drop_in: str = ""  # ours, where the server is in the place of that of `ollama.service`
    not_enabled: str = ""  # that unit, and the cure


def install(
    request: InstallRequest, manager: Manager, *, dry_run: bool, now: bool
) -> tuple[InstallPlan, InstallOutcome]:
    request = as_before(request)
    plan = make_plan(request)
    installed = Installed(request.place, request.root)
    if not dry_run:
        require_permitted(request)
        if now:
            manager.require_present()
    old = installed.load() or InstallManifest()
    before = plan.stock
    units = [*plan.units, *plan.wanted]
    wanted = InstallManifest(units=units, stock=before | plan.replaced)
    left_out = [unit for unit in old.units if unit not in units]
    if left_out and not dry_run:  # must not go on without its file
        installed.install(plan.files, wanted, dry_run=True)
        manager.stop(left_out)
    changes = installed.install(plan.files, wanted, dry_run=dry_run)
    if not dry_run:
        manager.reload()
        if now and plan.replaced:
            replaced.start(request, manager, parse_address(plan.service.address))
        elif now:
            manager.start(plan.units)
        if now and plan.service.page:  # the sidecar's unit may have run already
            manager.restart([WEB_UNIT])
    after = stock.digests(request.root, request.unit_directory)
    _require_same(before, after)
    taken = rival.rival(request.root, request.unit_directory, plan.service.address)
    outcome = InstallOutcome(changes, list(plan.units), before, after, before)
    outcome.rival = taken if SERVER_UNIT in plan.units else ""
    outcome.changeable = plan.changeable
    if plan.replaced:
        outcome.drop_in = str(request.unit_directory / DROP_IN)
        outcome.not_enabled = _not_enabled(request)
    return plan, outcome


def require_permitted(request: InstallRequest) -> None:
    """UsageError if this user may not write where install writes."""
    at = Installed(request.place, request.root).at
    access.require_writable(at(request.unit_directory), at(request.place))


def _not_enabled(request: InstallRequest) -> str:
    folders = (*map(Path, stock.UNIT_DIRECTORIES), request.unit_directory)
    if any(rival.is_enabled(request.root, folder) for folder in folders):
        return ""
    command = (
        "systemctl --user enable ollama" if request.user_mode else "sudo systemctl enable ollama"
    )
    return f"{UNIT_NAME} is not enabled, so after the next restart nothing serves: {command}"


def restore(request: InstallRequest, manager: Manager, *, dry_run: bool) -> InstallOutcome | None:
    """Returns None if nothing is in the place of `ollama.service`."""
    if not dry_run:
        require_permitted(request)
    before = stock.digests(request.root, request.unit_directory)
    paths = replaced.restore(request, manager, dry_run=dry_run)
    after = stock.digests(request.root, request.unit_directory)
    _require_same(before, after)
    return InstallOutcome(Changes(removed=paths), [], before, after, before) if paths else None


def uninstall(request: InstallRequest, manager: Manager, *, dry_run: bool) -> InstallOutcome | None:
    """Returns None if nothing is installed there."""
    installed = Installed(request.place, request.root)
    manifest = installed.load()
    if manifest is None:
        return None
    before = stock.digests(request.root, request.unit_directory)
    given_back: list[str] = []
    if not dry_run:
        require_permitted(request)
        path = replaced.path_in(request, manifest)
        if path and installed.state(path, manifest.files[path]) != "changed":
            given_back = replaced.restore(request, manager, dry_run=False)  # before its server goes
        manager.stop(manifest.units)
    changes = installed.uninstall(dry_run=dry_run)
    changes.removed += given_back
    links = [] if dry_run else _remove_enablement(request, installed, manifest)
    if not dry_run:
        manager.reload()
    after = stock.digests(request.root, request.unit_directory)
    _require_same(before, after)
    return InstallOutcome(changes, manifest.units, before, after, manifest.stock, links)


def look(request: InstallRequest, manager: Manager) -> dict[str, object]:
    """What is installed, whether it is as it was written, and what runs."""
    installed = Installed(request.place, request.root)
    manifest = installed.load()
    found = manifest or InstallManifest()
    states = {path: installed.state(path, digest) for path, digest in found.files.items()}
    now = stock.digests(request.root, request.unit_directory)
    return {
        "installed": manifest is not None,
        "prefix": str(request.place),
        "tree": tree_of(request),
        "rival": rival_of(request),
        "replaces": replaced.found(request),
        "units": {
            unit: {
                "file": str(request.unit_directory / unit),
                "state": manager.state(unit),
            }
            for unit in (SIDECAR_UNIT, SERVER_UNIT, PATH_UNIT, WEB_UNIT)
            if unit in found.units
        },
        "files": states,
        "stock": {
            path: {"sha256": digest, "as_installed": found.stock.get(path, digest) == digest}
            for path, digest in now.items()
        },
    }


def tree_of(request: InstallRequest) -> dict[str, str] | None:
    """Whether the next start takes the tree (`why_stock` is empty); None if no tree is installed.
    Who may write to it, the service alone looks at, as its user.
    """
    manifest = Installed(request.place, request.root).load() or InstallManifest()
    if str(request.place / TREE / RECORD) not in manifest.files:
        return None
    why = tree_start.why_stock(request.place, None, request.cache, request.root)
    why = why or WhyStock("", "")
    return {"why_stock": why.reason, "cure": why.cure}


def rival_of(request: InstallRequest) -> str:
    """What would take the port of the server that is installed, and the cure; empty if nothing."""
    unit = request.unit_directory / SERVER_UNIT
    address = rival.address_in(Installed(request.place, request.root).at(unit))
    return rival.rival(request.root, request.unit_directory, address) if address else ""


def _remove_enablement(
    request: InstallRequest, installed: Installed, manifest: InstallManifest
) -> list[str]:
    """Removes links that `systemctl enable` made and that now lead nowhere. A running manager has
    removed them itself.
    """
    removed = []
    directory = installed.at(request.unit_directory)
    for wants in sorted(directory.glob("*.wants")):
        for unit in manifest.units:
            if (wants / unit).is_symlink() and not (directory / unit).exists():
                (wants / unit).unlink()
                removed.append(str(request.unit_directory / wants.name / unit))
    return removed


def _require_same(before: dict[str, str], after: dict[str, str]) -> None:
    changed = sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )
    if changed:
        raise ResultDiffers(
            f"files of the stock Ollama changed meanwhile: {', '.join(changed)}",
            hint="install and uninstall do not write them: see who did",
        )


def data_left(request: InstallRequest) -> list[Path]:
    """Says where blocks stay after an uninstall, for a person to remove: places that are there, on
    the machine that it is for.
    """
    if request.user_mode:
        named = [config.readable()[0].sidecar.local_dir, config.default_local_dir()]
        named += filter(None, [ram_place.recorded()])
        return [path for path in dict.fromkeys(named) if path.is_dir()]
    at = Installed(request.place, request.root).at
    named = [at(Path("/var/lib") / DIRECTORY)]
    named += sorted(at(ram_place.SHARED_MEMORY).glob(f"{config.APP_NAME}-*"))
    root = request.root or Path("/")
    return [Path("/") / path.relative_to(root) for path in named if path.is_dir()]


def trees_left(request: InstallRequest) -> list[Path]:
    """The system's caches of trees that were made after updates, each of a user; a user's own has
    more in it.
    """
    if request.user_mode:
        return []
    place = request.cache.parent
    here = Installed(request.place, request.root).at(place)
    return [place / path.name for path in sorted(here.glob(f"{DIRECTORY}*")) if path.is_dir()]
