"""`libggml-cpu-exact.so`: GGML's CPU backend of the same commit, compiled for this processor, with
our exact attention in it.

It lies beside the links to the installed libraries. GGML opens every `libggml-cpu-*.so` there, and
takes the one with the highest score: ours, if `OLLAMA_CPU_ATTENTION` asks for it and the processor
is the one that it was compiled for. Else it takes the installed file, as if ours were not there.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.errors import TieringError, UsageError
from ollama_tiering.patchset import elf, identity, kernels
from ollama_tiering.patchset.llama_server import exact_processor, links
from ollama_tiering.patchset.llama_server.anchors import missing_texts, place
from ollama_tiering.patchset.llama_server.compile import (
    CompileUnit,
    CxxCompiler,
    compile_all,
    library,
    run_compiler,
)
from ollama_tiering.patchset.llama_server.exact_hooks import BACKEND, HOOKS, NEEDED
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.report import Report

LIBRARY: Final = links.EXACT
MACHINES: Final = ("x86_64", "amd64")
NATIVE: Final = "-march=native"
COMMON: Final = ("-DNDEBUG", "-fPIC", "-pthread", "-w", "-D_GNU_SOURCE", "-D_XOPEN_SOURCE=600")
DEFINED: Final = (
    *("-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED"),
    *("-DGGML_USE_LLAMAFILE", "-DGGML_USE_CPU_REPACK"),  # as a release
)
# A library with unique symbols is never unloaded: GGML opens this one to ask its score.
GCC: Final = ("-fno-gnu-unique",)
C: Final = ("-x", "c", "-std=gnu11")
CXX: Final = ("-std=gnu++17",)
FAST: Final = ("-O3", NATIVE)
# At -O3 the code that gcc 12 makes of this file crashes.
SLOWER: Final = {"amx/mmq.cpp": ("-O2", NATIVE)}
SCORE: Final = "score.cpp"
PLAIN: Final = ("-O2",)  # for any processor
LINKED: Final = (
    *(f"-Wl,-soname,{LIBRARY}", "-Wl,-rpath,$ORIGIN", "-Wl,--build-id=sha1", "-Wl,-s"),
    *("-Wl,-z,defs", "-Wl,-z,now"),
)
_STOCKS: Final = "libggml-cpu-*.so"
_FOLDERS: Final = (".", "amx", "llamafile", "arch/x86")
_STOCK_SCORE: Final = "cpu-feats.cpp"
_NEEDED_MACROS: Final = ("__AVX2__", "__FMA__", "__F16C__")  # csrc/include/paged_attn/cpu/isa.h
_AVX512: Final = ("__AVX512F__", "__AVX512BW__", "__AVX512VL__", "__AVX512DQ__")


class NotPossible(Exception):
    """Why there can be no exact attention here; all else goes on."""


@dataclass(frozen=True, slots=True)
class ExactAttention:
    """What a tree of links has. `file` is None where there is none, and `words` say why; else they
    name its kernels. `processor`: the flags of the one that was looked at.
    """

    file: Path | None
    words: str
    processor: str


def default_sources() -> Path:
    """`llama_server/cpu` of the checkout, or the copy in an installed package."""
    package = Path(__file__).resolve().parents[2]
    checkout = package.parent / "llama_server" / "cpu"
    found = checkout if checkout.is_dir() else package / "_llama_server" / "cpu"
    if not found.is_dir():
        raise UsageError(f"{found}: no such folder", hint="install the package again")
    return found


def kernel_headers() -> Path:
    """The folder that has `paged_attn`."""
    package = Path(__file__).resolve().parents[2]
    checkout = package.parent / "csrc" / "include"
    return checkout if checkout.is_dir() else package / "_csrc" / "include"


def sources() -> Iterator[tuple[str, bytes]]:
    """All that decides what is made, but GGML's own source: name and content."""
    how = (COMMON, DEFINED, GCC, C, CXX, FAST, SLOWER, PLAIN, LINKED, HOOKS)
    yield "how", repr(how).encode()
    for path in sorted(path for path in default_sources().iterdir() if path.is_file()):
        yield path.name, path.read_bytes()
    yield from sorted(kernels.overlay(kernel_headers()).items())


