"""The patched binary: the one that the environment names, one that was built before, or one built
now.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ollama_tiering.config import PatchConfig, expanded, load
from ollama_tiering.errors import BuildError, TieringError, UsageError
from ollama_tiering.patchset import failure, finished, gpu_libraries, manifest
from ollama_tiering.patchset.build import build, built_binaries
from ollama_tiering.patchset.plan import BuildOptions
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache, normal_tag

ENV_BINARY = "OLLAMA_TIERING_BINARY"
_CPU_KINDS = ("native", "variants")


def named_binary() -> Path | None:
    """The patched Ollama that the environment names instead of our own build."""
    name = os.environ.get(ENV_BINARY)
    if not name:
        return None
    path = expanded(name).absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UsageError(f"{ENV_BINARY}={name} is not a program", hint=f"unset {ENV_BINARY}")
    return finished.hold(path)


def ready_binary() -> Path | None:
    """The binary that the environment names, else the newest of our own builds. Builds nothing."""
    return named_binary() or next(map(finished.hold, built_binaries()), None)


def ready_build(patch: PatchConfig) -> Path | None:
    """The newest of our own builds that is what these settings ask for. Builds nothing."""
    usual = PatchConfig()
    for binary in built_binaries():
        kinds = _kinds(binary, normal_tag(patch.tag))
        if not kinds:
            continue
        its_cuda = next((kind for kind in kinds if kind.startswith("cuda")), "off")
        if patch.cpu not in (usual.cpu, kinds[0]) or not _is_cuda(patch.cuda, its_cuda, binary):
            continue
        return finished.hold(binary)
    return None


def _kinds(binary: Path, tag: str) -> list[str]:
    """`native`, `cuda12`: of a build of that version; none of one that only begins so, as
    v0.16.3-rc1 does.
    """
    before, _, kinds = binary.parent.parent.name.partition(f"{tag}-")
    found = kinds.split("-") if not before else []
    return found if found and found[0] in _CPU_KINDS else []


def _is_cuda(wanted: str, kind: str, binary: Path) -> bool:
    """Whether a build of that kind is what `--gpu` names."""
    word, _, place = wanted.partition("=")
    if place:
        record = gpu_libraries.of_stock(binary)
        return str(expanded(place).absolute()) in (record.get("place"), record.get("root"))
    if word == "stock":
        return kind == "cudastock"
    if word == "on":
        return kind not in ("off", "cudastock")
    return word == "auto" or kind == word


def patched_binary(report: Report, **given: Any) -> Path:
    """The binary that the environment names, or our own build: fetched and built if needed."""
    if named := named_binary():
        report.say(f"using {named} ({ENV_BINARY})")
        return named
    return own_build(report, **given)


def own_build(report: Report, **given: Any) -> Path:
    """Unless told otherwise, this builds the kind that was built before, and not a second one
    beside it. What does not compile for this processor is built for every one.
    """
    settings, usual = load().patch, PatchConfig()
    tag = normal_tag(given.get("tag") or settings.tag)
    if not given.get("cpu") and settings.cpu == usual.cpu:
        given["cpu"] = cpu_of_newest(tag, built_binaries())
    if not given.get("cuda") and settings.cuda == usual.cuda:
        given["cuda"] = stock_of_newest(tag, built_binaries())
    try:
        return ensure_binary(report, **given)
    except failure.DoesNotCompile as error:
        if options_of(**given)[1].cpu != "native":
            raise
        report.warn(
            f"the build for this processor failed ({failure.first_error(error)}); building for "
            "every processor instead (--cpu variants)"
        )
        return _variants_instead(report, given, error)


def _variants_instead(report: Report, given: dict[str, Any], error: BuildError) -> Path:
    """What went wrong first is what a person has to see where this fails, too."""
    try:
        return ensure_binary(report, **given | {"cpu": "variants"})
    except TieringError as second:
        report.warn(f"that failed, too: {second.message.splitlines()[0]}")
        raise error from None


def cpu_of_newest(tag: str, binaries: Iterable[Path]) -> str | None:
    """Kind of CPU code of a version's newest build, so that no second kind is built beside it.

    A binary lies in `<cache>/builds/<tag>-<cpu>[-cuda<major>]/<digest>/`.
    """
    for binary in binaries:
        if kinds := _kinds(binary, tag):
            return kinds[0]
    return None


def stock_of_newest(tag: str, binaries: Iterable[Path]) -> str | None:
    """`stock=PLACE` where the newest build of a version has the GPU libraries of the Ollama there;
    of an archive that is gone, of what was unpacked.
    """
    for binary in binaries:
        if _kinds(binary, tag):
            record = gpu_libraries.of_stock(binary)
            places = (record[key] for key in ("place", "root") if key in record)
            return next((f"stock={place}" for place in places if Path(place).exists()), None)
    return None


def ensure_binary(report: Report, **given: Any) -> Path:
    """Fetches if needed, applies and builds; returns the binary. For commands that need a patched
    Ollama.
    """
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
    """The source to fetch from and what to build: as given, else as the settings say."""
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
