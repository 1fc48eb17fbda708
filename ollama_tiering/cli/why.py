"""`tiering why`: where prompts part from what is stored, what it costs, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.cli.reach import require_there

if TYPE_CHECKING:
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.why.explain import Explained, Explainer


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", default="")
@click.option(
    "--last",
    type=click.IntRange(1, 256),
    default=100,
    show_default=True,
    help="How many of the last prompts that parted from what is stored to look at.",
)
@click.option("--no-text", is_flag=True, help="Show nothing of what the prompts say.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
def why(model: str, last: int, no_text: bool, as_json: bool, socket: Path | None) -> None:
    """Show why prompts were computed again although something like them is stored.

    What costs most comes first: the text on both sides with what differs between ⟪ and ⟫, the part
    of the prompt it lies in, what kind of change it is, and its cure where one is known. Cures come
    from a list that you can add to: a file recipes.toml beside config.toml. MODEL is a part of a
    model's name. The sidecar remembers the last 256 such prompts since its start, as tokens; text
    is made of them here and kept nowhere.
    """
    from ollama_tiering.cli import why_lines
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.why.explain import causes

    settings, broken = config.readable({"sidecar.socket": socket})
    path = settings.sidecar.socket_path
    require_there(path)
    with SidecarAdministration(path) as admin:
        explained = explained_by(admin, model, last)
        since = admin.stat().started_unix_seconds
    if as_json:
        document = why_lines.document(explained, since, text=not no_text)
        click.echo(json.dumps(document, indent=1))
    else:
        why_lines.show(causes(explained), explained, since, text=not no_text)
    if broken:
        raise broken


def explained_by(admin: SidecarAdministration, model: str, last: int) -> list[Explained]:
    """The last partings, the latest first. `model`: a part of a model's name; empty: every one."""
    from ollama_tiering.launch.names import models_called

    explainer = _explainer(admin)
    found = admin.partings(last=last, model=model, models=models_called(model))
    return [explainer.explained(message) for message in found]


def _explainer(admin: SidecarAdministration) -> Explainer:
    from ollama_tiering.cli.model_names import known_names
    from ollama_tiering.launch.loaded_model import model_files
    from ollama_tiering.launch.names import models_dirs
    from ollama_tiering.why.explain import Explainer
    from ollama_tiering.why.recipes import FILE_NAME, all_recipes
    from ollama_tiering.why.vocabularies import Vocabularies

    recipes = all_recipes(config.config_file().with_name(FILE_NAME))
    files = model_files(runner.pid for runner in admin.stat().runners)
    return Explainer(Vocabularies(models_dirs(), files), recipes, known_names())
