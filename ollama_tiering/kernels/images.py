"""Images (cubins) of the attention kernels beside a patched Ollama, for the GPUs that are here or
that are named: what a server takes without a compiler.

`build/lib/ollama/paged_attn/sm_86-128x128-f16-f16-rows4-align16.cubin`. Each is made once, in the
cache (nvrtc.py), and linked or copied from there. Which combinations: those of known_models.py.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ollama_tiering import extras
from ollama_tiering.errors import MissingTool, UsageError
from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.binding import PaError
from ollama_tiering.kernels.cuda_driver import ATTRIBUTES, CudaDriver
from ollama_tiering.kernels.known_models import MODELS
from ollama_tiering.kernels.nvrtc import Instance

FOLDER = "paged_attn"  # below the folder of libraries
LEAST = 52  # compute capability x 10, the least that the kernels are written for
_ALIGN = {"f16": 16, "q8_0": 4}  # of rows as GGML lays them out
_MOST_GPUS = 64


def archs_here() -> list[int]:
    """Compute capabilities x 10 of this machine's GPUs; none without a driver."""
    try:
        driver = CudaDriver()
    except PaError:
        return []
    found = set()
    for ordinal in range(_MOST_GPUS):
        try:
            device = driver.number("cuDeviceGet", ordinal)
        except PaError:
            break
        major, minor = (
            driver.number("cuDeviceGetAttribute", ATTRIBUTES[part], device)
            for part in ("major", "minor")
        )
        found.add(10 * major + minor)
    return sorted(found)


def archs(named: str | None) -> list[int]:
    """Those that are named, as in `8.6,90,sm_120`; `native`, or nothing: of this machine's GPUs.
    UsageError for a word that is none, or is older than the kernels.
    """
    if named is None:
        return archs_here()
    found: set[int] = set()
    for word in re.split(r"[,;\s]+", named.strip()):
        number = re.fullmatch(r"(?:sm_)?(?:(\d{1,2})\.(\d)|(\d{2,3}))a?", word)
        if word == "native":
            found |= set(archs_here())
        elif number is None:
            raise UsageError(
                f"--cuda-arch: {word!r} is no compute capability", hint="write it like 8.6 or 86"
            )
        else:
            arch = int(number[3] or f"{number[1]}{number[2]}")
            if arch < LEAST:
                raise UsageError(
                    f"--cuda-arch: {word} is older than {LEAST / 10}, the least that is served",
                    hint="leave it out",
                )
            found.add(arch)
    return sorted(found)


def usual() -> list[Instance]:
    """What the known models need, with K/V in f16 and in q8_0."""
    shapes = sorted({(model.head_dim, model.decode_rows) for model in MODELS})
    return [
        Instance(d, d, kind, kind, rows, align)
        for d, rows in shapes
        for kind, align in _ALIGN.items()
    ]


def file_name(instance: Instance, arch: int) -> str:
    return (
        f"sm_{arch}-{instance.d_k}x{instance.d_v}-{instance.k_type}-{instance.v_type}"
        f"-rows{instance.rows}-align{instance.align}.cubin"
    )


def put(
    folder: Path,
    wanted: Sequence[int],
    detail: Callable[[str], None] = lambda _text: None,
    instances: Sequence[Instance] | None = None,
) -> int:
    """All images for these compute capabilities into `folder`, which then has no others; how many.
    MissingTool without NVRTC.
    """
    _require_compiler()
    pairs = [(one, arch) for arch in wanted for one in (instances or usual())]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch, folder.name)
        fresh.mkdir()
        for count, (one, arch) in enumerate(pairs, 1):
            detail(f"{count} of {len(pairs)}: {one}, CC {arch / 10}")
            (fresh / file_name(one, arch)).write_bytes(nvrtc.image(one, arch).cubin)
        if folder.is_dir():
            folder.rename(Path(scratch, "before"))
        fresh.rename(folder)
    return len(pairs)


def remove(folder: Path) -> None:
    """All images of an earlier build, at once: where new ones can't be made."""
    if folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            folder.rename(Path(scratch, "before"))


def _require_compiler() -> None:
    """NVRTC, installed now where a checkout can do that."""
    try:
        nvrtc.compiler()
    except MissingTool:
        extras.need("cuda")
        nvrtc.compiler()
