"""From a tag to a patched binary: one build tree per tag and kind of build, kept so that the next
build is short.

`<cache>/trees/<tag>-<kind>/` holds `src/` (the plain tree, with CMake's `src/build/`) and
`build.log`. What was built there is put into a folder of its own (finished.py), whose name is a
digest of everything that decides it; where that is whole, a build does nothing. One process builds
in a tree at a time (file lock).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import UnsupportedUpstream
from ollama_tiering.patchset import (
    apply,
    estimate,
    failure,
    finished,
    gomod,
    gpu_libraries,
    headers,
    identity,
    shim,
    stamp,
    stock,
    tools,
)
from ollama_tiering.patchset.go_env import collector, go_environment
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.plan import BuildOptions, BuildPlan, plan
from ollama_tiering.patchset.progress import PackageCount, package_total
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run, stream
from ollama_tiering.patchset.tree import disk_full
from ollama_tiering.patchset.upstream import SourceCache


def built_binaries() -> list[Path]:
    """Every finished binary in the cache, newest first, including those of earlier patch sets; for
    this machine, with our patches.
    """
    found = [one for one in finished.programs() if _is_ours(one.parent.parent.name)]
    stamps = (config.cache_dir() / "trees").glob("*/stamp.json")  # of an older `tiering`
    old = (stamp.parent / "src" / "ollama" for stamp in stamps if _is_ours(stamp.parent.name))
    return found + sorted(
        (b for b in old if b.is_file()), key=lambda b: b.stat().st_mtime, reverse=True
    )


def _is_ours(name: str) -> bool:
    return not name.endswith(finished.STOCK) and finished.ELSEWHERE not in name


def prepare(plan: BuildPlan, patchset: Patchset, cache: SourceCache, report: Report) -> Path:
    """Extracts and patches the plan's tree if that is not done yet. Returns the Go to build it
    with.
    """
    options = plan.options
    if not plan.tree.is_dir():
        _warn_if_little_space(plan, report)
        with report.stage(f"extracting {options.tag}"):
            cache.extract(options.tag, plan.tree)
    go_mod = (plan.tree / gomod.GO_MOD).read_bytes()
    go = tools.find_go(gomod.go_version_wanted(go_mod), report)
    touched = apply.apply(
        patchset,
        plan.tree,
        tag=options.tag,
        allow_untested=options.allow_untested,
        go=go,
        cache=cache,
    )
    if touched:
        report.say(f"patched {plan.tree}: {_count(len(touched), 'file')} changed")
    return go


def build(options: BuildOptions, patchset: Patchset, cache: SourceCache, report: Report) -> Path:
    """Patches and compiles; returns the binary, which this process holds from now on. The tag must
    be in the source cache.
    """
    if not options.allow_untested:
        patchset.require_pin(options.tag)
    if options.stock:
        patchset = patchset.emptied()
    tools.require_compiler()
    chosen = plan(options, patchset)
    if chosen.remark:
        report.warn(f"the GPU is not used: {chosen.remark}")
    try:
        gpu = _stock_of(chosen, patchset, report)
        with locked(chosen.folder / "lock", f"another build of {options.tag} is at work", report):
            go = prepare(chosen, patchset, cache, report)
            build_id = _build_id(chosen, patchset, cache, go, gpu)
            place = finished.root() / chosen.name / _state(chosen, patchset, go, build_id, gpu)
            binary = place / chosen.program
            if finished.is_whole(place):
                report.say(f"{binary} is up to date")
            else:
                _say_what_it_takes(chosen, report)
                chosen.log.write_text("", encoding="utf-8")
                with finished.filling(place, chosen.program, build_id) as fresh:
                    _fill(fresh, chosen, patchset, go, build_id, gpu, report)
                chosen.old_stamp.unlink(missing_ok=True)
            finished.hold(binary)
            finished.remove_older(place, chosen.program, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(chosen.folder) from None
        raise
    return binary


def _state(
    plan: BuildPlan, patchset: Patchset, go: Path, build_id: str, gpu: stock.Installation | None
) -> str:
    sources = shim.default_sources(patchset.root)
    with_shim = (plan.cuda or gpu) and not plan.options.stock and sources.is_dir()
    return stamp.state_of(
        plan.options,
        plan.kind,
        plan.compiler_flags,
        patchset,
        go,
        build_id,
        gpu=gpu.state() if gpu else None,
        shim=shim.digest(sources, plan.tree) if with_shim else "",
    )


def _fill(
    fresh: Path,
    plan: BuildPlan,
    patchset: Patchset,
    go: Path,
    build_id: str,
    gpu: stock.Installation | None,
    report: Report,
) -> None:
    """Compiles in the tree, and puts what came of it into `fresh`."""
    if plan.needs_cmake:
        finished.unshare(plan.tree / finished.LIBRARIES)
        _build_ggml(plan, report)
    _put_gpu_libraries(plan, patchset, gpu, report)
    _build_go(plan, patchset, go, build_id, fresh / plan.program, report)
    if (plan.tree / finished.LIBRARIES).is_dir():
        finished.link_files(plan.tree / finished.LIBRARIES, fresh / finished.LIBRARIES)
    if gpu:
        shutil.copy2(plan.folder / gpu_libraries.RECORD, fresh)


def _stock_of(plan: BuildPlan, patchset: Patchset, report: Report) -> stock.Installation | None:
    """The user's Ollama where its libraries are wanted, and all of it fits."""
    if plan.stock is None:
        return None
    found = stock.usable(stock.find(plan.stock, report), report)
    version = stock.check(found, plan.options.tag, patchset)
    folders = ", ".join(folder.name for folder in found.folders)
    report.say(f"libraries for GPUs of Ollama {version} at {found.place}: {folders}")
    return found


