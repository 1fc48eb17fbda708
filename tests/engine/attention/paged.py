"""The shim (csrc/shim) beside the fake GPU: Ollama with K/V in pinned memory, and no GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from ollama_tiering.kernels import images
from ollama_tiering.kernels.nvrtc import Instance
from ollama_tiering.patchset import manifest, shim
from ollama_tiering.patchset.report import Report
from tests.engine.attention.fake_gpu import DRIVER, NO_DEVICE
from tests.engine.harness import Result, Server, assert_same, text

SOURCES = shim.default_sources(manifest.load().root)
PROMPT_TOKENS = 700  # two batches
FLASH = {"OLLAMA_FLASH_ATTENTION": "1"}
CPU = FLASH | NO_DEVICE
# without mirrors, so that all K/V that are paged cross the bus
ON = FLASH | {"OLLAMA_PAGED_ATTN": "1", "OLLAMA_PAGED_MIRROR": "0"}
COMPUTING_LATE = {"DELAY_US": "20000,0", "SEED": 5}  # so that copies come too early, if they can
COPYING_LATE = {"DELAY_US": "0,20000", "SEED": 5}
BOTH_LATE = {"DELAY_US": 3000, "SEED": 5}
EXACT = {"OLLAMA_PAGED_ENGINE": "exact"}
ARCH = 89  # of the fake GPU
# The kernels that its driver has (tests/attention/fakegpu/driver/kernels.cpp).
EMULATED = (
    *(Instance(64, 64, "f16", "f16", rows, 16) for rows in (1, 2, 5)),
    Instance(64, 64, "q8_0", "q8_0", 2, 4),
    Instance(96, 96, "q8_0", "q8_0", 2, 2),
    Instance(64, 64, "q8_0", "q4_0", 2, 4),
    Instance(256, 256, "f16", "f16", 2, 16),
    Instance(256, 256, "q8_0", "q8_0", 2, 4),
    Instance(192, 128, "f16", "f16", 1, 16),
)

_KV_CACHE = re.compile(r'msg="kv cache" device=(\S+) size="([\d.]+) (\w+)"')
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def copy_sources(folder: Path) -> Path:
    """A copy of the shim's sources below `folder`, with what they need beside them."""
    for part in ("shim", "cuda", "include"):
        shutil.copytree(SOURCES.parent / part, folder / part)
    return folder / "shim"


def install(binary: Path, tree: Path, folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy in `folder` of an installed Ollama with a fake GPU (`fake_gpu.install`), with the shim
    beside its library. Each change (file, old, new) makes a shim that is wrong.
    """
    shutil.copytree(binary.parents[1], folder, symlinks=True)
    compile_changed(tree, folder / "lib/ollama/cuda_fake", folder / "csrc", *changes)
    return folder / "bin/ollama"


def compile_changed(
    tree: Path, libraries: Path, folder: Path, *changes: tuple[str, str, str]
) -> None:
    """The shim, with these changes, into `libraries`; its sources lie in `folder`."""
    sources = copy_sources(folder)
    for name, old, new in changes:
        text = (sources / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} has not this once: {old}"
        (sources / name).write_text(text.replace(old, new), encoding="utf-8")
    base = shim.find_base(libraries)
    shim.compile_shim(sources, tree, base, libraries / shim.LIBRARY, Report(), shim.WARNINGS)


def put_kernels(binary: Path, instances: Iterable[Instance] = EMULATED) -> None:
    """Files of these kernels, and the driver that runs them: both of a fake GPU that was built with
    one.
    """
    lib = binary.parents[1] / "lib/ollama"
    (lib / images.FOLDER).mkdir()
    for instance in instances:
        name = images.file_name(instance, ARCH)
        content = name.removeprefix(f"sm_{ARCH}-").removesuffix(".cubin")
        (lib / images.FOLDER / name).write_text(f"emulated {content}\n", encoding="utf-8")
    (lib / "cuda_fake" / DRIVER).symlink_to("libggml-cuda.so")


def with_program(binary: Path, program: Path, folder: Path) -> Path:
    """The installed Ollama with another program, in `folder`."""
    shutil.copytree(binary.parents[1], folder, symlinks=True)
    return shutil.copy2(program, folder / "bin/ollama")


def kv_bytes(server: Server) -> dict[str, int]:
    """K/V of the model that was loaded last, by where they lie: CUDA0, Pinned, CPU."""
    last = server.log_text().rpartition('msg="loading model"')[2]
    infos = [line for line in last.splitlines() if "level=INFO" in line]
    found = _KV_CACHE.findall("\n".join(infos))
    return {place: round(float(size) * _UNITS[unit]) for place, size, unit in found}


def staged_bytes(device_log: Path) -> int:
    """Bytes that devices copied out of pinned memory, by the log of the fake GPU."""
    said = device_log.read_text(encoding="utf-8")
    return sum(map(int, re.findall(r"(\d+) bytes copied from pinned memory", said)))


def libraries_of(pid: int) -> Sequence[str]:
    """The names of the shared libraries that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return sorted({line.rpartition("/")[2] for line in maps.splitlines() if ".so" in line})


def hot(layers: int) -> dict[str, str]:
    """The environment in which so many layers keep their K/V on the device."""
    return ON | {"OLLAMA_PAGED_HOT_LAYERS": str(layers)}


def mirrors(cells: int | None = None) -> dict[str, str]:
    """The environment in which the first so many cells of paged layers have a mirror; None: as many
    as fit. Beside `hot`, and after it.
    """
    return {"OLLAMA_PAGED_MIRROR": "" if cells is None else str(cells)}


def answers(server: Server, model: str, seed: object, **options: object) -> list[Result]:
    """Cold, from memory, and gone on with."""
    prompt = text(PROMPT_TOKENS, seed)
    cold = server.generate(model, prompt, **options)
    hit = server.generate(model, prompt, **options)
    longer = prompt + hit.text + text(30, ("more", seed))
    return [cold, hit, server.generate(model, longer, **options)]


def cpu_answers(
    binary: Path, models: Path, folder: Path, model: str, seed: object, **env: str
) -> list[Result]:
    with Server(binary, folder, models, env=CPU | env) as server:
        return answers(server, model, seed)


def assert_all_same(mine: list[Result], theirs: list[Result], what: object = "") -> None:
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.tokens
        assert_same(one, other, (what, number))
