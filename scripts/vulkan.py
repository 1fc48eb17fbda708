"""Maintainer: GGML's Vulkan backend, for the tests on a GPU that is a program (Mesa's lavapipe).

    .venv/bin/python -m scripts.vulkan [--built] [--jobs N]

Of Ollama v0.16.3 and of the llama.cpp that `make llama-server` builds: the target ggml-vulkan as
upstream's own CMake makes it, into the product's cache, by the digest of its sources. Prints one
line each, VARIABLE=FOLDER as tests/engine_gpu wants it; a folder has libggml-vulkan.so and the
libggml-base that it was linked with. On 2 cores a build takes 6 minutes, most of it shaders; with
--built nothing is compiled.

Nothing is installed: what is missing is named, with exit code 0 and the word SKIPPED, so that
`scripts/test` can say it.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import TieringError, UsageError
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from scripts import llama_server

HERE = config.cache_dir() / "vulkan"
LIBRARY = "libggml-vulkan.so"
PACKAGES = {  # of Debian: a file that each has
    "mesa-vulkan-drivers": ("/usr/share/vulkan/icd.d/lvp_icd*.json",),
    "libvulkan-dev": ("/usr/include/vulkan/vulkan.hpp",),
    "glslc": ("/usr/bin/glslc", "/usr/local/bin/glslc"),
    "spirv-headers": ("/usr/include/spirv/unified1/spirv.hpp",),
    "cmake": ("/usr/bin/cmake", "/usr/local/bin/cmake"),
}
# Debian 12's headers (1.3.239) lack what ggml-vulkan needs; these are Debian 13's.
HEADERS = (
    "http://deb.debian.org/debian/pool/main/v/vulkan-loader/libvulkan-dev_1.4.309.0-1_amd64.deb"
)
HEADERS_SHA256 = "8d329d465e16168afff58b1bd0dd6db46aac2cc3f56054a481b25a04e90b345a"
INCLUDED, MARK = Path("vulkan/vulkan_structs.hpp"), b"LayerSettingEXT"
OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
OLLAMA = ["-DCMAKE_CUDA_COMPILER=NOTFOUND", "-DCMAKE_HIP_COMPILER=NOTFOUND"]
LLAMA_CPP = [
    *("-DGGML_VULKAN=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU=OFF", "-DGGML_NATIVE=OFF"),
    *("-DGGML_CCACHE=OFF", "-DGGML_OPENMP=OFF", "-DGGML_BUILD_TESTS=OFF"),
    "-DGGML_BUILD_EXAMPLES=OFF",
]
# Upstream asks what glslc knows by small files, and looks for one wording of its refusal. Ollama
# leaves these files out, so that each question fails in other words, which is taken for a yes. Here
# a question that fails is a no.
EXTENSIONS = [
    *("GL_KHR_cooperative_matrix", "GL_NV_cooperative_matrix2", "GL_EXT_integer_dot_product"),
    *("GL_NV_cooperative_matrix_decode_vector", "GL_EXT_bfloat16"),
    *("GL_EXT_float_e2m1", "GL_EXT_float_e4m3"),
]
GLSLC = """#!/bin/sh
case $* in
*/feature-tests/*)
    @GLSLC@ "$@" 2>/dev/null && exit
    printf 'extension not supported: %s\\n' @EXTENSIONS@ >&2
    exit 1 ;;
esac
exec @GLSLC@ "$@"
"""


def missing() -> list[str]:
    """Debian's packages that have to be installed first."""
    root = Path("/")
    return [
        package
        for package, files in PACKAGES.items()
        if not any(any(root.glob(file.lstrip("/"))) for file in files)
    ]


def headers() -> Path:
    """A folder with Vulkan's headers that are new enough: the system's, or Debian 13's."""
    system, unpacked = Path("/usr/include"), HERE / "headers" / HEADERS_SHA256[:16]
    if MARK in (system / INCLUDED).read_bytes():
        return system
    if not unpacked.is_dir():
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(HEADERS, timeout=60) as answer:
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != HEADERS_SHA256:
            raise UsageError(f"{HEADERS} is not the file that was tried")
        with tempfile.TemporaryDirectory(dir=unpacked.parent) as name:
            package = Path(name, "package.deb")
            package.write_bytes(content)
            command = ["dpkg-deb", "-x", str(package), str(Path(name, "root"))]
            subprocess.run(command, check=True)
            Path(name, "root").rename(unpacked)
    return unpacked / "usr/include"


def digest(source: Path, options: list[str]) -> str:
    """Of what is compiled, and by what."""
    found = hashlib.sha256("\0".join([*OPTIONS, *options, GLSLC, *EXTENSIONS]).encode())
    found.update(subprocess.run(["glslc", "--version"], capture_output=True, check=True).stdout)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def compiled(source: Path, build: Path, options: list[str], jobs: int) -> Iterator[Path]:
    """The libraries."""
    build.mkdir()
    glslc = build / "glslc"
    known = {"@GLSLC@": str(shutil.which("glslc")), "@EXTENSIONS@": " ".join(EXTENSIONS)}
    script = GLSLC
    for placeholder, value in known.items():
        script = script.replace(placeholder, value)
    glslc.write_text(script, encoding="utf-8")
    glslc.chmod(0o755)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    named = [f"-DVulkan_GLSLC_EXECUTABLE={glslc}", f"-DVulkan_INCLUDE_DIR={headers()}"]
    places = ["-S", str(source), "-B", str(build)]
    command = ["cmake", *places, *generator, *OPTIONS, *options, *named]
    subprocess.run(command, stdout=sys.stderr, check=True)
    target = ["--target", "ggml-vulkan", "--parallel", str(jobs)]
    subprocess.run(["cmake", "--build", build, *target], stdout=sys.stderr, check=True)
    yield next(build.rglob(LIBRARY))
    yield from build.rglob("libggml-base.so*")


def built(name: str, source: Path, part: str, options: list[str], jobs: int) -> Path | None:
    """The folder of `source`'s libraries; `part` of it is what is compiled. Without jobs nothing
    is: None where there is no such folder.
    """
    target = HERE / name / digest(source / part, options)
    if not target.is_dir() and not jobs:
        return None
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=HERE) as scratch:
            fresh = Path(scratch, "libraries")
            fresh.mkdir()
            for library in compiled(source, Path(scratch, "build"), options, jobs):
                shutil.copy2(library, fresh, follow_symlinks=False)
            fresh.rename(target)
    return target


def of_ollama(jobs: int) -> Path | None:
    tag, cache = config.DEFAULT_TAG, SourceCache()
    if not cache.has(tag):
        raise UsageError(f"{tag} is not in the source cache", hint="run `tiering fetch`")
    source = HERE / "source" / tag
    if not source.is_dir():
        source.parent.mkdir(parents=True, exist_ok=True)
        cache.extract(tag, source)
    return built("ollama", source, "ml/backend/ggml/ggml", OLLAMA, jobs)


def of_llama_cpp(jobs: int) -> Path | None:
    source = llama_server.DEFAULT / "source" / "ggml"
    if not source.is_dir():
        raise UsageError(f"no llama.cpp in {source}", hint="run `make llama-server`")
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "ggml")  # an sdist lacks a file, and a copy may have it
        shutil.copytree(source, copy)
        (copy / "ggml.pc.in").touch()
        return built("llama.cpp", copy, ".", LLAMA_CPP, jobs)


BUILDS = {
    "OLLAMA_TIERING_TEST_GPU": of_ollama,
    "OLLAMA_TIERING_TEST_GPU_LLAMA_CPP": of_llama_cpp,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--built", action="store_true", help="compile nothing")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="2 by default")
    given = parser.parse_args()
    if lacking := missing():
        print(f"SKIPPED: no {', '.join(lacking)}; `apt-get install {' '.join(lacking)}` has them")
        return 0
    HERE.mkdir(parents=True, exist_ok=True)
    try:
        with locked(HERE / "lock", "another build of ggml-vulkan is at work", Report()):
            found = {name: build(given.jobs * (not given.built)) for name, build in BUILDS.items()}
    except TieringError as error:
        print(f"error: {error.message}", *filter(None, [error.hint]), sep="\n", file=sys.stderr)
        return error.exit_code
    if None in found.values():
        print("SKIPPED: no ggml-vulkan is built; `make vulkan` does it, 12 minutes")
        return 0
    print(*(f"{name}={folder}" for name, folder in found.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
