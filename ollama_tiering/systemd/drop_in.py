"""The drop-in with which `ollama.service` starts the patched server. Pure: the plan has decided
everything.

It says nothing of port, user, models or variables that stock knows: the unit stays whose it is.
Like a server's unit of ours it starts the installed Ollama as stock whenever that is another one
than the patched one was made for.
"""

from __future__ import annotations

from collections.abc import Iterable

from ollama_tiering.config import ENV_SOCKET
from ollama_tiering.launch.service_unit import UNIT_NAME, replace_command
from ollama_tiering.systemd.stock_unit import HEAD, StockUnit
from ollama_tiering.systemd.units import (
    ALL_PROGRAMS,
    SIDECAR_UNIT,
    Service,
    argument,
    environment,
    go_variables,
    stock_start,
    tree_start,
    wants,
)


def restore_command(*, system: bool) -> str:
    """It takes the patched server out of there."""
    command = "sudo tiering systemd install" if system else "tiering systemd install --user"
    return f"{command} --restore"


def _go_script() -> str:
    """$1: the patched program, $2: the installed one, $3: the SHA-256 that this had, $4: a cure."""
    return "; ".join(
        (
            'if [ ! -x "$1" ]',
            'then why="$1 is gone or may not be executed"',
            f'elif [ "$({{ {ALL_PROGRAMS}; sha256sum < "$2"; }} 2>/dev/null)" != "$3  -" ]',
            'then why="$2 was updated or changed since the patched one took its place"',
            'else exec "$1" serve',
            "fi",
            "echo \"tiering: Ollama starts as stock: $why; run 'tiering patch', then '$4'\" >&2",
            stock_start("$2"),
        )
    )


def drop_in(service: Service, unit: StockUnit, program_digest: str) -> str:
    """Its text. `program_digest`: SHA-256 of the program that the unit itself starts."""
    lines = [
        f"{HEAD}; `{restore_command(system=service.system)}` deletes it.",
        "# Settings of your own belong into another one: systemctl edit ollama",
        "[Unit]",
        "# Stopped before the sidecar, which writes down what it stored; started without it too.",
        f"After={SIDECAR_UNIT}",
        f"Wants={SIDECAR_UNIT}",
        *wants(service),
        "",
        "[Service]",
        "ExecStart=",
        *_start(service, unit, program_digest),
    ]
    if not unit.value("SyslogIdentifier"):
        lines.append("SyslogIdentifier=ollama")
    if not unit.value("KillMode"):
        lines.append(
            "# Only the server is told to stop: it ends its runners, after they stored their K/V."
        )
        lines.append("KillMode=mixed")
    return "\n".join([*lines, ""])


def _start(service: Service, unit: StockUnit, program_digest: str) -> Iterable[str]:
    if service.tree:
        return tree_start(service, service.tree, UNIT_NAME)
    assert service.binary is not None
    assert unit.program is not None
    cure = replace_command(system=service.system)
    words = (_go_script(), UNIT_NAME, service.binary, unit.program, program_digest, cure)
    ours = go_variables(service)
    variables = {n: v for n, v in ours.items() if n == ENV_SOCKET or n not in unit.environment}
    return [
        "# The patched server, if it is made for what is installed now; else the installed one.",
        "ExecStart=/bin/sh -c " + " ".join(argument(word) for word in words),
        *environment(**variables),
    ]
