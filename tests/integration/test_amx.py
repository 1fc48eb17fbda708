"""Upstream's products of matrices for AMX, with its tile instructions emulated, against GGML's
plain ones: AMX is left out of a native build (processor.py) as long as they are wrong for a type.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ollama_tiering.config import DEFAULT_TAG
from ollama_tiering.patchset.upstream import SourceCache
from tests import turns
from tests.integration.compiled import object_of

FILE = "tests/integration/test_amx.py"
CACHE = SourceCache()
OURS = Path(__file__).parents[1] / "attention" / "amx"
GGML = Path("ml/backend/ggml/ggml")
CPU = GGML / "src/ggml-cpu"
KERNELS = CPU / "amx/mmq.cpp"
# Optimised only where it counts: the AMX code as a native build would.
OPTIMISED = {GGML / "src": "-O0", CPU: "-O1", CPU / "arch/x86": "-O1", CPU / "amx": "-O3"}
DEFINES = ("NDEBUG", "_GNU_SOURCE", "GGML_USE_CPU", "GGML_VERSION=0x0", "GGML_COMMIT=0x0")
INCLUDE = (GGML / "include", GGML / "src", CPU, CPU / "amx")

RIGHT = ("q8_0", "q4_K", "q5_K", "q6_K", "iq4_xs", "f16")
WRONG = ("q4_0", "q4_1")
WRONG_FROM = 32  # columns
SHAPES = ((32, 2048), (96, 4096), (160, 2048))  # rows and width as GGML takes them for AMX
# The first block of 32 values of each second tile is that of the first tile.
MISTAKE = "unpack_B<TB>(Tile1, B_blk0);"
CURE = "unpack_B<TB>(Tile1, B_blk1);"


def _has_vnni() -> bool:
    try:
        return " avx512_vnni " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


COMPILER = next((name for name in ("g++", "clang++") if shutil.which(name)), "")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not CACHE.has(DEFAULT_TAG) or not COMPILER or not _has_vnni(),
        reason=f"needs AVX-512 VNNI, a C++ compiler and {DEFAULT_TAG} in {CACHE.root}",
    ),
    pytest.mark.skipif(turns.in_part(FILE), reason="`make nightly` tries it"),
]


@dataclass(frozen=True)
class Product:
    """A line of tests/attention/amx/products.cpp, which says what each number is."""

    columns: int
    threads: int
    worst: float
    tiles: int
    same: bool


def _compiled(tree: Path, source: Path, optimised: str, target: Path) -> Path:
    c = {"g++": "gcc", "clang++": "clang"}[COMPILER]
    emulated = ["-std=c++17", "-include", str(OURS / "emulated_amx.h")]
    language = [COMPILER, *emulated] if source.suffix == ".cpp" else [c]
    command = [*language, "-march=cascadelake", optimised, "-w"]
    command += [f"-D{name}" for name in DEFINES] + [f"-I{tree / place}" for place in INCLUDE]
    return object_of(command, source, target)


def _linked(objects: list[Path], program: Path) -> Path:
    command = [COMPILER, *map(str, objects), "-ldl", "-lm", "-lpthread", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With upstream's AMX code, and with one word of it corrected."""
    folder = tmp_path_factory.mktemp("amx")
    tree = folder / "tree"
    CACHE.extract(DEFAULT_TAG, tree)
    text = (tree / KERNELS).read_text(encoding="utf-8")
    assert text.count(MISTAKE) == 1
    cured = tree / KERNELS.with_name("cured.cpp")
    cured.write_text(text.replace(MISTAKE, CURE), encoding="utf-8")
    jobs = [
        (source, optimised)
        for place, optimised in reversed(OPTIMISED.items())  # what takes longest comes first
        for source in sorted((tree / place).iterdir())
        if source.suffix in (".c", ".cpp")
    ]
    jobs.append((OURS / "products.cpp", "-O2"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(
            pool.map(
                lambda job: _compiled(tree, *job[1], folder / f"{job[0]}-{job[1][0].name}.o"),
                enumerate(jobs),
            )
        )
    first, second = (
        [made for made in objects if not made.name.endswith(left_out)]
        for left_out in (f"-{cured.name}.o", f"-{KERNELS.name}.o")
    )
    return _linked(first, folder / "upstream"), _linked(second, folder / "cured")


def _products(program: Path, kind: str) -> list[Product]:
    found = []
    for rows, width in SHAPES:
        command = [str(program), kind, str(rows), str(width)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert not done.returncode, done.stderr[-2000:]
        for line in done.stdout.splitlines():
            columns, threads, worst, tiles, same = line.split()
            found.append(Product(int(columns), int(threads), float(worst), int(tiles), same == "1"))
    assert {one.columns for one in found} == {1, 2, 3, 16, 17, 33, 100}
    assert {one.threads for one in found} == {1, 3}
    for one in found:  # a single column has a way of its own, and f16 has no tiles
        assert (one.tiles > 0) == (one.columns > 1 and kind != "f16")
    return found


@pytest.mark.parametrize("kind", RIGHT)
def test_upstreams_amx_code_multiplies_as_the_plain_one(
    programs: tuple[Path, Path], kind: str
) -> None:
    found = _products(programs[0], kind)
    assert max(one.worst for one in found) < 1
    assert all(one.same for one in found), "no bit depends on how many columns there are"


@pytest.mark.parametrize("kind", WRONG)
def test_two_types_are_wrong_from_32_columns_on_by_one_word(
    programs: tuple[Path, Path], kind: str
) -> None:
    """Why AMX is left out. Newer versions of llama.cpp have the right word."""
    for one in _products(programs[0], kind):
        assert (one.worst > 100) == (one.columns >= WRONG_FROM)
    found = _products(programs[1], kind)
    assert max(one.worst for one in found) < 1
    assert all(one.same for one in found)
