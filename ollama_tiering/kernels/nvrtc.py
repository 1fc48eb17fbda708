"""CUDA kernels compiled at run time: one image per combination of head sizes, data types and rows.

NVRTC comes from the `nvidia-cuda-nvrtc-cu12` wheel (or the machine's own CUDA) and needs neither a
GPU nor a driver. Images (cubins) are kept in the cache directory under the digest of everything
that makes them: sources, options, the compiler's version. Two makers of one image write the same.
With $TIERING_CUDA_LINEINFO set they have line numbers, for compute-sanitizer.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering import config, extras
from ollama_tiering.errors import TieringError
from ollama_tiering.kernels.library import csrc_dir
from ollama_tiering.kernels.shape import Dtype

ARCHS = (
    52,
    60,
    61,
    70,
    75,
    80,
    86,
    89,
    90,
    100,
    120,
)  # NVRTC 12.9's, of the compute capabilities that matter
LIBRARIES = ("libnvrtc.so.12", "libnvrtc.so.13")
WHEELS = ("cuda_nvrtc", "cu13")
KERNELS = ("pa_decode", "pa_narrow", "pa_wide", "pa_combine", "pa_bounds")


class NvrtcError(TieringError):
    """No compiler, or it refused the source; the text holds its log."""


@dataclass(frozen=True)
class Instance:
    """What one image serves. `rows`: queries x heads of a group in one decode block, 1 to 8;
    `align`: bytes that addresses and strides of rows are multiples of (16; with q8_0 or q4_0 on
    either side, what those rows have: 4 or 2; f16 and bf16 rows have 16 always)."""

    d_k: int
    d_v: int
    k_type: str
    v_type: str
    rows: int
    align: int

    def options(self) -> list[str]:
        return [
            f"-DPA_D_K={self.d_k}",
            f"-DPA_D_V={self.d_v}",
            f"-DPA_K_TYPE={Dtype[self.k_type.upper()]:d}",
            f"-DPA_V_TYPE={Dtype[self.v_type.upper()]:d}",
            f"-DPA_ROWS={self.rows}",
            f"-DPA_ALIGN={self.align}",
        ]

    def __str__(self) -> str:
        return (
            f"{self.d_k}/{self.d_v} {self.k_type}/{self.v_type} rows {self.rows} align {self.align}"
        )


@dataclass(frozen=True)
class Resources:
    """What one kernel uses: per thread registers, stack and spills; per block shared memory that
    is not asked for at launch."""

    kernel: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Image:
    cubin: bytes  # or PTX, for a chip that NVRTC does not know
    log: str  # the assembler's report

    def resources(self) -> list[Resources]:
        return parse_resources(self.log)


def source_digest() -> str:
    root = csrc_dir()
    digest = hashlib.sha256()
    files = [*(root / "cuda").glob("*.*"), root / "include" / "paged_attn" / "attn_state.h"]
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Compiler:
    """NVRTC, loaded. `compile` may take seconds."""

    def __init__(self, library: Path | str) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def archs(self) -> list[int]:
        """Compute capabilities x 10 that this compiler serves."""
        count = ctypes.c_int()
        self._check(self._lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        archs = (ctypes.c_int * count.value)()
        self._check(self._lib.nvrtcGetSupportedArchs(archs))
        return list(archs)

    def compile(self, instance: Instance, arch: int) -> Image:
        """The image for compute capability arch / 10. NvrtcError holds the compiler's log."""
        return self.build("instance.cu", arch, instance.options(), str(instance))

    def build(self, name: str, arch: int, defines: Sequence[str], what: str) -> Image:
        """A source of csrc/cuda for compute capability arch / 10."""
        root = csrc_dir()
        virtual = arch not in self.archs()
        if virtual:  # a chip newer than this compiler: its driver translates what is for an older
            older = [known for known in self.archs() if known < arch]
            if not older:
                raise NvrtcError(f"NVRTC {self.version} makes nothing for sm_{arch}")
        options = [
            f"--gpu-architecture={f'compute_{max(older)}' if virtual else f'sm_{arch}'}",
            "--std=c++17",
            "-default-device",
            "--ptxas-options=-v",
            f"--include-path={root / 'include'}",
            f"--include-path={root / 'cuda'}",
            *line_info(),
            *defines,
        ]
        source = (root / "cuda" / name).read_bytes()
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(
                ctypes.byref(program), source, name.encode(), 0, None, None
            )
        )
        try:
            arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            result = self._lib.nvrtcCompileProgram(program, len(options), arguments)
            log = self._text(program, "ProgramLog")
            if result != 0:
                raise NvrtcError(f"NVRTC refused {what} for sm_{arch}:", told=log)
            return Image(self._bytes(program, "PTX" if virtual else "CUBIN"), log)
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace")

    def _check(self, result: int) -> None:
        if result != 0:
            raise NvrtcError(f"NVRTC: {self._lib.nvrtcGetErrorString(result).decode()}")


