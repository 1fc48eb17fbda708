"""What the GPU kernels reach, as ratios to what the same GPU does at best.

Every figure is the best of several; times are of CUDA events. K/V of a measurement is spread over
enough layers that the GPU's own cache does not hold it. Kernels over VRAM are replayed as a graph:
at 10 µs of kernel a call, Python would be what is measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.gpu import GpuAttention, GpuRows
from ollama_tiering.kernels.gpu_device import GpuArray, GpuDevice
from ollama_tiering.kernels.gpu_ring import ColdRun, GpuRing
from ollama_tiering.kernels.shape import Shape


@dataclass(frozen=True)
class Sizes:
    """What is measured. `working_set_bytes`: larger than any cache; less on a GPU with less."""

    working_set_bytes: int = 1 << 30
    n_kv_head: int = 8
    d: int = 128
    repeats: int = 5
    piece_cells: int = 1024  # of a cold piece
    cold_layers: int = 8

    @property
    def row_bytes(self) -> int:
        return 2 * self.d  # f16

    @property
    def cell_bytes(self) -> int:
        """K and V of one layer."""
        return 2 * self.n_kv_head * self.row_bytes

    def shape(self, group: int, n_q: int, n_cells: int) -> Shape:
        return Shape(self.n_kv_head * group, self.n_kv_head, self.d, self.d, n_q, n_cells)


@dataclass(frozen=True)
class BoundedRatio:
    """A measured ratio and what it should be compared with."""

    name: str
    value: float
    bound: float
    at_least: bool  # else at most

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def fitting(device: GpuDevice, sizes: Sizes) -> Sizes:
    """Sizes with a working set of at most a quarter of the GPU's memory."""
    most = min(sizes.working_set_bytes, device.memory_bytes // 4)
    return replace(sizes, working_set_bytes=most)


def read_bytes_per_s(device: GpuDevice, sizes: Sizes) -> float:
    """Device read bandwidth: csrc/cuda/read.cu over a buffer of zeros."""
    driver = device.driver
    cubin = nvrtc.read_kernel(device.arch)
    module = driver.handle("cuModuleLoadData", cubin)
    try:
        function = driver.handle("cuModuleGetFunction", module, b"pa_read")
        buffer, out = device.alloc(sizes.working_set_bytes), device.empty((1,), np.uint32)
        driver.call("cuMemsetD8Async", buffer.address, 0, buffer.n_bytes, device.stream)
        arguments = (
            ctypes.c_uint64(buffer.address),
            ctypes.c_uint64(buffer.n_bytes // 16),
            ctypes.c_uint64(out.address),
        )
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(a) for a in arguments))
        n_blocks = 16 * device.attribute("multiprocessors")

        def work() -> None:
            grid, block = (n_blocks, 1, 1), (256, 1, 1)
            driver.call("cuLaunchKernel", function, *grid, *block, 0, device.stream, pointers, None)

        return buffer.n_bytes / device.seconds(work, sizes.repeats)
    finally:
        device.synchronize()
        driver.call("cuModuleUnload", module)


def pinned_bytes_per_s(device: GpuDevice, sizes: Sizes) -> float:
    """Host to device from pinned memory, in pieces of the ring's size."""
    n_bytes = sizes.piece_cells * sizes.cell_bytes
    host, to = device.pinned(n_bytes), device.alloc(n_bytes)

    def copies() -> None:
        for _ in range(32):
            device.driver.call(
                "cuMemcpyHtoDAsync_v2", to.address, host.address, n_bytes, device.stream
            )

    return 32 * n_bytes / device.seconds(copies, sizes.repeats)


def random_rows(device: GpuDevice, sizes: Sizes, n_cells: int) -> GpuRows:
    values = np.random.default_rng(1).standard_normal(
        (n_cells, sizes.n_kv_head, sizes.d), np.float32
    )
    return GpuRows.of_pages(device, [values.astype(np.float16).view(np.uint8)])


def queries(device: GpuDevice, shape: Shape) -> GpuArray:
    random = np.random.default_rng(2)
    return device.upload(random.standard_normal((shape.max_q, shape.n_head, shape.d_k), np.float32))


