"""The patched server in the place of the one that `ollama.service` starts: whether that can be, and
what of the unit decides about our part. The unit is read only.

What would keep Ollama from starting is refused before anything is written, and so is what would
change another thing of theirs than the server.
"""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering import config
from ollama_tiering.errors import ServiceError, UnsupportedUpstream, UsageError
from ollama_tiering.launch.address import Address, parse_address
from ollama_tiering.launch.service_unit import DROP_IN, UNIT_NAME
from ollama_tiering.patchset.llama_server import installation
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.systemd import access, stock_unit
from ollama_tiering.systemd.manifest import file_digest
from ollama_tiering.systemd.stock_unit import StockUnit
from ollama_tiering.systemd.trust import foreign

if TYPE_CHECKING:
    from ollama_tiering.systemd.plan import InstallRequest
    from ollama_tiering.systemd.units import Service

_BESIDE: Final = "or install beside it, without --replace"
# Under these another program than theirs may not be there, or not be started.
_OTHER_ROOT: Final = ("RootDirectory", "RootImage", "NoExecPaths")


def unit_of(request: InstallRequest) -> StockUnit:
    """What is to be replaced. UsageError if there is nothing, or it cannot be replaced."""
    unit = stock_unit.read(request.root, request.unit_directory, user_mode=request.user_mode)
    if unit is None:
        raise UsageError(
            f"there is no {UNIT_NAME} here in whose place the patched Ollama could be",
            hint="install it without --replace: as a unit of its own; or install Ollama first",
        )
    _require_startable(unit, request)
    _require_one_command(unit, request.unit_directory)
    return unit


def _require_startable(unit: StockUnit, request: InstallRequest) -> None:
    if stock_unit.is_masked(unit, request.root):
        raise UsageError(f"{unit.file} is masked", hint="sudo systemctl unmask ollama, then again")
    for key in _OTHER_ROOT:
        if said := unit.value(key):
            raise UsageError(
                f"{UNIT_NAME} has {key}={said}, so the patched Ollama may not start there",
                hint=f"take that away (systemctl edit ollama), {_BESIDE}",
            )
    if unit.is_on("DynamicUser"):
        raise UsageError(
            f"{UNIT_NAME} has DynamicUser=, and the sidecar must run as the same user",
            hint=f"give it a user of its own (systemctl edit ollama), {_BESIDE}",
        )
    families = " ".join(one.value for one in unit.values("RestrictAddressFamilies"))
    if families and ("AF_UNIX" in families) == families.startswith("~"):
        raise UsageError(
            f"{UNIT_NAME} has RestrictAddressFamilies={families}, so it cannot reach the sidecar",
            hint=f"add AF_UNIX (systemctl edit ollama), {_BESIDE}",
        )


def _require_one_command(unit: StockUnit, own: Path) -> None:
    """Ours replaces `…/ollama serve` and nothing else, and is the one that counts."""
    for path in unit.drop_ins:
        if path.name == DROP_IN.name:
            raise ServiceError(
                f"{path} is somebody else's, and of two drop-ins of one name systemd reads one",
                hint="give it another name, then again",
            )
    later = [path for path in unit.drop_ins if path.name > DROP_IN.name]
    if after := [one.file for one in unit.settings if one.key == "ExecStart" and one.file in later]:
        raise UsageError(
            f"{after[0]} sets ExecStart=, and is read after {own / DROP_IN}",
            hint=f"give it a name that comes before, such as override.conf, {_BESIDE}",
        )
    if unit.program is None:
        commands = unit.values("ExecStart")
        what = f"{UNIT_NAME} has {len(commands)} commands"
        if len(commands) == 1:
            what = f"{commands[0].file} starts `{commands[0].value}`"
        raise UsageError(
            f"{what}, and not `/…/ollama serve` alone",
            hint=f"make that its command (systemctl edit ollama), {_BESIDE}",
        )


