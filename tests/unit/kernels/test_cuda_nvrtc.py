"""The device code through NVRTC, without a GPU: it compiles for every compute capability and
nothing spills."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from ollama_tiering.errors import TieringError
from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.nvrtc import Instance, Resources
from ollama_tiering.kernels.shape import Dtype

SMALL = Instance(64, 64, "f16", "q8_0", 1, 4)


@pytest.fixture(scope="module")
def compiler() -> nvrtc.Compiler:
    try:
        return nvrtc.compiler()
    except TieringError as error:
        pytest.skip(f"{error.message}; {error.hint}")


def test_report_of_the_assembler_is_read() -> None:
    log = """ptxas info    : Compiling entry function 'pa_wide' for 'sm_86'
ptxas info    : Function properties for pa_wide
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 544 bytes cmem[0]
ptxas info    : Function properties for pa_combine
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 544 bytes cmem[0]
"""
    assert nvrtc.parse_resources(log) == [
        Resources("pa_wide", 168, 16, 8, 12, 1024),
        Resources("pa_combine", 40, 0, 0, 0, 0),
    ]


def test_the_library_is_found_in_wheels_and_in_a_toolkit(tmp_path: Path) -> None:
    wheels, home = tmp_path / "nvidia", tmp_path / "cuda"
    assert nvrtc.library([wheels], None) in (None, *Path("/usr/local/cuda").glob("lib64/*"))
    for place in (home / "lib64/libnvrtc.so.12", wheels / "cu13/lib/libnvrtc.so.13"):
        place.parent.mkdir(parents=True)
        place.touch()
        assert nvrtc.library([wheels], str(home)) == place
    old = wheels / "cuda_nvrtc/lib/libnvrtc.so.12"
    old.parent.mkdir(parents=True)
    old.touch()
    assert nvrtc.library([wheels], str(home)) == old


def test_compiler_serves_every_compute_capability(compiler: nvrtc.Compiler) -> None:
    assert set(nvrtc.ARCHS) <= set(compiler.archs())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", [52, 75, 90])
def test_small_instance_compiles_without_spills(compiler: nvrtc.Compiler, arch: int) -> None:
    image = compiler.compile(SMALL, arch)
    assert image.cubin[:4] == b"\x7fELF"
    used = {r.kernel: r for r in image.resources()}
    assert set(used) == set(nvrtc.KERNELS)
    assert all(r.spill_store_bytes == r.spill_load_bytes == 0 for r in used.values())
    assert all(name.encode() in image.cubin for name in (*nvrtc.KERNELS, "pa_image"))
    # what the image says of its own kernels: pa_image of csrc/cuda/problem.h
    types = [int(Dtype[kind.upper()]) for kind in (SMALL.k_type, SMALL.v_type)]
    begin = struct.pack("<7i", 2, arch, SMALL.d_k, SMALL.d_v, *types, SMALL.align)
    at = image.cubin.index(begin) + len(begin)
    decode, narrow, wide, combine = (
        struct.unpack_from(f"<{count}i", image.cubin, at + offset)
        for count, offset in ((3, 0), (3, 12), (3, 24), (2, 36))
    )
    assert decode[0] == SMALL.rows
    assert bool(narrow[0]) == (arch >= 75)
    launched = [decode, wide, (1, *combine), *([narrow] if narrow[0] else [])]
    assert all(
        rows and threads % 32 == 0 and shared_bytes > 0 for rows, threads, shared_bytes in launched
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_chip_that_the_compiler_does_not_know_gets_what_its_driver_translates(
    compiler: nvrtc.Compiler,
) -> None:
    text = compiler.compile(SMALL, 9990).cubin
    newest = max(compiler.archs())
    assert f".target sm_{newest}".encode() in text
    assert b".entry pa_decode" in text


@pytest.mark.slow
def test_the_kernel_that_only_reads_compiles(compiler: nvrtc.Compiler) -> None:
    assert b"pa_read" in nvrtc.read_kernel(80)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(
    not os.environ.get("TIERING_CUDA_MATRIX"),
    reason="every instance for every GPU takes half an hour; TIERING_CUDA_MATRIX=1 runs it",
)
@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_every_instance_compiles_without_spills(compiler: nvrtc.Compiler, arch: int) -> None:
    from scripts.attention.cuda_resources import INSTANCES

    spilling = [
        (str(instance), used)
        for instance in INSTANCES
        for used in nvrtc.image(instance, arch).resources()
        if used.spill_store_bytes or used.spill_load_bytes
    ]
    assert spilling == []


def test_refused_source_says_the_compilers_words(compiler: nvrtc.Compiler) -> None:
    with pytest.raises(nvrtc.NvrtcError, match="rows of a decode block"):
        compiler.compile(Instance(64, 64, "f16", "f16", 9, 16), 80)


def test_image_is_made_once(
    compiler: nvrtc.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc.config, "cache_dir", lambda: tmp_path)
    made: list[int] = []

    def compile_it(instance: Instance, arch: int) -> nvrtc.Image:
        made.append(arch)
        return nvrtc.Image(b"cubin", "log")

    monkeypatch.setattr(compiler, "compile", compile_it)
    assert nvrtc.image(SMALL, 80) == nvrtc.image(SMALL, 80) == nvrtc.Image(b"cubin", "log")
    assert nvrtc.image(SMALL, 86).cubin == b"cubin"
    assert made == [80, 86]
