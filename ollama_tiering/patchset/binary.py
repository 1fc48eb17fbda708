"""The patched binary: the one that the environment names, one that is built, or one built now."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ollama_tiering.config import PatchConfig, load
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset import manifest
from ollama_tiering.patchset.build import BuildOptions, build, built_binaries
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache, normal_tag

ENV_BINARY = "OLLAMA_TIERING_BINARY"


def named_binary() -> Path | None:
    """The patched Ollama that the environment names instead of our own build."""
    name = os.environ.get(ENV_BINARY)
    if not name:
        return None
    path = Path(name).expanduser().absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UsageError(f"{ENV_BINARY}={name} is not a program", hint=f"unset {ENV_BINARY}")
    return path


def ready_binary() -> Path | None:
    """The one that the environment names, else the newest of our own builds. Builds nothing."""
    return named_binary() or next(iter(built_binaries()), None)


def patched_binary(report: Report, **given: Any) -> Path:
    """The binary that the environment names, or our own build: fetched and built if needed."""
    if named := named_binary():
        report.say(f"using {named} ({ENV_BINARY})")
        return named
    return own_build(report, **given)


def own_build(report: Report, **given: Any) -> Path:
    """Unless told otherwise the kind that is built already, not a second one beside it."""
    settings = load().patch
    if not given.get("cpu") and settings.cpu == PatchConfig().cpu:
        tag = normal_tag(given.get("tag") or settings.tag)
        given["cpu"] = cpu_of_newest(tag, built_binaries())
    return ensure_binary(report, **given)


def cpu_of_newest(tag: str, binaries: Iterable[Path]) -> str | None:
    """Kind of CPU code of the newest build of a version, so that no second kind is built beside it.

    A binary lies in `<cache>/trees/<tag>-<cpu>[-cuda<major>]/src/`.
    """
    for binary in binaries:
        name = binary.parent.parent.name
        if name.startswith(f"{tag}-"):
            return name.removeprefix(f"{tag}-").partition("-")[0]
    return None


def ensure_binary(report: Report, **given: Any) -> Path:
    """Fetch if needed, apply, build; the binary. For commands that need a patched Ollama."""
    source, options = options_of(**given)
    patchset, cache = manifest.load(), SourceCache()
    ensure_source(patchset, cache, source, options, report)
    return build(options, patchset, cache, report)


def options_of(
    *,
    tag: str | None = None,
    source: str | None = None,
    cpu: str | None = None,
    cuda: str | None = None,
    cuda_arch: str | None = None,
    jobs: int | None = None,
    allow_untested: bool = False,
    stock: bool = False,
    go_tags: tuple[str, ...] = (),
) -> tuple[str, BuildOptions]:
    """Where the source comes from, and what to build: as asked for, else as the settings say."""
    flags = {
        "patch.tag": normal_tag(tag) if tag else None,
        "patch.source": source,
        "patch.cpu": cpu,
        "patch.cuda": cuda,
    }
    settings = load(flags).patch
    name = normal_tag(settings.tag)
    options = BuildOptions(
        name, settings.cpu, settings.cuda, cuda_arch, jobs, allow_untested, go_tags, stock
    )
    return settings.source, options


def ensure_source(
    patchset: manifest.Patchset,
    cache: SourceCache,
    source: str,
    options: BuildOptions,
    report: Report,
) -> None:
    """Fetches what is not cached yet."""
    if not options.allow_untested:
        patchset.require_pin(options.tag)
    if not cache.has(options.tag):
        cache.fetch([options.tag], source, patchset, report)