def _put_gpu_libraries(
    plan: BuildPlan, patchset: Patchset, gpu: stock.Installation | None, report: Report
) -> None:
    """Those of `gpu`, and beside each libggml-cuda the shim, which reads K/V in pinned memory."""
    below = plan.tree / gpu_libraries.BELOW
    folders = [below] if plan.cuda else []
    if gpu:
        gpu_libraries.put(gpu, plan.folder, plan.tree, report, own_base=plan.needs_cmake)
        folders += [below / one.name for one in gpu.folders if one.is_cuda]
    if folders and not plan.options.stock:
        shim.put(folders, patchset.root, plan.tree, report)


# --- the two compilers ----------------------------------------------------------------------------


def _build_ggml(plan: BuildPlan, report: Report) -> None:
    """Builds GGML's libraries with upstream's presets, into build/lib/ollama beside the binary."""
    cmake = tools.find_cmake(report)
    tools.require_make()
    if plan.cuda:
        preset = f"CUDA {plan.cuda.major}"
        _require_preset(plan, preset)
        configure = [f"-DCMAKE_CUDA_COMPILER={plan.cuda.nvcc}"]
        arch = plan.cuda_arch
        configure += [f"-DCMAKE_CUDA_ARCHITECTURES={arch}"] if arch else []
    else:
        preset, configure = "CPU", ["-DCMAKE_CUDA_COMPILER=NOTFOUND"]
    targets = (["CPU"] if plan.options.cpu == "variants" else []) + ([preset] if plan.cuda else [])
    _forget_other_compilers_work(plan)
    with report.stage("configuring GGML") as detail:
        _step(plan, report, detail, cmake, "--preset", preset, *configure)
    for target in targets:
        with report.stage(f"compiling GGML ({target})") as detail:
            jobs = str(plan.options.jobs or os.cpu_count() or 1)
            _step(plan, report, detail, cmake, "--build", "--preset", target, "--parallel", jobs)


def _forget_other_compilers_work(plan: BuildPlan) -> None:
    """CMake does not notice that a compiler was updated, and would keep what the old one made."""
    folder, mark = plan.tree / "build", plan.folder / "compilers"
    wanted = identity.compiler_digest(plan.compiler_flags, plan.cuda)
    if not mark.is_file() or mark.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        mark.write_text(wanted, encoding="utf-8")


def _require_preset(plan: BuildPlan, name: str) -> None:
    presets = json.loads((plan.tree / "CMakePresets.json").read_text(encoding="utf-8"))
    known = [entry["name"] for entry in presets["configurePresets"]]
    if name not in known:
        cuda = ", ".join(entry for entry in known if entry.startswith("CUDA "))
        raise UnsupportedUpstream(
            f"{plan.options.tag} has no preset for {name} (it has {cuda})", hint="use --gpu off"
        )


