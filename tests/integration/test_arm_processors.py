"""GGML's CPU part as cgo compiles it for ARM64: all that is called is there, on every processor.

Needs a cross compiler on another machine than such a one. Only `make nightly` runs it, and
`scripts/test` where a change touches it (tests/turns.py).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ollama_tiering.config import DEFAULT_TAG
from ollama_tiering.patchset import apply, manifest
from ollama_tiering.patchset.upstream import SourceCache
from tests import turns
from tests.integration.compiled import object_of

FILE = "tests/integration/test_arm_processors.py"
CACHE = SourceCache()
GGML = Path("ml/backend/ggml/ggml")
CPU = GGML / "src/ggml-cpu"
FOLDERS = (GGML / "src", CPU, CPU / "llamafile", CPU / "arch/arm")  # as their .go files say
INCLUDE = (GGML / "include", GGML / "src", CPU, CPU / "amx", CPU / "llamafile")
DEFINES = ("NDEBUG", "_GNU_SOURCE", "GGML_USE_LLAMAFILE", "GGML_USE_CPU", "HWCAP2_SVE2=2")
VERSION = ("GGML_VERSION=0x0", "GGML_COMMIT=0x0")
PREFIX = "" if platform.machine() == "aarch64" else "aarch64-linux-gnu-"
PROCESSORS = {
    "cortex-a72": "Raspberry Pi 4",
    "cortex-a76": "Raspberry Pi 5: dot products, f16",
    "neoverse-n1": "Ampere Altra",
    "neoverse-v1": "Graviton 3: SVE, products of int8 matrices, bf16",
    "neoverse-n2": "SVE2, as Grace",
}

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not CACHE.has(DEFAULT_TAG) or not shutil.which("go") or not shutil.which(f"{PREFIX}g++"),
        reason=f"needs Go, {PREFIX}g++ and {DEFAULT_TAG} in the source cache {CACHE.root}",
    ),
    pytest.mark.skipif(turns.in_part(FILE), reason="`make nightly` tries it"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patched."""
    tree = tmp_path_factory.mktemp("arm") / "tree"
    CACHE.extract(DEFAULT_TAG, tree)
    go, tag = shutil.which("go"), DEFAULT_TAG
    apply.apply(manifest.load(), tree, tag=tag, allow_untested=False, go=go, cache=CACHE)
    return tree


def compiled(tree: Path, source: Path, target: Path, cpu: str) -> Path:
    language = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc"]
    command = [f"{PREFIX}{language[0]}", *language[1:], f"-mcpu={cpu}", "-O0", "-w"]
    command += [f"-D{name}" for name in (*DEFINES, *VERSION)]
    command += [f"-I{tree / place}" for place in INCLUDE]
    return object_of(command, source, target)


@pytest.mark.parametrize("cpu", PROCESSORS)
def test_all_that_is_called_is_there(tree: Path, tmp_path: Path, cpu: str) -> None:
    sources = [
        source
        for folder in FOLDERS
        for source in sorted((tree / folder).iterdir())
        if source.suffix in (".c", ".cpp")
    ]
    assert any(source.name == "exactattn.cpp" for source in sources)
    main = tmp_path / "main.c"
    main.write_text("int main(void) { return 0; }\n")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(
            pool.map(
                lambda at: compiled(tree, at[1], tmp_path / f"{at[0]}.o", cpu),
                enumerate([*sources, main]),
            )
        )
    linked = [f"{PREFIX}g++", *map(str, objects), "-ldl", "-lm", "-lpthread"]
    done = subprocess.run(
        [*linked, "-o", str(tmp_path / "program")], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-2000:]
