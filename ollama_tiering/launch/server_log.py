"""What Ollama's log says of the GPUs that it found, and of the plan by which it loaded a model.

The lines are those of v0.16.0 to v0.24.0: discover/types.go (`inference compute`), ml/device.go
(`kv cache`, `model weights`, `compute graph`) and ml/backend/ggml/ggml.go (`offloaded`). Sizes are
as exact as the log has them: one digit behind the point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

CPU, PINNED = "CPU", "Pinned"  # places of K/V that are no GPU

_COMPUTE = 'msg="inference compute"'
_LOADING = 'msg="loading model"'
_FIELD = re.compile(r'(\w+)=(?:"([^"]*)"|(\S+))')
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_MEMORY = re.compile(r'msg="(model weights|kv cache|compute graph)" device=(\S+) size="([^"]+)"')
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class LoggedGpu:
    """`description` is what the GPU's library calls it."""

    id: str
    description: str
    compute: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The parts of a loaded model. Bytes by place: CUDA0, …, Pinned, CPU."""

    layers_on_gpu: int
    layers: int  # the output counts as one
    weights: dict[str, int] = field(default_factory=dict)
    kv: dict[str, int] = field(default_factory=dict)
    graph: dict[str, int] = field(default_factory=dict)

    @property
    def all_on_gpu(self) -> bool:
        return self.layers_on_gpu == self.layers > 0

    @property
    def vram_bytes(self) -> int:
        """Weights, K/V and working memory on all GPUs."""
        return sum(map(_on_gpus, (self.weights, self.kv, self.graph)))

    @property
    def kv_vram_bytes(self) -> int:
        return _on_gpus(self.kv)

    @property
    def pinned_bytes(self) -> int:
        return self.kv.get(PINNED, 0)

    @property
    def kv_cpu_bytes(self) -> int:
        """K/V of layers that the CPU computes."""
        return self.kv.get(CPU, 0)


def gpus(log: str) -> list[LoggedGpu] | None:
    """The NVIDIA GPUs that the server found at its last start; None while it has not looked yet."""
    by_id: dict[str, LoggedGpu] = {}
    looked = False
    for line in log.splitlines():
        if "Listening on" in line:
            looked = False
            by_id.clear()
        if _COMPUTE not in line:
            continue
        looked = True
        fields = {name: quoted or plain for name, quoted, plain in _FIELD.findall(line)}
        if fields.get("library", "").upper() == "CUDA":
            total, free = size_bytes(fields["total"]), size_bytes(fields["available"])
            gpu = LoggedGpu(fields["id"], fields["description"], fields["compute"], total, free)
            by_id[gpu.id] = gpu
    return list(by_id.values()) if looked else None


def load_plan(log: str) -> LoadPlan | None:
    """Reads it for the model that was loaded last; None if the log has none that was loaded."""
    _, loading, last = log.rpartition(_LOADING)
    offloaded = _OFFLOADED.findall(last)
    if not loading or not offloaded:
        return None
    parts: dict[str, dict[str, int]] = {"model weights": {}, "kv cache": {}, "compute graph": {}}
    for line in last.splitlines():
        # at the level DEBUG the server also tells of plans that it gave up
        if "level=INFO" in line and (memory := _MEMORY.search(line)):
            parts[memory[1]][memory[2]] = size_bytes(memory[3])
    on_gpu, layers = map(int, offloaded[-1])
    return LoadPlan(on_gpu, layers, *parts.values())


def size_bytes(text: str) -> int:
    """Parses Ollama's words for a size, as in `627.5 MiB`. ValueError for anything else."""
    number, _, unit = text.partition(" ")
    if unit not in _UNITS:
        raise ValueError(f"no size: {text!r}")
    return round(float(number) * _UNITS[unit])


def _on_gpus(sizes: dict[str, int]) -> int:
    return sum(size for place, size in sizes.items() if place not in (CPU, PINNED))
