"""An Ollama with libraries for NVIDIA GPUs, laid out as a release, of files that a test makes."""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable
from pathlib import Path

from ollama_tiering.patchset import elf

MACHINE = elf.MACHINES[platform.machine().lower()]
BASE_SYMBOLS = ("ggml_init", "ggml_backend_alloc", "gguf_init")


def library(
    path: Path,
    *,
    defined: Iterable[str] = (),
    wanted: Iterable[str] = (),
    weak: Iterable[str] = (),
    needed: Iterable[str] = (),
    machine: int = MACHINE,
) -> Path:
    """The least that is a shared library with these symbols: it could not be loaded."""
    strings, symbols = bytearray(b"\0"), bytearray(24)

    def string(text: str) -> int:
        strings.extend(text.encode() + b"\0")
        return len(strings) - len(text) - 1

    for names, info, section in ((defined, 0x12, 1), (wanted, 0x12, 0), (weak, 0x22, 0)):
        for name in names:
            symbols += struct.pack("<IBBHQQ", string(name), info, 0, section, 0, 0)
    dynamic = b"".join(struct.pack("<qQ", 1, string(name)) for name in needed)
    dynamic += struct.pack("<qQ", 0, 0)
    parts, at, rows = (bytes(strings), bytes(symbols), dynamic), 64, [bytes(64)]
    for kind, link, part in ((3, 0, parts[0]), (11, 1, parts[1]), (6, 1, parts[2])):
        rows.append(struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, len(part), link, 0, 0, 0))
        at += len(part)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, at, 0, 64, 0, 0, 64, len(rows), 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ident + head + b"".join((*parts, *rows)))
    return path


def program(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Warning: client version is {version}' >&2\n")
    path.chmod(0o755)
    return path


def ollama(
    root: Path, version: str = "0.16.0", folders: Iterable[str] = ("cuda_v12", "cuda_v13")
) -> Path:
    """The folder above bin and lib."""
    program(root / "bin/ollama", version)
    libraries = root / "lib/ollama"
    library(libraries / "libggml-base.so.0.0.0", defined=BASE_SYMBOLS)
    (libraries / "libggml-base.so.0").symlink_to("libggml-base.so.0.0.0")
    (libraries / "libggml-base.so").symlink_to("libggml-base.so.0")
    library(libraries / "libggml-cpu-haswell.so", defined=["ggml_backend_init"])
    for name in folders:
        major, folder = name[-2:], libraries / name
        library(
            folder / "libggml-cuda.so",
            defined=["ggml_backend_init"],
            wanted=["ggml_init", "cudaMalloc", name],
            needed=["libggml-base.so.0", f"libcublas.so.{major}", "libcuda.so.1", "libc.so.6"],
        )
        (folder / f"libcublas.so.{major}.8.4").write_bytes(b"cublas of " + name.encode())
        (folder / f"libcublas.so.{major}").symlink_to(f"libcublas.so.{major}.8.4")
    return root
