"""`tiering patch`: check, apply, revert, build and look at the patched Ollama; without a subcommand
all of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.config.words import flag_note
from ollama_tiering.errors import PatchConflict, UsageError
from ollama_tiering.patchset import apply as applying
from ollama_tiering.patchset import build as building
from ollama_tiering.patchset import gomod, manifest, tools, upstream
from ollama_tiering.patchset.binary import ensure_binary, ensure_source, options_of
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.tree import Tree

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_TAG = click.option("--tag", help="Version of Ollama." + flag_note("patch.tag"))
_TREE = click.option(
    "--tree", type=click.Path(path_type=Path), help="A plain source tree instead of our own."
)
_SOURCE = click.option(
    "--source",
    help="URL or local clone, where the version is not cached yet." + flag_note("patch.source"),
)
_UNTESTED = click.option(
    "--allow-untested", is_flag=True, help="Also on a tree that is not a supported version."
)
_CPU = click.option(
    "--cpu", type=click.Choice(["native", "variants"]), help="CPU code." + flag_note("patch.cpu")
)
_CUDA = click.option(
    "--cuda", type=click.Choice(["auto", "on", "off"]), help="GPU code." + flag_note("patch.cuda")
)
_ARCH = click.option("--cuda-arch", help="CUDA architectures for CMake, such as 90 or native.")
_JOBS = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    help="Parallel compilations.  [default: as many as there are cores]",
)
_QUIET = click.option("-q", "--quiet", is_flag=True, help="No progress.")
_VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Show each command.")


def _options(*options: Callable[..., Any]) -> Decorator:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_BUILD = _options(_TAG, _SOURCE, _CPU, _CUDA, _ARCH, _JOBS, _UNTESTED, _QUIET, _VERBOSE)


@click.group(invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@_BUILD
@click.pass_context
def patch(ctx: click.Context, /, **given: Any) -> None:
    """Check, apply, revert and build the patched Ollama.

    Without a subcommand: fetch if needed, apply, build. The last line on stdout is the path of the
    binary.
    """
    if ctx.invoked_subcommand is None:
        _build(**given)
    elif any(given.values()):
        raise UsageError(
            "options go after the subcommand", hint=f"tiering patch {ctx.invoked_subcommand} -h"
        )


@patch.command()
@_BUILD
@click.option("--stock", is_flag=True, help="Without the patch set, to compare with.")
@click.option("--go-tags", multiple=True, help="Go build tag; such a binary lies beside the other.")
def build(**given: Any) -> None:
    """Fetch if needed, apply and compile; prints the path of the binary last."""
    _build(**given)


@patch.command()
@_options(_TAG, _TREE, _UNTESTED)
@click.option(
    "--all-tags", is_flag=True, help="Every supported version that is in the source cache."
)
def check(tag: str | None, tree: Path | None, allow_untested: bool, all_tags: bool) -> None:
    """Would the patch set apply? Changes nothing.

    Without --tree this looks at the source cache, with it at that tree.
    """
    patchset, cache = manifest.load(), upstream.SourceCache()
    if tree is not None:
        found = applying.check(
            patchset,
            tree,
            tag=_tag_of(tag),
            allow_untested=allow_untested,
            cache=cache,
            go=_go(patchset, tree),
        )
        click.echo(f"{tree}: {found}, applies")
        return
    wanted = list(patchset.pins) if all_tags else [_tag_of(tag) or config.load().patch.tag]
    cached = [name for name in wanted if cache.has(name)]
    failed = []
    for name in cached:
        try:
            applying.check_tag(patchset, cache, name)
            click.echo(f"{name}: applies")
        except PatchConflict as error:
            failed.append(name)
            click.echo(f"{name}: {error}")
    if absent := [name for name in wanted if name not in cached]:
        click.echo(f"not in the source cache, not checked: {', '.join(absent)}", err=True)
    if failed:
        raise PatchConflict(
            f"the patch set does not apply to {', '.join(failed)}", hint="see patches/README.md"
        )
    if not cached:
        raise UsageError(
            "nothing to check",
            hint="run `tiering fetch --all-tags` or `tiering fetch --tag TAG` first",
        )


@patch.command()
@_options(_TAG, _TREE, _SOURCE, _CPU, _CUDA, _UNTESTED, _QUIET, _VERBOSE)
@click.option("--dry-run", is_flag=True, help="Say what would happen and change nothing.")
def apply(tree: Path | None, dry_run: bool, **given: Any) -> None:
    """Apply the patch set to a tree; all or nothing, again is a no-op. Prints the tree."""
    patchset, cache = manifest.load(), upstream.SourceCache()
    report = Report(quiet=given.pop("quiet"), verbose=given.pop("verbose"))
    if tree is None:
        source, options = options_of(**given)
        plan = building.plan(options)
        if dry_run:
            click.echo(f"would patch {plan.tree} ({_summary(patchset)})")
            return
        ensure_source(patchset, cache, source, options, report)
        building.prepare(plan, patchset, cache, report)
        click.echo(str(plan.tree))
        return
    tag, untested, go = _tag_of(given["tag"]), given["allow_untested"], _go(patchset, tree)
    if dry_run:
        found = applying.check(patchset, tree, tag=tag, allow_untested=untested, cache=cache, go=go)
        click.echo(f"would patch {tree}: {found} ({_summary(patchset)})")
        return
    touched = applying.apply(patchset, tree, tag=tag, allow_untested=untested, go=go, cache=cache)
    report.say(f"{len(touched)} files changed" if touched else "already applied, nothing to do")
    click.echo(str(tree))


@patch.command()
@_options(_TAG, _TREE, _CPU, _CUDA)
@click.option("--dry-run", is_flag=True, help="Say what would happen and change nothing.")
def revert(
    tag: str | None, tree: Path | None, cpu: str | None, cuda: str | None, dry_run: bool
) -> None:
    """Put upstream's own bytes back. Prints the tree."""
    root = tree or building.plan(options_of(tag=tag, cpu=cpu, cuda=cuda)[1]).tree
    if dry_run:
        record = Tree(root).record()
        count = len(record.changed) + len(record.added) if record else 0
        click.echo(f"would restore {count} files in {root}")
        return
    touched = applying.revert(root)
    click.echo(
        f"{len(touched)} files restored" if touched else "not patched, nothing to do", err=True
    )
    click.echo(str(root))


