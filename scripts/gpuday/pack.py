"""What has to travel to a machine with a GPU and no network, beside the checkout: the patched
Ollama, GGML's sources to build libggml-cuda from, and the packages that our Python needs.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import tempfile
from pathlib import Path

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.config import MIB
from ollama_tiering.errors import BuildError, UsageError
from ollama_tiering.patchset import binary, finished, shim
from ollama_tiering.patchset.pip import pip
from ollama_tiering.patchset.run import run
from scripts.gpuday.steps import ABOUT, GGML, PACK, PROGRAM, ROOT, SITE

_PYTHON = "3.12"  # of the machine; packages that are compiled are for one version
_PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "2014", "2010", "1")]
_LOCKS = ("requirements.lock", "requirements-models.lock")
_THERE_ALREADY = re.compile(r"^numpy==.*\n(?: .*\n)*", re.MULTILINE)  # large; CuPy brings it


def make() -> None:
    """Packs the newest patched Ollama."""
    began, program = begin(), binary.ready_binary()
    if program is None:
        raise UsageError("no patched Ollama is built", hint="`scripts/tiering patch` builds one")
    tree = finished.source_of(program)
    print(f"packing {program} and {tree / shim.GGML}, downloading packages", flush=True)
    variants = sorted((program.parent / "build/lib/ollama").glob("libggml-cpu-*.so"))
    about = {
        "build": tree.parent.name,
        "SHA-256": hashlib.sha256(program.read_bytes()).hexdigest(),
        "commit": began.code,
        "for": "all processors" if variants else f"processors like {this_machine(began)}",
    }
    PACK.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(PACK, "w:xz") as archive:
        (Path(scratch) / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        install(Path(scratch) / SITE)
        archive.add(scratch, "")
        archive.add(program, f"{PROGRAM}/ollama")
        for library in variants:
            archive.add(library, f"{PROGRAM}/{library.name}")
        for name in ("CMakeLists.txt", str(shim.GGML)):
            archive.add(tree / name, f"{GGML}/{name}")
    print(f"{about['build']} for {about['for']} (`scripts/tiering patch --cpu variants`: for all)")
    print(f"{PACK.stat().st_size / MIB:.1f} MiB of 64, with the checkout: carry {PACK}")
    print('there: scripts/gpu_day run --out "$OUT" --minutes 9.5')


def install(site: Path) -> None:
    """Packages of the locks, for the machine's Python. BuildError if pip fails."""
    locked = "".join((ROOT / name).read_text(encoding="utf-8") for name in _LOCKS)
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
