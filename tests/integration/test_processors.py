"""GGML's CPU part as cgo compiles it, for processors that nobody has here: what is called exists.

In scripts/test one processor with AMX; every one that the compilers know where a change touches
this (tests/turns.py), and in `make nightly`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ollama_tiering.config import DEFAULT_TAG
from ollama_tiering.patchset import apply, manifest, processor
from ollama_tiering.patchset.upstream import SourceCache
from tests import turns
from tests.integration.compiled import object_of
from tests.unit.patchset.test_processor import KNOWN

FILE = "tests/integration/test_processors.py"
CACHE = SourceCache()
GGML = Path("ml/backend/ggml/ggml")
CPU = GGML / "src/ggml-cpu"
# The folders of C sources that cgo compiles for x86, and what their #cgo lines say.
FOLDERS = (CPU, CPU / "llamafile", CPU / "arch/x86")
DEFINES = ("-DNDEBUG", "-D_GNU_SOURCE", "-DGGML_USE_LLAMAFILE", "-DGGML_USE_CPU")
VERSION = ("-DGGML_VERSION=0x0", "-DGGML_COMMIT=0x0")
INCLUDE = (GGML / "include", GGML / "src", CPU, CPU / "amx", CPU / "llamafile")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not CACHE.has(DEFAULT_TAG) or not shutil.which("go") or not KNOWN,
        reason=f"needs Go, a compiler and {DEFAULT_TAG} in the source cache {CACHE.root}",
    ),
]


def _compile(tree: Path, folder: Path, objects: Path, compiler: str, flags: list[str]) -> None:
    c = {"g++": "gcc", "clang++": "clang"}[compiler]
    include = [f"-I{tree / place}" for place in INCLUDE]
    for source in sorted((tree / folder).iterdir()):
        if source.suffix not in (".c", ".cpp"):
            continue
        language = [compiler, "-std=c++17"] if source.suffix == ".cpp" else [c]
        target = objects / f"{folder.name}-{source.name}.o"
        # -O0: only the names matter here
        command = [*language, *flags, "-O0", "-w", *DEFINES, *VERSION, *include]
        object_of(command, source, target)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patched."""
    tree = tmp_path_factory.mktemp("processors") / "tree"
    CACHE.extract(DEFAULT_TAG, tree)
    go, tag = shutil.which("go"), DEFAULT_TAG
    apply.apply(manifest.load(), tree, tag=tag, allow_untested=False, go=go, cache=CACHE)
    return tree


@pytest.fixture(scope="module")
def rest(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What does not depend on the processor."""
    objects = tmp_path_factory.mktemp("rest")
    _compile(tree, GGML / "src", objects, KNOWN[0][0], [])
    (objects / "main.c").write_text("int main(void) { return 0; }\n")
    return objects


def _missing(tree: Path, rest: Path, objects: Path, compiler: str, flags: list[str]) -> list[str]:
    """What the linker does not find."""
    objects.mkdir()
    for folder in FOLDERS:
        _compile(tree, folder, objects, compiler, flags)
    done = subprocess.run(
        [
            *(compiler, str(rest / "main.c"), *map(str, sorted(objects.glob("*.o")))),
            *(*map(str, sorted(rest.glob("*.o"))), "-x", "none", "-ldl", "-lm", "-lpthread"),
            *("-o", str(objects / "program")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.splitlines()
    assert not done.returncode or any("undefined reference" in line for line in said), done.stderr
    return sorted({line.partition("undefined reference to")[2] for line in said} - {""})


@pytest.mark.parametrize(("compiler", "march"), KNOWN)
def test_all_that_is_called_is_there(
    tree: Path,
    rest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    march: str,
) -> None:
    if turns.in_part(FILE) and (compiler, march) != KNOWN[0]:
        pytest.skip("one processor is tried; `make nightly` tries them all")
    for name in ("CGO_CFLAGS", "CGO_CXXFLAGS", "CGO_CPPFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CC", {"g++": "gcc", "clang++": "clang"}[compiler])
    monkeypatch.setenv("CXX", compiler)
    flags = processor.cgo_flags(march)["CGO_CXXFLAGS"].split()
    assert _missing(tree, rest, tmp_path / "objects", compiler, flags) == []


def test_with_amx_something_is_missing(tree: Path, rest: Path, tmp_path: Path) -> None:
    """So that this test would see it."""
    if ("g++", "sapphirerapids") not in KNOWN:
        pytest.skip("this compiler knows no processor with AMX")
    if turns.in_part(FILE):
        pytest.skip("`make nightly` tries it")
    missing = _missing(tree, rest, tmp_path / "objects", "g++", ["-march=sapphirerapids"])
    assert any("ggml_backend_amx_buffer_type" in name for name in missing)