def hot_decode(
    device: GpuDevice,
    sizes: Sizes,
    group: int,
    n_cells: int,
    *,
    masked: bool = False,
    tensor_cores: bool = False,
) -> BoundedRatio:
    """VRAM decode of one query over n_cells: K/V bytes per second / device read bandwidth.
    `masked`: by positions, as a cache of several conversations asks. `tensor_cores`: where the
    launcher takes f32 for so few rows, so that the two can be compared."""
    read_rate = read_bytes_per_s(device, sizes)
    n_layers = max(1, sizes.working_set_bytes // (n_cells * sizes.cell_bytes))
    layers = [
        (random_rows(device, sizes, n_cells), random_rows(device, sizes, n_cells))
        for _ in range(n_layers)
    ]
    shape = sizes.shape(group, 1, n_cells)
    q = queries(device, shape)
    masks: dict[str, GpuArray] = {}
    if masked:
        positions = np.arange(n_cells, dtype=np.int32)
        masks = {
            "cell_pos": device.upload(positions),
            "query_pos": device.upload(positions[-1:]),
        }
    with GpuAttention(shape, device, n_slots=512) as attention:
        if tensor_cores:
            attention.decode_rows(0)
        out = device.empty((1, shape.n_head, shape.d_v), np.float32)

        def work() -> None:
            attention.prepare(n_cells, **masks)
            for k, v in layers:
                attention.run(q, k, v, n_cells, out=out, **masks)

        work()
        graph = device.graph(work)
        seconds = device.seconds(graph.launch, sizes.repeats)
        graph.close()
    rate = n_layers * n_cells * sizes.cell_bytes / seconds
    how = f"{', positions' if masked else ''}{', tensor cores' if tensor_cores else ''}"
    name = f"VRAM decode, G={group}, {n_cells} keys{how}"
    return BoundedRatio(f"{name}: rate / read", rate / read_rate, 0.70, at_least=True)


def overlapped(
    device: GpuDevice, sizes: Sizes, ring: GpuRing, runs: list[ColdRun], use: Callable[[int], None]
) -> tuple[float, float]:
    """Seconds of copies and kernels together; of the longer of the two alone."""

    def use_all() -> None:
        for i in range(len(runs)):
            use(i)

    def best(work: Callable[[], None]) -> float:
        return device.seconds(work, sizes.repeats)

    whole = best(lambda: ring.deliver(runs, use))
    copies = best(lambda: ring.deliver(runs, lambda i: None))
    return whole, max(copies, best(use_all))


def cold_runs(device: GpuDevice, sizes: Sizes, n_cells: int) -> list[ColdRun]:
    """Pinned pieces that hold zeros: what is copied makes no difference to the time."""
    n_bytes = sizes.piece_cells * sizes.cell_bytes
    runs = []
    for _ in range(n_cells // sizes.piece_cells):
        memory = device.pinned(n_bytes)
        memory.bytes[:] = 0
        runs.append(ColdRun(memory, sizes.piece_cells, n_bytes // 2, n_bytes))
    return runs


def cold_decode(device: GpuDevice, sizes: Sizes, group: int, n_cells: int) -> list[BoundedRatio]:
    """Decode over n_cells of pinned host memory per layer: bytes per second / pinned copy rate, and
    time / max(copies alone, kernels alone)."""
    one_layer = cold_runs(device, sizes, n_cells)
    n_pieces, splits = len(one_layer), 8
    runs = one_layer * sizes.cold_layers
    shape = sizes.shape(group, 1, sizes.piece_cells)
    q = queries(device, shape)
    piece_bytes = runs[0].n_bytes
    with (
        GpuRing(device, 4, piece_bytes) as ring,
        GpuAttention(shape, device, n_slots=n_pieces * splits) as attention,
    ):
        rows = ring.rows(runs, sizes.row_bytes, sizes.n_kv_head)
        out = device.empty((1, shape.n_head, shape.d_v), np.float32)

        def use(i: int) -> None:
            at, (k, v) = i % n_pieces, rows[i]
            attention.attend(q, k, v, sizes.piece_cells, first=at * splits, n_splits=splits)
            if at == n_pieces - 1:
                attention.combine(1, n_pieces * splits, out=out)

        whole, longer = overlapped(device, sizes, ring, runs, use)
        ring.wait()
    rate = len(runs) * piece_bytes / whole / pinned_bytes_per_s(device, sizes)
    name = f"cold decode, G={group}, {n_cells} keys"
    return [
        BoundedRatio(f"{name}: rate / pinned copy", rate, 0.95, at_least=True),
        BoundedRatio(f"{name}: time / max(copy, compute)", whole / longer, 1.10, at_least=False),
    ]


def cold_prefill(
    device: GpuDevice, sizes: Sizes, group: int, n_cells: int, n_q: int = 512
) -> BoundedRatio:
    """Prefill of n_q queries over cold pages, each staged once: time / max(stream, compute)."""
    runs = cold_runs(device, sizes, n_cells)
    shape = sizes.shape(group, n_q, sizes.piece_cells)
    q = queries(device, shape)
    with (
        GpuRing(device, 4, runs[0].n_bytes) as ring,
        GpuAttention(shape, device, n_slots=1) as attention,
    ):
        rows = ring.rows(runs, sizes.row_bytes, sizes.n_kv_head)

        def use(i: int) -> None:
            k, v = rows[i]
            attention.attend(q, k, v, sizes.piece_cells, join=i > 0)

        whole, longer = overlapped(device, sizes, ring, runs, use)
        ring.wait()
    name = f"cold prefill, G={group}, {n_q} queries, {n_cells} keys: time / max(stream, compute)"
    return BoundedRatio(name, whole / longer, 1.15, at_least=False)