@patch.command()
@_options(_TREE)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def status(tree: Path | None, as_json: bool) -> None:
    """What is patched and built; without --tree all build trees of the cache."""
    patchset = manifest.load()
    roots = [tree] if tree else sorted((config.cache_dir() / "trees").glob("*/src"))
    built = set(building.built_binaries())
    rows = []
    for root in roots:
        row = applying.as_json(applying.status(patchset, root))
        binary = root / "ollama"
        rows.append(row | {"binary": str(binary) if binary in built else None})
    if as_json:
        summary = {
            "digest": patchset.digest,
            "hooks": len(patchset.hooks),
            "overlay_files": len(patchset.overlay),
        }
        click.echo(json.dumps({"patchset": summary, "trees": rows}, indent=1))
        return
    click.echo(f"patch set {patchset.digest[:12]}: {_summary(patchset)}")
    for row in rows:
        remark = row["detail"] or ", ".join(row["edited"])
        click.echo(
            f"{row['tree']}: {row['state']} {row['tag'] or ''}{f' ({remark})' if remark else ''}"
        )
        if row["binary"]:
            click.echo(f"  built: {row['binary']}")
    if not rows:
        click.echo("no build tree yet; `tiering patch` makes one")


def _build(*, quiet: bool, verbose: bool, **given: Any) -> None:
    click.echo(str(ensure_binary(Report(quiet=quiet, verbose=verbose), **given)))


def _go(patchset: manifest.Patchset, tree: Path) -> Path | None:
    """The Go that edits go.mod; none where nothing is to be edited or the tree has no go.mod."""
    go_mod = tree / gomod.GO_MOD
    if not patchset.go_requires or not go_mod.is_file():
        return None
    return tools.find_go(gomod.go_version_wanted(go_mod.read_bytes()), Report())


def _tag_of(tag: str | None) -> str | None:
    return upstream.normal_tag(tag) if tag else None


def _summary(patchset: manifest.Patchset) -> str:
    return f"{len(patchset.hooks)} hooks, {len(patchset.overlay)} overlay files"
