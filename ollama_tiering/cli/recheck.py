"""`tiering recheck`: stored conversations are computed again, and every bit is compared."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath, status_use
from ollama_tiering.cli.reach import require_there
from ollama_tiering.config import count
from ollama_tiering.errors import ServiceError, StoreDamaged


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", default="")
@click.option(
    "--last",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="How many conversations of each model: those that were restored and used last.",
)
@click.option(
    "--tokens",
    type=click.IntRange(64, 1 << 20),
    default=4096,
    show_default=True,
    help="How many tokens of each, from its start.",
)
@click.option(
    "--sample",
    type=click.IntRange(0, 1000),
    default=0,
    help="Only so many of these, chosen at random.",
)
@click.option("--now", is_flag=True, help="At the usual priority; else only what nobody needs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
def recheck(
    model: str, last: int, tokens: int, sample: int, now: bool, as_json: bool, socket: Path | None
) -> None:
    """Compute stored conversations again, and compare every bit with what is stored.

    A second llama-server is started like the one that has the model loaded, at the lowest priority;
    it needs memory for a context of its own, the model's file is shared. Rows that differ are put
    aside and never restored. It works where the tokens alone decide the bits: llama-server with
    exact attention on a CPU. MODEL is a part of a model's name.

    Exit code 8 if anything was different, 9 if no model could be checked.
    """
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.recheck.run import Chosen, NotRechecked, Rechecked
    from ollama_tiering.recheck.run import recheck as run
    from ollama_tiering.recheck.twin import give_way

    settings, broken = config.readable({"sidecar.socket": socket})
    path = settings.sidecar.socket_path
    require_there(path)
    if not now:
        give_way()
    log = config.state_dir() / "logs" / "recheck.log"
    with SidecarAdministration(path) as admin:
        known = status_use.names(admin.stat())

        def wanted(file: str) -> bool:
            return model.casefold() in f"{file} {status_use.shown(file, known)}".casefold()

        say = (lambda text: click.echo(text, err=True)) if not as_json else (lambda text: None)
        results = list(run(admin, wanted, log, Chosen(last, tokens, sample), say))
    done = [one for one in results if isinstance(one, Rechecked)]
    left = [one for one in results if isinstance(one, NotRechecked)]
    if as_json:
        document = {
            "version": 1,
            "rechecked": [
                {
                    "model": one.model,
                    "asked_blocks": one.asked,
                    "blocks": one.blocks,
                    "different": one.different,
                }
                for one in done
            ],
            "left_out": [{"model": one.model, "reason": one.reason} for one in left],
        }
        click.echo(json.dumps(document, indent=1))
    else:
        for one in done:
            name = status_use.shown(one.model, known)
            said = f"{count(one.blocks, 'block')} computed again and alike"
            click.echo(f"{name}: {said}, {one.different:,} different")
        for other in left:
            click.echo(f"{status_use.shown(other.model, known)}: not checked: {other.reason}")
    if broken:
        raise broken
    if any(one.different for one in done):
        raise StoreDamaged(
            "rows were stored that are not what is computed; they are put aside",
            hint="rechecks.json in the state directory has their names; please report it",
        )
    if not done:
        raise ServiceError(
            "no model was checked" + ("" if left else ": none is loaded that is tiered"),
            hint="ask the model something first; tiering status shows what is loaded",
        )
