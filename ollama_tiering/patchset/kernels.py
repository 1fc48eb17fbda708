"""The attention kernels as part of the patch set: csrc/include/paged_attn below GGML's CPU backend.

They are the headers of a library of their own, and are not copied into the overlay. Go's build
cache hashes the files of a package directory but none below it, so after a change the old kernel
would silently stay in the binary. `STAMP` is therefore a header in the package directory itself
that contains the digest of all kernels, and the adapter includes it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ollama_tiering.errors import PatchConflict

BACKEND = "ml/backend/ggml/ggml/src/ggml-cpu"
LIBRARY = "paged_attn"
ADAPTER = f"{BACKEND}/exactattn.cpp"
STAMP = f"{BACKEND}/exactattn-headers.h"

# What the CPU part includes. The device code is not compiled with it and must not make it new.
PARTS = ("*.h", "cpu/**/*.h")


def default_include(root: Path) -> Path:
    """`csrc/include` beside `patches/` in a checkout, or the copy in an installed package."""
    checkout = root.parent / "csrc/include"
    return checkout if checkout.is_dir() else root.parent / "_csrc/include"


def overlay(include: Path) -> dict[str, bytes]:
    """Path in the tree -> content: headers and stamp. PatchConflict if there are none."""
    library = include / LIBRARY
    paths = sorted({path for part in PARTS for path in library.glob(part)})
    if not paths:
        raise PatchConflict(
            f"{library}: no kernels there, and the patch set has an adapter for them",
            hint="use a whole checkout, or install the package again",
        )
    headers = {path.relative_to(include).as_posix(): path.read_bytes() for path in paths}
    state = hashlib.sha256()
    for name, content in headers.items():
        for part in (name.encode(), content):
            state.update(len(part).to_bytes(8, "little") + part)
    stamp = f'#define EXACTATTN_HEADERS "{state.hexdigest()}"\n'
    return {f"{BACKEND}/{name}": content for name, content in headers.items()} | {
        STAMP: stamp.encode()
    }
