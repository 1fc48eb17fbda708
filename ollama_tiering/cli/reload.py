"""`tiering reload`: the running sidecar reads its settings again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.cli.reach import require_there
from ollama_tiering.cli.store_options import socket_in_force


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reload(socket: Path | None, as_json: bool) -> None:
    """Have the running sidecar read its settings again, as SIGHUP does.

    Budgets, watermarks, the log level, ttl_days and the rules for models change at once. Each other
    setting that has another value now is named: it needs a restart. The settings of the server and
    of builds are not the sidecar's; they count at the next start of the server.

    The exit code is 10 if the settings cannot be read: nothing has changed then, and the error says
    why. It is 9 if no sidecar runs.
    """
    from ollama_tiering.client.admin_client import SidecarAdministration

    path = socket_in_force(socket, None)
    require_there(path)
    with SidecarAdministration(path) as admin:
        answer = admin.reload()
    if as_json:
        found = {"changed": [*answer.changed], "needs_restart": [*answer.needs_restart]}
        click.echo(json.dumps(found))
        return
    for key in answer.changed:
        click.echo(f"{key} changed")
    for key in answer.needs_restart:
        click.echo(f"{key} needs a restart")
    if not answer.changed and not answer.needs_restart:
        click.echo("nothing has changed")