@functools.cache
def compiler() -> Compiler:
    """NVRTC from the wheel, else from the machine. MissingTool if there is none."""
    spec = importlib.util.find_spec("nvidia")
    wheels = spec.submodule_search_locations or () if spec else ()
    if found := library(map(Path, wheels), os.environ.get("CUDA_HOME")):
        return Compiler(found)
    for name in LIBRARIES:
        try:
            return Compiler(name)
        except OSError:
            continue
    raise extras.lacking("cuda")


def library(wheels: Iterable[Path], toolkit: str | None) -> Path | None:
    """The library in a wheel, of CUDA 12 (`nvidia/cuda_nvrtc`) or 13 (`nvidia/cu13`), or in a
    toolkit that the loader does not know.
    """
    folders = [place / package / "lib" for place in wheels for package in WHEELS]
    folders += [Path(home) / "lib64" for home in (toolkit, "/usr/local/cuda") if home]
    candidates = (folder / name for folder in folders for name in LIBRARIES)
    return next((path for path in candidates if path.is_file()), None)


def line_info() -> list[str]:
    return ["-lineinfo"] if os.environ.get("TIERING_CUDA_LINEINFO") else []


def read_kernel(arch: int) -> bytes:
    """The image of csrc/cuda/read.cu."""
    make = lambda made_by: made_by.build("read.cu", arch, (), "read.cu")  # noqa: E731
    return _kept("read.cu", arch, [], make).cubin


def image(instance: Instance, arch: int) -> Image:
    """The image, from the cache directory or made and put there."""
    options = instance.options()
    return _kept("instance.cu", arch, options, lambda made_by: made_by.compile(instance, arch))


def _kept(name: str, arch: int, options: Sequence[str], make: Callable[[Compiler], Image]) -> Image:
    made_by = compiler()
    made_of = [source_digest(), name, *line_info(), *options]
    key = "\n".join([*made_of, str(arch), str(made_by.version)])
    folder = config.cache_dir() / "cuda"
    cubin = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    log = cubin.with_suffix(".log")
    if cubin.is_file() and log.is_file():
        return Image(cubin.read_bytes(), log.read_text(encoding="utf-8", errors="replace"))
    made = make(made_by)
    folder.mkdir(parents=True, exist_ok=True)
    _write(log, made.log.encode())
    _write(cubin, made.cubin)
    return made


def _write(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as f:
        f.write(content)
    Path(name).replace(path)


_PROPERTIES = re.compile(r"Function properties for (\w+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_resources(log: str) -> list[Resources]:
    """The report of `ptxas -v`, a kernel after another."""
    found: list[Resources] = []
    name: str | None = None
    stack = (0, 0, 0)
    for line in log.splitlines():
        if match := _PROPERTIES.search(line):
            name = match[1]
        elif match := _STACK.search(line):
            stack = (int(match[1]), int(match[2]), int(match[3]))
        elif (match := _USED.search(line)) and name is not None:
            found.append(Resources(name, int(match[1]), *stack, int(match[2] or 0)))
            name, stack = None, (0, 0, 0)
    return found
