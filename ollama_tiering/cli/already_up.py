"""What a second `tiering up` for a port says about the one that runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.address import Address, beside
from ollama_tiering.launch.running_up import RunningUp
from ollama_tiering.launch.service_unit import stop_command
from ollama_tiering.launch.up import UpRequest


def say_already(request: UpRequest, record: RunningUp | None) -> None:
    """ServiceError if other models were asked for than those that are served."""
    if record is None or not record.pid:
        click.echo(f"already starting: another `tiering up` has port {request.address.port}")
        return
    other = f"tiering up --host {beside(request.address)}"
    stop = stop_command(record.pid) or stopped_by(request.address)
    if request.models and record.models and not _same(request.models, Path(record.models)):
        raise ServiceError(
            f"a `tiering up` with other models is at {record.url} already (process {record.pid}): "
            f"{record.models}",
            hint=f"stop it ({stop}), or run beside it: {other} --models {request.models}",
        )
    state = "already up" if record.ready else "already starting"
    since = f" since {_moment(record.started)}" if record.started else ""
    click.echo(f"{state}: {record.url}{since} (process {record.pid})")
    elsewhere = f" --socket {record.socket}" if record.socket != str(request.socket) else ""
    lines = {
        "models": record.models,
        "logs": "  ".join(logs_of(record)),
        "look": f"tiering status{elsewhere}" if record.ready else "",
        "stop": f"Ctrl-C where it runs, or: {stop}",
        "other": f"a second server beside it: {other}",
    }
    for what, line in lines.items():
        if line:
            click.echo(f"  {what:<6}  {line}")


def stopped_by(address: Address) -> str:
    """The command that ends a `tiering up` there."""
    return "tiering stop" if address == Address() else f"tiering stop --host {address}"


def logs_of(record: RunningUp) -> list[str]:
    """The log files that exist."""
    named = filter(None, (record.server_log, record.sidecar_log))
    return [log for log in named if Path(log).is_file()]


def _same(one: Path, other: Path) -> bool:
    return one.absolute() == other or (one.exists() and other.exists() and one.samefile(other))


def _moment(unix_seconds: float) -> str:
    """The time of day; with the date if that is not today."""
    then = time.localtime(unix_seconds)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)
