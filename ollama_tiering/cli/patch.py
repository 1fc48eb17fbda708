"""`tiering patch`: checks, applies, reverts, builds and shows the patched Ollama; without a
subcommand it does all that a build needs.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ollama_tiering import config
from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath, echo_path
from ollama_tiering.config.words import flag_note
from ollama_tiering.errors import MissingTool, PatchConflict, UsageError, plain
from ollama_tiering.patchset import apply as applying
from ollama_tiering.patchset import build as building
from ollama_tiering.patchset import (
    finished,
    gomod,
    gpu_libraries,
    manifest,
    stock,
    tools,
    upstream,
)
from ollama_tiering.patchset.binary import ensure_binary, ensure_source, options_of
from ollama_tiering.patchset.llama_server import built, choose
from ollama_tiering.patchset.plan import plan as plan_of
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.tree import Tree

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_TAG = click.option("--tag", help="Version of Ollama." + flag_note("patch.tag"))
_TREE = click.option(
    "--tree",
    type=NamedPath(path_type=Path),
    help="Use this plain source tree instead of the one in the cache.",
)
_SOURCE = click.option(
    "--source",
    help="URL or local clone to fetch from if the version is not cached yet."
    + flag_note("patch.source"),
)
_UNTESTED = click.option(
    "--allow-untested",
    is_flag=True,
    help="Try it even if the tree is not a supported version with the Go engine.",
)
_CPU = click.option(
    "--cpu",
    type=click.Choice(["native", "variants"]),
    help="Build for this processor only, or for every one." + flag_note("patch.cpu"),
)
_CUDA = click.option(
    "--gpu",
    "--cuda",
    "cuda",
    metavar="auto|on|off|stock|stock=PLACE",
    help="GPU code: CUDA's compiled (on), or all of an installed Ollama, a folder or a release "
    "archive." + flag_note("patch.cuda"),
)
_ARCH = click.option(
    "--cuda-arch",
    help="Compute capabilities: 8.6 or 86, several with commas, or native.  [default: the GPUs "
    "that are here]",
)
_JOBS = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    help="How many files to compile at a time.  [default: as many as there are cores]",
)
_OLLAMA = click.option(
    "--ollama",
    metavar="auto|DIR",
    help="Patch the installed Ollama (v0.30 or later), in the usual places or in DIR.",
)
_LLAMA_SOURCE = click.option(
    "--llama-source",
    metavar="PATH|URL",
    help="llama.cpp for the installed Ollama: a clone, a folder or a tar archive.  "
    "[default: fetched from GitHub]",
)
_WAIT = click.option(
    "--wait",
    is_flag=True,
    help="Patch the installed Ollama once none of its files has changed for 10 s: after an update.",
)
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
_VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Show each command that runs.")


def _options(*options: Callable[..., Any]) -> Decorator:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_BUILD = _options(
    *(_OLLAMA, _LLAMA_SOURCE, _WAIT, _TAG, _SOURCE, _CPU, _CUDA, _ARCH, _JOBS, _UNTESTED),
    *(_QUIET, _VERBOSE),
)


@click.group(invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@_BUILD
@click.pass_context
def patch(ctx: click.Context, /, **given: Any) -> None:
    """Patch Ollama's source and build it.

    Without a subcommand, this fetches the source if needed, applies the patch set and builds. The
    last line on stdout is the path of the binary.

    Ollama v0.30 and later run llama-server. Of these the installed one is patched: one library of
    it is compiled again, and a tree of links in the cache has that library and all else as
    installed. No installed file is written. It is the installed one if --ollama says so, or if
    one was patched before; or if it is there, no version with the Go engine was built before, and
    no option or setting names one.

    With --wait, an installed Ollama that is gone or not whole is waited for, for an hour. The exit
    code is 0 if its tree is made, or was there already; 9 if its files still change then. For all
    else it is that of the failure, with the cure on the same line.
    """
    if ctx.invoked_subcommand is None:
        _build(**given)
    elif any(given.values()):
        raise UsageError(
            "options go after the subcommand", hint=f"tiering patch {ctx.invoked_subcommand} -h"
        )


@patch.command()
@_BUILD
@click.option("--stock", is_flag=True, help="Build without the patch set, for comparisons.")
@click.option(
    "--go-tags", multiple=True, help="Go build tag; the binary gets a directory of its own."
)
def build(**given: Any) -> None:
    """Fetch the source if needed, apply the patch set and compile.

    The last line on stdout is the path of the binary.
    """
    _build(**given)


@patch.command()
@_options(_TAG, _TREE, _UNTESTED)
@click.option("--all-tags", is_flag=True, help="Check every supported version that is cached.")
def check(tag: str | None, tree: Path | None, allow_untested: bool, all_tags: bool) -> None:
    """Say whether the patch set would apply, and change nothing.

    This looks at the cached source or, with --tree, at that tree.
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
        click.echo(plain(f"{tree}: {found}, applies"))
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
    """Apply the patch set to a source tree, and print the tree's path.

    Either all of it is applied or nothing. If it is applied already, nothing happens.
    """
    patchset, cache = manifest.load(), upstream.SourceCache()
    report = Report(quiet=given.pop("quiet"), verbose=given.pop("verbose"))
    if tree is None:
        source, options = options_of(**given)
        plan = plan_of(options)
        if dry_run:
            click.echo(plain(f"would patch {plan.tree} ({_summary(patchset)})"))
            return
        ensure_source(patchset, cache, source, options, report)
        building.prepare(plan, patchset, cache, report)
        echo_path(plan.tree)
        return
    tag, untested, go = _tag_of(given["tag"]), given["allow_untested"], _go(patchset, tree)
    if dry_run:
        found = applying.check(patchset, tree, tag=tag, allow_untested=untested, cache=cache, go=go)
        click.echo(plain(f"would patch {tree}: {found} ({_summary(patchset)})"))
        return
    touched = applying.apply(patchset, tree, tag=tag, allow_untested=untested, go=go, cache=cache)
    report.say(
        f"{config.count(len(touched), 'file')} changed"
        if touched
        else "already applied, nothing to do"
    )
    echo_path(tree)


