"""Maintainer: builds llama-server with the tiering, and without, from a source of llama.cpp.

    .venv/bin/python scripts/llama_server.py [SOURCE [FOLDER]] [--jobs N]

SOURCE is a folder, or an sdist of llama-cpp-python, which has llama.cpp in it; or the version of
such an sdist, which then comes out of the cache or from PyPI. FOLDER gets
`source`, `build/bin/llama-server`, in `stock` what the same source builds without our lines, in
`original` the files that our lines are in, and in `release/bin` GGML as releases have it: a CPU
library for this processor that is chosen at the start (scripts/installed_ollama.py takes it). By
default it is in the product's cache, where `scripts/test` finds it. Another run, which needs no
SOURCE, compiles what has changed. For the CPU alone, and quick to compile: what computes and what
copies rows is fast, the rest is not. On 2 cores it takes 7 minutes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import TieringError, UsageError
from ollama_tiering.patchset.llama_server import exact_processor
from ollama_tiering.patchset.llama_server.hooks import HOOKS, NEEDED, OURS
from ollama_tiering.patchset.llama_server.tree import patch_tree
from scripts.llama_server_sdists import CACHE, sdist

SOURCES = Path(__file__).resolve().parents[1] / "llama_server" / "src"
DEFAULT = config.cache_dir() / "llama-server-test"
INSIDE = "/vendor/llama.cpp/"
LEFT_OUT = (".git", "objects", "models", "docs", "benches", "media")  # four fifths of an sdist
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_C_FLAGS_RELEASE": "-O1",  # with assertions; FAST is for what computes
    "CMAKE_CXX_FLAGS_RELEASE": "-O1",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",  # `stock` is a copy
    "BUILD_SHARED_LIBS": "ON",
    "GGML_OPENMP": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}

# GGML's own flags of a release, and one of its variants: the one for this processor.
RELEASE = {
    **{name: value for name, value in OPTIONS.items() if not name.startswith("CMAKE_C")},
    "GGML_BACKEND_DL": "ON",
    "GGML_NATIVE": "OFF",
}
VARIANTS = {  # what Linux calls an instruction set, and CMake of GGML
    "avx_vnni": "GGML_AVX_VNNI",
    "avx512f": "GGML_AVX512",
    "avx512vbmi": "GGML_AVX512_VBMI",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
    "amx_tile": "GGML_AMX_TILE",
    "amx_int8": "GGML_AMX_INT8",
}

FAST = """\
function(kvt_fast)
    foreach(target ggml-base ggml-cpu)
        target_compile_options(${target} PRIVATE -O2)
    endforeach()
    foreach(target server-context llama)
        get_target_property(sources ${target} SOURCES)
        get_target_property(folder ${target} SOURCE_DIR)
        list(FILTER sources INCLUDE REGEX "(/kvt_[a-z_]+|llama-kv-cache|llama-batch)\\.cpp$")
        foreach(source ${sources})
            get_filename_component(path ${source} ABSOLUTE BASE_DIR ${folder})
            set_source_files_properties(${path} TARGET_DIRECTORY ${target}
                PROPERTIES COMPILE_OPTIONS -O2)
        endforeach()
    endforeach()
endfunction()
cmake_language(DEFER CALL kvt_fast)
"""


def found(source: Path) -> Path:
    """Itself, unless it is a version."""
    if source.exists() or not re.fullmatch(r"\d+\.\d+\.\d+", str(source)):
        return source
    return sdist(str(source), CACHE)


def unpack(source: Path, to: Path) -> None:
    """Without the repository that it came from: in an sdist it is a file that git trips over."""
    part = to.with_name(f"{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, part, ignore=shutil.ignore_patterns(".git"))
    else:
        with tarfile.open(source) as archive:
            for member in archive:
                name = member.name.partition(INSIDE)[2]
                if name and name.partition("/")[0] not in LEFT_OUT:
                    member.name = name
                    archive.extract(member, part, filter="data")
    if not (part / "CMakeLists.txt").is_file():
        raise UsageError(f"{source} is no source of llama.cpp")
    part.rename(to)


def compile_server(source: Path, build: Path, jobs: int) -> Path:
    build.mkdir(exist_ok=True)
    fast = build / "fast.cmake"
    fast.write_text(FAST)
    given = {**OPTIONS, "CMAKE_PROJECT_llama.cpp_INCLUDE": str(fast)}
    compile_target("llama-server", source, build, given, jobs)
    return build / "bin" / "llama-server"


def compile_release(source: Path, build: Path, jobs: int) -> None:
    """GGML alone: it computes the same in all that llama.cpp builds beside it."""
    flags = exact_processor.flags().split()
    variant = {option: "ON" for flag, option in VARIANTS.items() if flag in flags}
    compile_target("ggml", source, build, {**RELEASE, **variant}, jobs)


def compile_target(
    target: str, source: Path, build: Path, given: dict[str, str], jobs: int
) -> None:
    options = [f"-D{name}={value}" for name, value in given.items()]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(
        ["cmake", "-S", source, "-B", build, *generator, *options], stdout=sys.stderr, check=True
    )
    how = ["--target", target, "--parallel", str(jobs)]
    subprocess.run(["cmake", "--build", build, *how], stdout=sys.stderr, check=True)


def patched(source: Path, original: Path) -> None:
    """Our lines and files in `source`, whatever it had of them. What is right already keeps its
    time, so that it is not compiled again.
    """
    hooked = {one.path for one in HOOKS}
    if not original.exists() and (source / OURS).exists():
        raise UsageError(f"{source} is patched, and there is no {original}: begin anew")
    copied(source, original, {path for path in hooked if not (original / path).exists()})
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        copied(source, fresh, {one.path for one in NEEDED} - hooked)
        copied(original, fresh, hooked)
        patch_tree(fresh, SOURCES)
        ours = {file.relative_to(fresh) for file in (fresh / OURS).iterdir()}
        for path in {Path(path) for path in hooked} | ours:
            text = (fresh / path).read_bytes()
            if not (source / path).exists() or (source / path).read_bytes() != text:
                (source / path).parent.mkdir(exist_ok=True)
                (source / path).write_bytes(text)
    for file in (source / OURS).iterdir():
        if file.relative_to(source) not in ours:
            file.unlink()


def copied(tree: Path, to: Path, paths: Iterable[str]) -> None:
    for path in paths:
        if (tree / path).is_file():
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / path, to / path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", nargs="?")
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: 2)")
    given = parser.parse_args()
    folder: Path = given.folder.resolve()
    source, build, stock = folder / "source", folder / "build", folder / "stock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not source.exists():
            if given.source is None:
                raise UsageError(f"{source} does not exist yet: name a source of llama.cpp")
            unpack(found(given.source), source)
        if not (source / OURS).exists():
            compile_server(source, build, given.jobs)
            shutil.copytree(build / "bin", stock, symlinks=True, dirs_exist_ok=True)
        compile_release(source, folder / "release", given.jobs)
        patched(source, folder / "original")
        program = compile_server(source, build, given.jobs)
    except TieringError as error:
        print(f"error: {error.message}", *filter(None, [error.hint]), sep="\n", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
