"""An `ollama.service` in whose place the patched server is: what its next start does, and how it
gets its own server back.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering.errors import ServiceError, TieringError
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.ollama import Api
from ollama_tiering.launch.service_unit import DROP_IN, UNIT_NAME, replace_command
from ollama_tiering.patchset.llama_server.link_tree import RECORD
from ollama_tiering.systemd import in_place, stock_unit, tree_start
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.manifest import Installed, InstallManifest, file_digest
from ollama_tiering.systemd.stock_unit import StockUnit
from ollama_tiering.systemd.tree_start import TREE, WhyStock
from ollama_tiering.systemd.units import SIDECAR_UNIT, WANTED

if TYPE_CHECKING:
    from ollama_tiering.systemd.plan import InstallRequest

_START_SECONDS: Final = 180.0  # the sidecar's, that of a look at a tree, and the server's own
_ASK_SECONDS: Final = 0.5


def path_in(request: InstallRequest, manifest: InstallManifest) -> str:
    """Path of our drop-in, if install wrote one; else empty."""
    path = str(request.unit_directory / DROP_IN)
    return path if path in manifest.files else ""


def start(request: InstallRequest, manager: Manager, address: Address) -> None:
    """The service anew, with our sidecar, which it wants and which need not be enabled. If it does
    not serve then, it gets its own server back, and a ServiceError says so.
    """
    try:
        manager.restart([SIDECAR_UNIT, UNIT_NAME])
        why = _why_silent(manager, address)
    except ServiceError as error:
        why = error.message
    if why:
        restore(request, manager, dry_run=False)
        raise ServiceError(
            f"{why}; {UNIT_NAME} starts its own server again, as before",
            hint=f"see why: journalctl -u {UNIT_NAME} -u {SIDECAR_UNIT}",
        )


def _why_silent(manager: Manager, address: Address) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if Api(address).version() is not None:
            return ""
        if manager.state(UNIT_NAME) == "failed":
            return f"the patched Ollama failed to start as {UNIT_NAME}"
        time.sleep(_ASK_SECONDS)
    return f"the patched Ollama did not answer at {address} for {_START_SECONDS:.0f} s"


def restore(request: InstallRequest, manager: Manager, *, dry_run: bool) -> list[str]:
    """Deletes the drop-in, and the units that are for its tree alone, and has the service start its
    own server; what was deleted, the drop-in first. ServiceError where somebody changed that.
    """
    installed = Installed(request.place, request.root)
    manifest = installed.load() or InstallManifest()
    path = path_in(request, manifest)
    here = installed.at(request.unit_directory / DROP_IN)
    if not path and not stock_unit.is_ours(here):
        return []
    if not path or installed.state(path, manifest.files[path]) == "changed":
        why = "was changed since it was written" if path else f"is not known in {request.place}"
        raise ServiceError(
            f"{here} {why}",
            hint=f"see what is in it, then: rm {here}; {commands(manager)}",
        )
    units = [str(request.unit_directory / name) for name in WANTED]
    wanted = [one for one in units if installed.state(one, manifest.files.get(one, "")) == "same"]
    if not dry_run:
        installed.take_back(path)
        manager.reload()
        if manager.wanted(UNIT_NAME):
            manager.restart([UNIT_NAME])
        for unit in wanted:
            with contextlib.suppress(ServiceError):  # then it finds nothing to do
                manager.stop([Path(unit).name])
            installed.take_back(unit)
        if wanted:
            manager.reload()
    return [path, *wanted]


def commands(manager: Manager, *before: str) -> str:
    """What a person types where this does not do it."""
    return f"{manager.command('daemon-reload')}; {manager.command('restart', *before, UNIT_NAME)}"


def why_stock(request: InstallRequest) -> WhyStock | None:
    """Why the next start of the service is not of the patched server as it should be, and what to
    do; None if it is. Only for one that was replaced.
    """
    installed = Installed(request.place, request.root)
    manifest = installed.load() or InstallManifest()
    path = path_in(request, manifest)
    if (state := installed.state(path, manifest.files.get(path, ""))) != "same":
        return WhyStock(
            f"{path} is {state}, and not as it was installed",
            _again(request),
        )
    try:
        unit = in_place.unit_of(request)
    except TieringError as error:
        return WhyStock(error.message, error.hint or "")
    if why := _of_another_user(request, installed, unit):
        return why
    program = unit.program
    if program is None or str(program) not in manifest.stock:
        return WhyStock(f"{UNIT_NAME} starts {program} now", _again(request))
    if str(request.place / TREE / RECORD) in manifest.files:
        return tree_start.why_stock(request.place, None, request.cache, request.root)
    try:
        now = file_digest(installed.at(program))
    except OSError:
        now = ""
    if now != manifest.stock[str(program)]:
        return WhyStock(
            f"{program} was updated or changed since the patched one took its place",
            f"run `tiering patch`, then {_again(request)}",
        )
    return None


def _of_another_user(
    request: InstallRequest, installed: Installed, unit: StockUnit
) -> WhyStock | None:
    """The sidecar talks to its own user only."""
    if request.user_mode:
        return None
    sidecar = installed.at(request.unit_directory / SIDECAR_UNIT)
    try:
        found = re.search(r"^User=(\S+)$", sidecar.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return WhyStock(f"{sidecar} cannot be read", _again(request))
    user = unit.value("User") or "root"
    if found and found[1] != user:
        return WhyStock(
            f"{UNIT_NAME} runs as {user} now, and the sidecar as {found[1]}",
            _again(request),
        )
    return None


def _again(request: InstallRequest) -> str:
    return replace_command(system=not request.user_mode)


def found(request: InstallRequest) -> dict[str, str] | None:
    """Finds it for whoever shows it; None if nothing is replaced."""
    manifest = Installed(request.place, request.root).load() or InstallManifest()
    path = path_in(request, manifest)
    if not path:
        return None
    why = why_stock(request) or WhyStock("", "")
    return {"drop_in": path, "why_stock": why.reason, "cure": why.cure}