@patch.command()
@click.option(
    "--ollama",
    metavar="auto|DIR",
    help="Remove what was made for the Ollama in DIR, or for every installed one.",
)
@_options(_TAG, _TREE, _CPU, _CUDA)
@click.option("--dry-run", is_flag=True, help="Say what would happen and change nothing.")
def revert(
    ollama: str | None,
    tag: str | None,
    tree: Path | None,
    cpu: str | None,
    cuda: str | None,
    dry_run: bool,
) -> None:
    """Put upstream's own bytes back. Prints the tree.

    With --ollama, the trees of links of an installed Ollama (v0.30 or later) are removed from the
    cache, and with the last one llama.cpp's source. The installed one was never changed. Without
    an option, this is done for every installed one if `tiering up` would serve such a tree.
    """
    from ollama_tiering.cli.patch_installed import means_installed, revert_installed

    for_go = bool(tag or tree or cpu or cuda)
    if ollama and for_go:
        raise UsageError("--ollama goes alone here", hint="leave out the other options")
    if ollama or (not for_go and means_installed()):
        revert_installed(ollama or choose.AUTO, dry_run)
        return
    root = tree or plan_of(options_of(tag=tag, cpu=cpu, cuda=cuda)[1]).tree
    if dry_run:
        record = Tree(root).record()
        number = len(record.changed) + len(record.added) if record else 0
        click.echo(plain(f"would restore {config.count(number, 'file')} in {root}"))
        return
    touched = applying.revert(root)
    click.echo(
        f"{config.count(len(touched), 'file')} restored"
        if touched
        else "not patched, nothing to do",
        err=True,
    )
    echo_path(root)


