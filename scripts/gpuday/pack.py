"""What has to travel to a machine with a GPU and no network, beside the checkout: the patched
Ollama and llama-server, libggml-cuda for each, and the packages that our Python needs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.config import MIB
from ollama_tiering.errors import BuildError, UsageError
from ollama_tiering.patchset import binary, finished, shim
from ollama_tiering.patchset.pip import pip
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from scripts import llama_server
from scripts.gpuday import compile
from scripts.gpuday.steps import (
    ABOUT,
    CUDA_LLAMA_CPP,
    CUDA_OLLAMA,
    LLAMA_SERVER,
    OLLAMA,
    PACK,
    PROGRAM,
    ROOT,
    SERVER,
    SITE,
    STOCK_SERVER,
)

_PYTHON = "3.12"  # of the machine; packages that are compiled are for one version
_PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "2014", "2010", "1")]
_LOCKS = ("requirements.lock",)
_PINNED = re.compile(r"^[a-z].*==.*\n(?: .*\n)*", re.MULTILINE)
_TESTS = {
    *("pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy", "packaging"),
    *("hypothesis", "sortedcontainers", "pygments"),
}
_THERE_ALREADY = re.compile(r"^numpy==.*\n(?: .*\n)*", re.MULTILINE)  # large; CuPy brings it


BOTH = (OLLAMA, LLAMA_SERVER)
_MOST_MIB = 54  # of 64 that travel; the rest is the checkout


def make(engines: Sequence[str] = BOTH) -> None:
    """Packs the newest patched Ollama, the llama-server of scripts/llama_server.py, or both; with
    both it may be too much to travel. With neither only the steps of the kernels can be done.
    """
    print(f"packing for {', '.join(engines) or 'the kernels'}, downloading packages", flush=True)
    about = {"commit": begin().code}
    PACK.parent.mkdir(parents=True, exist_ok=True)
    # preset 9: what the two servers have alike is in there once
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(PACK, "w:xz", preset=9) as archive:
        if OLLAMA in engines:
            about |= _add_ollama(archive, Path(scratch) / CUDA_OLLAMA)
        if LLAMA_SERVER in engines:
            _add_llama_server(archive, Path(scratch) / CUDA_LLAMA_CPP)
        if engines:
            about["compiled"] = f"libggml-cuda for sm_{compile.ARCH}, CUDA {compile.MAJOR}"
        (Path(scratch) / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        install(Path(scratch) / SITE)
        _strip(Path(scratch))
        archive.add(scratch, "")
    size = PACK.stat().st_size / MIB
    print(f"{size:.1f} MiB; with the checkout 64 travel: carry {PACK}")
    if size > _MOST_MIB:
        print(f"that is too much: `--engine {OLLAMA}` and `--engine {LLAMA_SERVER}`, a call each")
    print('there: scripts/gpu_day run --out "$OUT" --minutes 9.5')


def _strip(folder: Path) -> None:
    """Symbols of libraries for those who look for bugs are a third of them."""
    libraries = [path for path in folder.rglob("*.so*") if not path.is_symlink()]
    if strip := shutil.which("strip"):
        run(strip, "--strip-unneeded", *libraries)


def _add_ollama(archive: tarfile.TarFile, cuda: Path) -> dict[str, str]:
    """What is said of the program that was added. UsageError if none is built."""
    program = binary.ready_binary()
    if program is None:
        raise UsageError("no patched Ollama is built", hint="`scripts/tiering patch` builds one")
    tree = finished.source_of(program)
    shutil.copytree(of_ollama(tree), cuda, symlinks=True)
    shim.put_beside(cuda, ROOT / "csrc/shim", tree, Report())
    variants = sorted((program.parent / "build/lib/ollama").glob("libggml-cpu-*.so"))
    archive.add(program, f"{PROGRAM}/ollama")
    for library in variants:
        archive.add(library, f"{PROGRAM}/{library.name}")
    kind = "all processors" if variants else f"processors like {this_machine(begin())}"
    print(f"{program} for {kind} (`scripts/tiering patch --cpu variants`: for all)")
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    return {"build": tree.parent.name, "SHA-256": digest, "for": kind}


def _add_llama_server(archive: tarfile.TarFile, cuda: Path) -> None:
    """UsageError if none is built."""
    server = llama_server.DEFAULT
    if not (server / SERVER).is_file():
        raise UsageError(f"no llama-server in {server}", hint="`make llama-server` builds one")
    shutil.copytree(of_llama_cpp(), cuda, symlinks=True)
    for name in (SERVER, STOCK_SERVER):
        archive.add((server / name).parent, f"llama-server/{Path(name).parent}")


def of_ollama(tree: Path) -> Path:
    return compile.built("ollama", tree, shim.GGML)


def of_llama_cpp() -> Path:
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "ggml")  # an sdist lacks a file, and a copy may have it
        shutil.copytree(llama_server.DEFAULT / "source/ggml", copy)
        (copy / "ggml.pc.in").touch()
        return compile.built("llama.cpp", copy, Path(), compile.LLAMA_CPP)


def install(site: Path) -> None:
    """Packages of the locks, for the machine's Python; of those for development what runs tests.
    BuildError if pip fails.
    """
    locked = "".join((ROOT / name).read_text(encoding="utf-8") for name in _LOCKS)
    testing = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
    locked += "".join(one for one in _PINNED.findall(testing) if one.split("==")[0] in _TESTS)
    site.mkdir()
    wanted = site / "requirements.txt"
    wanted.write_text(_THERE_ALREADY.sub("", locked), encoding="utf-8")
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps"]
    words += ["--only-binary=:all:", "--require-hashes", "--python-version", _PYTHON]
    words += [word for name in _PLATFORMS for word in ("--platform", name)]
    with pip() as (command, needs):
        done = run(*command, *words, "--target", site, "-r", wanted, env=needs)
    if done.returncode:
        raise BuildError("pip:\n" + "\n".join(done.tail))
    for unused in site.glob("zstandard/_cffi*.so"):  # its other half is used, and as large
        unused.unlink()
