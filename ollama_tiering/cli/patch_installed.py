"""`tiering patch` for an installed Ollama, from v0.30 on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ollama_tiering import config
from ollama_tiering.errors import TieringError, plain
from ollama_tiering.launch import tree_upkeep
from ollama_tiering.launch.after_update import AfterUpdate
from ollama_tiering.launch.llama_up import make_tree, remove_trees
from ollama_tiering.launch.unharmed import in_one_line
from ollama_tiering.patchset.binary import named_binary
from ollama_tiering.patchset.llama_server import built, choose, installation
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report


def patch_installed(
    installed: InstalledOllama,
    source: str | None,
    given: dict[str, Any],
    report: Report,
) -> Path:
    request = BuildRequest(source, given["jobs"])
    tree = make_tree(installed, request, report)
    tree_upkeep.remove_superseded(tree, report)
    return tree.binary


def patch_after_update(
    named: str | None,
    go_options: dict[str, Any],
    source: str | None,
    given: dict[str, Any],
    report: Report,
) -> Path:
    """Once an installer is done. What goes wrong is one line, for a journal."""
    choose.require_one_engine(choose.AUTO, go_options)
    waiting = AfterUpdate(
        lambda: choose.chosen(named, go_options),
        report,
        tell=lambda text: click.echo(plain(text), err=True),
    )
    try:
        tree = waiting.tree(BuildRequest(source, given["jobs"]))
    except TieringError as error:
        raise type(error)(in_one_line(error)) from None
    tree_upkeep.remove_superseded(tree, report)
    return tree.binary


def row_of(tree: LinkTree) -> dict[str, Any]:
    found = installation.at(Path(tree.program))
    state = "gone" if found is None else "patched" if tree.fits(found) else "changed since"
    return {
        "installed": tree.program,
        "state": state,
        "version": tree.version,
        "llama_cpp": tree.pin,
        "engine": tree.engine,
        "cpu_attention": tree.attention_here,
        "binary": str(tree.binary),
    }


def means_installed() -> bool:
    """Whether `tiering patch` and `tiering up` without options mean an installed Ollama that was
    patched before.
    """
    by_setting = config.load().patch.tag != config.PatchConfig().tag
    return bool(built.trees()) and not by_setting and not named_binary()


def revert_installed(ollama: str, dry_run: bool) -> None:
    found = built.trees_of(ollama)
    folders = [*(tree.folder for tree in found), *tree_upkeep.rest_without(found)]
    if not dry_run:
        report = Report()
        remove_trees(found, report)
        tree_upkeep.remove_rest(report)
    for folder in folders:
        done = "would remove" if dry_run else "in use      " if folder.exists() else "removed"
        click.echo(plain(f"{done} {folder}"))
    if not folders:
        click.echo("no installed Ollama is patched, nothing to do", err=True)