def adopted(request: InstallRequest, unit: StockUnit) -> InstallRequest:
    """Takes over what the unit says of user, models and address. UsageError where the request says
    another thing: they stay the unit's to say.
    """
    for name, given in (
        ("--host", request.address),
        ("--models", request.models),
        ("--run-as", request.run_as),
    ):
        if given:
            raise UsageError(
                f"{name} is for {UNIT_NAME} to say, in whose place the patched Ollama is",
                hint="set it there: systemctl edit ollama; or first: tiering systemd install "
                "--restore",
            )
    if request.binary is None:
        raise UsageError(
            f"the sidecar alone is not in the place of {UNIT_NAME}",
            hint="first: tiering systemd install --restore",
        )
    said = unit.environment
    models = said.get(config.ENV_MODELS)
    if not models and said.get("HOME"):
        models = f"{said['HOME']}/.ollama/models"
    try:
        address = parse_address(said.get("OLLAMA_HOST", ""))
    except UsageError:  # it is Ollama's to understand; here it is only said
        address = Address()
    return replace(
        request,
        run_as=None if request.user_mode else unit.value("User") or "root",
        models=Path(models) if models else None,
        address=address,
    )


def fitted(
    request: InstallRequest, service: Service, unit: StockUnit, account: pwd.struct_passwd | None
) -> tuple[Service, dict[str, str]]:
    """The service, which starts as stock what the unit starts; and that program with its SHA-256.
    UsageError where the patched server is not for it.
    """
    program = unit.program
    assert program is not None
    if service.tree:
        if os.path.realpath(program) != os.path.realpath(service.tree.stock):
            raise UsageError(
                f"{UNIT_NAME} starts {program}, and what is patched is {service.tree.stock}",
                hint=f"tiering patch --ollama {program.parent.parent}, then again",
            )
        service = replace(service, tree=replace(service.tree, stock=program))
        here = program
    else:
        here = request.root / program.relative_to("/") if request.root else program
        _require_no_newer(here, request)
    try:
        digest = file_digest(here)
    except OSError as error:
        raise UsageError(
            f"{UNIT_NAME} starts {program}, which cannot be read: {error.strerror}",
            hint="install Ollama again, then again",
        ) from None
    _require_visible(service, unit)
    if account and not request.root:
        cure = "install it where every user may read it (such as /opt)"
        there = [path for path in (request.place, *request.place.parents) if path.exists()]
        access.require_reachable(account, there[0], program, cure=cure)
    return service, {str(program): digest}


def _require_visible(service: Service, unit: StockUnit) -> None:
    """Their unit may hide homes from what it starts."""
    needed = [service.binary] if service.binary else []
    if service.tree:
        needed += [service.python, service.python.resolve(), service.package_parent]
    if unit.value("ProtectHome") == "tmpfs" or unit.is_on("ProtectHome"):
        for path in needed:
            if any(path.is_relative_to(home) for home in access.HOMES):
                raise UsageError(
                    f"{UNIT_NAME} has ProtectHome=, so it cannot see {path}",
                    hint="put the checkout (and --prefix) elsewhere, such as /opt, and run its "
                    "scripts/tiering systemd install",
                )


def _require_no_newer(program: Path, request: InstallRequest) -> None:
    """A server that is older than the installed one may not know its models. What others may change
    is not run, to be asked for its version, in the name of root.
    """
    assert request.binary is not None
    made_of = re.search(r"/builds/v(\d+(?:\.\d+)*)-", str(request.binary.resolve()))
    if installation.at(program):
        said = "of v0.30 or later"
    elif made_of and not request.root and not (os.geteuid() == 0 and foreign(program, (0,))):
        try:
            said = InstalledOllama(program, program.parent).version()
        except UnsupportedUpstream:
            return
        if _numbers(said) <= _numbers(made_of[1]):
            return
    else:
        return
    ours = f"v{made_of[1]}" if made_of else "of the Go engine"
    raise UsageError(
        f"{program}, which {UNIT_NAME} starts, is {said}, and the patched Ollama {ours}, older",
        hint="patch the installed one: tiering patch --ollama auto (from v0.30 on), or tiering "
        "patch --tag TAG",
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