def make(
    source: Path,
    installation: InstalledOllama,
    compiler: CxxCompiler,
    work: Path,
    report: Report,
    *,
    jobs: int | None = None,
) -> ExactAttention:
    """`source` gets our lines; what is made lies in `work`. Where it cannot be made, for whatever
    reason of the compiler's or the source's, it says so: Ollama is tiered without it.
    """
    processor = exact_processor.flags()
    try:
        macros = _macros(compiler)
        kernel = _require(installation, compiler, macros, processor)
        place_lines(source)
        units = list(_units(source, work, processor, is_gcc="__clang__" not in macros))
        compile_all("exact attention", units, source, compiler, report, jobs)
        made = _link([unit.object for unit in units], installation, compiler, work, report)
    except NotPossible as error:
        return ExactAttention(None, str(error), processor)
    except TieringError as error:
        return ExactAttention(None, error.message.partition("\n")[0], processor)
    return ExactAttention(made, kernel, processor)


def _macros(compiler: CxxCompiler) -> frozenset[str]:
    said = identity.macros(list(compiler.command), [NATIVE], "c++")
    return frozenset(re.findall(r"^#define (\w+) ", said, re.MULTILINE))


def _require(
    installation: InstalledOllama, compiler: CxxCompiler, macros: frozenset[str], processor: str
) -> str:
    """The name of the kernels. NotPossible says why there can be none."""
    if platform.machine().lower() not in MACHINES:
        raise NotPossible(f"it is not tried on {platform.machine()}")
    if not processor or not exact_processor.can_be_compared(processor):
        raise NotPossible("Linux does not say which instructions the processor has")
    if not list(installation.lib.glob(_STOCKS)):
        raise NotPossible(f"the installed llama-server has no {_STOCKS} to choose from")
    try:
        linked = elf.read(library(installation, "libggml")).needed
    except (ValueError, OSError) as error:
        raise NotPossible(f"libggml.so of {installation.lib}: {error}") from None
    if any(name.startswith("libggml-cpu") for name in linked):
        raise NotPossible("the installed llama-server is linked to one libggml-cpu")
    if lacking := [name for name in _NEEDED_MACROS if name not in macros]:
        raise NotPossible(
            f"the processor, or {compiler.command[0]} for it, lacks {lacking[0].strip('_')}"
        )
    return "avx512" if macros.issuperset(_AVX512) else "avx2"


def place_lines(source: Path) -> None:
    """Into a source of llama.cpp. PatchConflict, NotPossible where it does not fit."""
    paths = {one.path for one in (*HOOKS, *NEEDED)}
    files = {path: _text(source / path) for path in paths}
    if lacking := missing_texts(files, NEEDED):
        raise NotPossible(f"this llama.cpp lacks what it uses: {'; '.join(lacking)}")
    for path, text in place(files, HOOKS).items():
        (source / path).write_text(text, encoding="utf-8")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _units(source: Path, work: Path, processor: str, *, is_gcc: bool) -> Iterator[CompileUnit]:
    """The longest first."""
    backend, ours, objects = source / BACKEND, default_sources(), work / "exact"
    objects.mkdir()
    places = (backend, source / "ggml/src", source / "ggml/include", ours, kernel_headers())
    usual = (*COMMON, *(GCC if is_gcc else ()), *DEFINED, *(f"-I{place}" for place in places))
    for path in sorted(_files(backend, ours), key=lambda path: -path.stat().st_size):
        name = path.relative_to(backend).as_posix() if path.is_relative_to(backend) else path.name
        language = C if path.suffix == ".c" else CXX
        how: tuple[str, ...] = SLOWER.get(name, FAST)
        if path == ours / SCORE:
            how = (*PLAIN, f'-DEXACTATTN_FLAGS="{processor}"')
        yield CompileUnit(path, objects / f"{name.replace('/', '-')}.o", (*language, *how, *usual))


def _files(backend: Path, ours: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        found = (path for path in (backend / folder).glob("*") if path.suffix in (".c", ".cpp"))
        yield from (path for path in found if path.name != _STOCK_SCORE)
    yield from ours.glob("*.cpp")


def _link(
    objects: Sequence[Path],
    installation: InstalledOllama,
    compiler: CxxCompiler,
    work: Path,
    report: Report,
) -> Path:
    target = work / LIBRARY
    command: list[str | Path] = [*compiler.command, "-shared", "-pthread", "-o", target]
    command += [*sorted(objects), *LINKED, library(installation, "libggml-base"), "-lm"]
    run_compiler(command, work, report)
    return target
