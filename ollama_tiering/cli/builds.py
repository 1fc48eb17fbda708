"""`tiering builds`: which builds of an engine read what another one has stored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath, status_use
from ollama_tiering.cli.reach import require_there
from ollama_tiering.config import count
from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm

ADOPTED = "adopted"
_WORDS = {
    ADOPTED: "reads what {other} stored: {alike}",
    "different": "computes with other bits than {other}, whose blocks it never reads ({alike})",
    "revoked": "does not read what {other} stored: revoked ({alike})",
}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--revoke",
    metavar="MODEL",
    help="Let no build read what another one has stored of this model, from its next load on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
def builds(revoke: str | None, as_json: bool, socket: Path | None) -> None:
    """Show which builds of llama-server read what the build before an update has stored.

    They do where attention is exact, once both have computed enough of the same texts with the same
    bits; the setting sidecar.adopt turns it off. MODEL is a model's name. What was revoked stays
    so.
    """
    from ollama_tiering.client.admin_client import SidecarAdministration

    settings, broken = config.readable({"sidecar.socket": socket})
    path = settings.sidecar.socket_path
    require_there(path)
    with SidecarAdministration(path) as admin:
        answer = admin.stat()
        known = status_use.names(answer) | {one.model: one.name for one in answer.builds}
        pairs = list(answer.builds)
        if revoke is not None:
            models = _models_called(revoke, pairs, known)
            pairs = [one for model in models for one in admin.revoke_builds(model)]
    if as_json:
        click.echo(json.dumps({"version": 1, "builds": documents(pairs)}, indent=1))
    else:
        for pair in pairs:
            click.echo(line(pair, status_use.shown(pair.model, known)))
        if not pairs:
            click.echo("no build reads what another one has stored, and none was compared")
    if broken:
        raise broken


def _models_called(name: str, pairs: Iterable[adm.BuildPair], known: dict[str, str]) -> list[str]:
    """File names. UsageError if nothing of it is adopted."""
    held = {one.model for one in pairs if one.verdict == ADOPTED}
    found = [m for m in held if name in (m, known.get(m), status_use.shown(m, known))]
    if not found:
        raise UsageError(
            f"no build reads what another one has stored of {name}", hint="tiering builds"
        )
    return found


def line(pair: adm.BuildPair, name: str) -> str:
    alike = f"{count(pair.blocks, 'block')} compared and alike, up to token {pair.deepest_tokens:,}"
    words = _WORDS.get(pair.verdict, f"{pair.verdict} {{other}}")
    date = time.strftime("%Y-%m-%d", time.localtime(pair.unix_seconds))
    said = words.format(other=pair.other_engine, alike=alike)
    return f"{name}: {pair.engine} {said}, since {date}"


def documents(pairs: Iterable[adm.BuildPair]) -> list[dict[str, Any]]:
    return [
        {
            "model": one.model,
            "name": one.name,
            "engine": one.engine,
            "other_engine": one.other_engine,
            "blocks": one.blocks,
            "deepest_tokens": one.deepest_tokens,
            "unix_seconds": one.unix_seconds,
            "verdict": one.verdict,
        }
        for one in pairs
    ]
