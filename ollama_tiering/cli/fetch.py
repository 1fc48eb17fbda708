"""`tiering fetch`: Ollama's source into the source cache."""

from __future__ import annotations

import json

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.config.words import flag_note
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset import manifest, upstream
from ollama_tiering.patchset.report import Report


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--tag",
    "tags",
    multiple=True,
    help="Version to fetch; may be given more than once." + flag_note("patch.tag"),
)
@click.option("--all-tags", is_flag=True, help="Every supported version.")
@click.option(
    "--source", help="URL, or path of any local clone of Ollama." + flag_note("patch.source")
)
@click.option(
    "--list", "only_list", is_flag=True, help="List supported versions and which are cached."
)
@click.option("--json", "as_json", is_flag=True, help="With --list: print JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show each command that runs.")
def fetch(
    tags: tuple[str, ...],
    all_tags: bool,
    source: str | None,
    only_list: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Fetch Ollama's source into the cache directory.

    Without --tag, the default version is fetched. A version that is cached is not fetched again,
    and patching it needs no network.
    """
    if all_tags and tags:
        raise UsageError("--tag and --all-tags exclude each other", hint="give one of them")
    patchset = manifest.load()
    cache = upstream.SourceCache()
    if only_list:
        _list(patchset, cache, as_json)
        return
    settings = config.load({"patch.source": source}).patch
    wanted = (
        list(patchset.pins)
        if all_tags
        else [upstream.normal_tag(t) for t in tags or (settings.tag,)]
    )
    report = Report(quiet=quiet, verbose=verbose)
    new = cache.fetch(wanted, settings.source, patchset, report)
    for tag in wanted:
        click.echo(f"{tag} {cache.commit(tag)} {'fetched' if tag in new else 'already cached'}")


def _list(patchset: manifest.Patchset, cache: upstream.SourceCache, as_json: bool) -> None:
    cached = set(cache.tags())
    if as_json:
        rows = {
            tag: {"commit": pin.commit, "cached": tag in cached}
            for tag, pin in patchset.pins.items()
        }
        click.echo(json.dumps(rows, indent=1))
        return
    for tag in patchset.pins:
        click.echo(f"{tag}{'  cached' if tag in cached else ''}")