@patch.command()
@_options(_TREE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(tree: Path | None, as_json: bool) -> None:
    """Show what is patched and built: in one tree, or in all trees of the cache, and for which
    installed Ollama.
    """
    from ollama_tiering.cli.patch_installed import row_of

    patchset = manifest.load()
    roots = [tree] if tree else sorted((config.cache_dir() / "trees").glob("*/src"))
    binaries = building.built_binaries()
    rows = []
    for root in roots:
        row = applying.as_json(applying.status(patchset, root))
        built_there = (str(one) for one in binaries if finished.source_of(one) == root)
        rows.append(row | {"binary": next(built_there, None)})
    installed = [] if tree else [row_of(one) for one in built.trees()]
    if as_json:
        summary = {
            "digest": patchset.digest,
            "hooks": len(patchset.hooks),
            "overlay_files": len(patchset.overlay),
        }
        document = {"patchset": summary, "trees": rows, "installed": installed}
        click.echo(json.dumps(document, indent=1))
        return
    click.echo(f"patch set {patchset.digest[:12]}: {_summary(patchset)}")
    for row in rows:
        remark = row["detail"] or ", ".join(row["edited"])
        said = f"{row['state']} {row['tag'] or ''}{f' ({remark})' if remark else ''}"
        click.echo(plain(f"{row['tree']}: {said}"))
        if row["binary"]:
            click.echo(plain(f"  built: {row['binary']}"))
    for one in installed:
        said = f"{one['state']} {one['version']} ({one['engine']})"
        click.echo(plain(f"{one['installed']}: {said}"))
        click.echo(plain(f"  attention on the CPU: {one['cpu_attention']}"))
        click.echo(plain(f"  built: {one['binary']}"))
    if not rows and not installed:
        click.echo("no build tree yet; `tiering patch` makes one")


def _build(
    *,
    quiet: bool,
    verbose: bool,
    ollama: str | None,
    llama_source: str | None,
    wait: bool,
    **given: Any,
) -> None:
    from ollama_tiering.kernels import images

    for number in (signal.SIGTERM, signal.SIGHUP):  # what it started, and began to write, ends too
        if signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores one
            signal.signal(number, signal.default_int_handler)
    report, arch = Report(quiet=quiet, verbose=verbose), given.get("cuda_arch")
    go = {name: value for name, value in given.items() if name != "jobs"}
    named = ollama or (choose.AUTO if llama_source else None)
    if wait:
        from ollama_tiering.cli.patch_installed import patch_after_update

        echo_path(patch_after_update(named, go, llama_source, given, report))
        return
    if installed := choose.chosen(named, go):
        from ollama_tiering.cli.patch_installed import patch_installed

        echo_path(patch_installed(installed, llama_source, given, report))
        return
    if str(given.get("cuda")).startswith(stock.OPTION):
        images.archs(arch)  # a word that is none is said before the build
    binary = ensure_binary(report, **given)
    if gpu_libraries.of_stock(binary):
        _make_images(binary, arch, report)
    echo_path(binary)


def _make_images(binary: Path, named: str | None, report: Report) -> None:
    """Our own kernels for the GPUs. What was not asked for by name may be missing: stock's kernels
    serve then, and no kernels of an earlier build, which the library may not take any more.
    """
    from ollama_tiering.kernels import images

    archs = images.archs(named)
    folder = binary.parent / gpu_libraries.BELOW / images.FOLDER
    if not archs:
        images.remove(folder)
        report.say("our own kernels: none compiled, for no GPU is here; --cuda-arch 8.6 names one")
        return
    said = ", ".join(f"{arch / 10}" for arch in archs)
    try:
        with report.stage(f"our own kernels, compute capability {said}") as detail:
            images.put(folder, archs, detail)
    except MissingTool as error:
        images.remove(folder)
        if named:
            raise
        report.warn(f"our own kernels are not compiled: {error.message}; {error.hint}")


def _go(patchset: manifest.Patchset, tree: Path) -> Path | None:
    """The Go that edits go.mod; None if nothing is to be edited or the tree has no go.mod."""
    go_mod = tree / gomod.GO_MOD
    if not patchset.go_requires or not go_mod.is_file():
        return None
    return tools.find_go(gomod.go_version_wanted(go_mod.read_bytes()), Report())


def _tag_of(tag: str | None) -> str | None:
    return upstream.normal_tag(tag) if tag else None


def _summary(patchset: manifest.Patchset) -> str:
    hooks = config.count(len(patchset.hooks), "hook")
    return f"{hooks}, {config.count(len(patchset.overlay), 'overlay file')}"
