"""What decides the bits of rows is in llama-server's namespace (llama_server/src/kvt_identity)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.engine_program import SOURCE, WARNINGS

BUILD = "0123456789abcdef"

DECIDE = [
    "GGML_CUDA_DISABLE_FUSION",
    "GGML_CUDA_FORCE_MMQ",
    "LLAMA_ATTN_ROT_DISABLE",
    "HSA_OVERRIDE_GFX_VERSION",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "OMP_THREAD_LIMIT",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "GOMP_CPU_AFFINITY",
    "KMP_HW_SUBSET",
    "ROCBLAS_USE_HIPBLASLT",
    "ROCBLAS_TENSILE_LIBPATH",
    "HIPBLASLT_TENSILE_LIBPATH",
    "TENSILE_SOLUTION_SELECTION_METHOD",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VK_ICD_FILENAMES",
    "RADV_PERFTEST",
]
DO_NOT = [
    "GGML_BACKEND_PATH",
    "GGML_VK_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "LLAMA_ARG_PORT",
    "LLAMA_MEDIA_MARKER",  # Ollama chooses another one for each start
    "LLAMA_LOG_FILE",
    "CUDA_CACHE_PATH",
    "OLLAMA_HOST",
    "HOME",
    "PATH",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("kvt") / "kvt_names"
    parts = ("kvt_identity", "kvt_objects", "kvt_linked", "kvt_crc")
    sources = SOURCE / "tests" / "kvt_names.cpp", *(SOURCE / f"src/{part}.cpp" for part in parts)
    command = [compiler, "-std=c++17", *WARNINGS, "-Wl,--build-id", *sources, "-o", built]
    subprocess.run(command, check=True, timeout=600)
    return built


def said(program: Path, *words: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [program, *words], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", DECIDE)
def test_a_variable_that_decides_bits_is_in_the_namespace(program: Path, name: str) -> None:
    assert said(program, **{name: "1"}) == [f"{name}=1"]
    assert said(program, **{name: "2"}) == [f"{name}=2"]


def test_no_other_variable_keeps_rows_from_being_found(program: Path) -> None:
    assert said(program, **dict.fromkeys(DO_NOT, "1")) == []


def test_the_order_of_the_variables_decides_nothing(program: Path) -> None:
    one = said(program, GGML_B="1", GGML_A="2", OMP_DYNAMIC="true")
    other = said(program, OMP_DYNAMIC="true", GGML_A="2", GGML_B="1")
    assert one == other == ["GGML_A=2", "GGML_B=1", "OMP_DYNAMIC=true"]


@pytest.mark.parametrize("length", [5, 97, 98, 128, 1000])
def test_the_build_is_in_the_engines_name_however_long_its_version_is(
    program: Path, length: int
) -> None:
    version = "b" * length
    (name,) = said(program, version)
    assert name.endswith(f"+{BUILD}")
    assert name.startswith("llama-server/b")
    assert len(name) <= 128


def loaded(program: Path, library: Path | None = None) -> list[str]:
    """Code in its memory, by lines."""
    preload = {} if library is None else {"LD_PRELOAD": str(library)}
    return said(program, "--objects", **preload)


def library(path: Path, answer: int, *options: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(f"int answer(void) {{ return {answer}; }}\n")
    compiler = shutil.which("gcc") or shutil.which("g++") or "c++"
    words = ("-shared", "-fPIC", *options, source, "-o", path)
    subprocess.run([compiler, *words], check=True, timeout=600)
    return path


@pytest.mark.parametrize("options", ["-Wl,--build-id=sha1", "-Wl,--build-id=none"])
@pytest.mark.parametrize(
    "name", ["amdvlk64.so", "libLLVM-15.so.1", "libgallium-25.0.so", "libvulkan_lvp.so", "driver"]
)
def test_a_driver_of_any_name_is_told_from_an_older_one(
    program: Path, tmp_path: Path, name: str, options: str
) -> None:
    seen = {tuple(loaded(program))}
    for answer in (1, 2):
        found = loaded(program, library(tmp_path / str(answer) / name, answer, options))
        assert sum(line.startswith(f"{name}=") for line in found) == 1
        seen.add(tuple(found))
    assert len(seen) == 3
    same = loaded(program, library(tmp_path / "elsewhere" / name, 2, options))
    assert tuple(same) in seen, "where it lies says nothing"


@pytest.mark.parametrize("name", ["libcrypto.so.3", "libX11.so.6", "libnss_dns.so.2", "libz.so.1"])
def test_what_computes_nothing_keeps_no_rows_from_being_found(
    program: Path, tmp_path: Path, name: str
) -> None:
    assert loaded(program, library(tmp_path / name, 1)) == loaded(program)


def test_the_program_and_its_libraries_count(program: Path) -> None:
    names = [line.partition("=")[0] for line in loaded(program)]
    assert {"", "libc.so.6"} <= set(names)
    assert names == sorted(names)
    assert not any(name.startswith("linux-vdso") for name in names)
    assert loaded(program) == loaded(program)