def _build_id(
    plan: BuildPlan,
    patchset: Patchset,
    cache: SourceCache,
    go: Path,
    gpu: stock.Installation | None = None,
) -> str:
    return identity.build_id(
        patchset,
        tag=plan.options.tag,
        tree=cache.tree(plan.options.tag) or "",
        kind=plan.kind,
        go_tags=plan.options.go_tags,
        go=tools.go_version(go),
        flags=plan.compiler_flags,
        cuda=plan.cuda,
        cuda_arch=plan.cuda_arch,
        stock_cuda=gpu.content() if gpu else None,
    )


# C++ that imports no module: it compiles while modules are fetched. What fails here fails once
# more in the build of all, and then it is said.
_WITHOUT_MODULES = ("./llama/llama.cpp/common", "./ml/backend/ggml/ggml/src/ggml-cpu/llamafile")


def _build_go(
    plan: BuildPlan, patchset: Patchset, go: Path, build_id: str, target: Path, report: Report
) -> None:
    variables = {
        "github.com/ollama/ollama/version.Version": plan.options.tag.removeprefix("v"),
        "github.com/ollama/ollama/server.mode": "release",
    }
    variables |= {
        name: value.replace(identity.PLACEHOLDER, build_id)
        for name, value in patchset.go_ldflags.items()
    }
    ldflags = " ".join(["-s", "-w", *(f"-X={name}={value}" for name, value in variables.items())])
    command: list[str | Path] = [go, "build", "-v", "-mod=readonly", "-trimpath", "-buildvcs=false"]
    if plan.options.go_tags:
        command += ["-tags", ",".join(plan.options.go_tags)]
    if plan.options.jobs:
        command += ["-p", str(plan.options.jobs)]
    with contextlib.ExitStack() as stack:
        with report.stage("looking for Go packages"), ThreadPoolExecutor(1) as pool:
            environment = go_environment(plan.options.goarch)
            tags = plan.options.go_tags
            total = pool.submit(package_total, go, plan.tree, tags, environment)
            flags = stack.enter_context(compiler_environment(plan, go))
            flags |= collector(plan.options.jobs or estimate.usable_cores())
            if _compiles_everything():
                run(*command, *_WITHOUT_MODULES, cwd=plan.tree, env=environment | _ENGLISH | flags)
        title = f"compiling Ollama {plan.options.tag} ({plan.kind})"
        detail = stack.enter_context(report.stage(title))
        counted = PackageCount(total.result(), detail)
        words = ("-ldflags", ldflags, "-o", target, ".")
        _step(plan, report, counted, *command, *words, environment=flags)


@contextmanager
def compiler_environment(plan: BuildPlan, go: Path) -> Iterator[dict[str, str]]:
    """The C compilers' flags, as environment variables. The person's own flags come first."""
    wanted = plan.compiler_flags
    with contextlib.ExitStack() as stack:
        if plan.options.cpu == "native" and not os.environ.get("CGO_CXXFLAGS"):
            environment = go_environment(plan.options.goarch)
            made = headers.precompiled(go, wanted["CGO_CXXFLAGS"], plan.folder, environment)
            wanted["CGO_CXXFLAGS"] = stack.enter_context(made)
        yield wanted


_ENGLISH = {"LC_ALL": "C"}  # what failed is read in what the compiler says


def _step(
    plan: BuildPlan,
    report: Report,
    detail: Callable[[str], None],
    program: str | Path,
    *args: str | Path,
    environment: dict[str, str] | None = None,
) -> None:
    done = stream(
        program,
        *args,
        log=plan.log,
        cwd=plan.tree,
        env=go_environment(plan.options.goarch) | _ENGLISH | (environment or {}),
        report=report,
        on_line=detail,
    )
    if done.returncode:
        raise failure.failed(Path(program).name, done, plan.log, plan.folder)


# --- messages -------------------------------------------------------------------------------------


def _say_what_it_takes(plan: BuildPlan, report: Report) -> None:
    if _compiles_everything():
        options = plan.options
        said = estimate.first_build(
            options.tag, not plan.needs_cmake, options.jobs, config.cache_dir()
        )
        report.say(said)


def _compiles_everything() -> bool:
    cache = os.environ.get("GOCACHE") or go_environment()["GOCACHE"]
    return cache is not None and estimate.is_first(Path(cache))


def _warn_if_little_space(plan: BuildPlan, report: Report) -> None:
    plan.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(plan.folder).free
    needed = estimate.needed_bytes(not plan.needs_cmake)
    if free < needed:
        report.warn(
            f"only {config.format_size(free)} free at {plan.folder}; a first build takes about "
            f"{config.format_size(needed)}"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
