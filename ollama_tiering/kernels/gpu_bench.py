"""What the GPU kernels reach, as ratios to what the same GPU does at best.

Every figure is the best of several; times are of CUDA events. K/V of a measurement is spread over
so many layers that the GPU's own cache does not hold it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

from ollama_tiering.kernels.gpu import GpuAttention, GpuDevice, GpuRows, cupy
from ollama_tiering.kernels.gpu_ring import ColdRun, GpuRing, staged_rows
from ollama_tiering.kernels.shape import Shape

REPEATS = 5
WORKING_SET = 1 << 30  # bytes, larger than any cache
N_KV_HEAD, D = 8, 128
ROW_BYTES = 2 * D  # f16
CELL_BYTES = 2 * N_KV_HEAD * ROW_BYTES  # K and V of one layer


@dataclass(frozen=True)
class Ratio:
    """A measured ratio and what it should be compared with."""

    name: str
    value: float
    bound: float
    at_least: bool  # else at most

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def seconds(work: Callable[[], None]) -> float:
    """Best time of `work` on the current stream."""
    xp = cupy()
    work()
    best = math.inf
    for _ in range(REPEATS):
        start, end = xp.cuda.Event(), xp.cuda.Event()
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, xp.cuda.get_elapsed_time(start, end) / 1e3)
    return best


def read_bytes_per_s() -> float:
    """Device read bandwidth: a sum over a buffer."""
    x = cupy().ones(WORKING_SET // 4, dtype="float32")
    return float(WORKING_SET / seconds(lambda: x.sum()))


def pinned_bytes_per_s(piece_bytes: int) -> float:
    """Host to device from pinned memory, in pieces of the ring's size."""
    xp = cupy()
    host = xp.cuda.alloc_pinned_memory(piece_bytes)
    to = xp.empty(piece_bytes, dtype="uint8")
    stream = xp.cuda.get_current_stream()
    address = ctypes.c_void_p(host.ptr)

    def copy() -> None:
        for _ in range(32):
            to.data.copy_from_host_async(address, piece_bytes, stream)

    return 32 * piece_bytes / seconds(copy)


def rows_of(ring: GpuRing, runs: list[ColdRun], piece_cells: int) -> list[tuple[GpuRows, ...]]:
    """K and V of each run, where the ring puts them."""
    return [
        tuple(staged_rows(t, piece_cells, N_KV_HEAD, ROW_BYTES) for t in pair)
        for pair in ring.tables(runs)
    ]


def overlapped(
    ring: GpuRing, runs: list[ColdRun], use: Callable[[int], None]
) -> tuple[float, float]:
    """Seconds of copies and kernels together; of the longer of the two alone."""

    def use_all() -> None:
        for i in range(len(runs)):
            use(i)

    whole = seconds(lambda: ring.deliver(runs, use))
    copies = seconds(lambda: ring.deliver(runs, lambda i: None))
    return whole, max(copies, seconds(use_all))


def hot_layers(n_cells: int) -> list[tuple[GpuRows, GpuRows]]:
    xp = cupy()
    n_layers = max(1, WORKING_SET // (n_cells * CELL_BYTES))
    layers = []
    for _ in range(n_layers):
        rows = [
            GpuRows.of_pages(
                [xp.random.standard_normal((n_cells, N_KV_HEAD, D), dtype="float32").astype("f2")],
                n_cells,
                N_KV_HEAD * ROW_BYTES,
                ROW_BYTES,
            )
            for _ in range(2)
        ]
        layers.append((rows[0], rows[1]))
    return layers


def hot_decode(group: int, n_cells: int, read_rate: float) -> Ratio:
    """VRAM decode of one query over n_cells: K/V bytes per second / device read bandwidth."""
    xp = cupy()
    layers = hot_layers(n_cells)
    shape = Shape(N_KV_HEAD * group, N_KV_HEAD, D, D, 1, n_cells)
    q = xp.random.standard_normal((1, shape.n_head, D), dtype="float32")
    with GpuAttention(shape, n_slots=512) as attention:

        def work() -> None:
            for k, v in layers:
                attention.run(q, k, v, n_cells)

        rate = len(layers) * n_cells * CELL_BYTES / seconds(work)
    return Ratio(f"VRAM decode, G={group}, {n_cells} keys", rate / read_rate, 0.70, True)


def cold_decode(
    group: int, n_cells: int, piece_cells: int = 1024, n_layers: int = 8
) -> list[Ratio]:
    """Decode over n_cells of pinned host memory per layer: bytes per second / pinned copy rate, and
    time / max(copies alone, kernels alone)."""
    xp = cupy()
    piece_bytes = piece_cells * CELL_BYTES
    n_pieces = n_cells // piece_cells
    memory = [xp.cuda.alloc_pinned_memory(piece_bytes) for _ in range(n_pieces)]
    k_bytes = piece_bytes // 2
    runs = [ColdRun(m, piece_cells, k_bytes, piece_bytes) for m in memory] * n_layers
    shape = Shape(N_KV_HEAD * group, N_KV_HEAD, D, D, 1, piece_cells)
    q = xp.random.standard_normal((1, shape.n_head, D), dtype="float32")
    device = GpuDevice()
    ring = GpuRing(device, 4, piece_bytes)
    splits = 8
    try:
        with GpuAttention(shape, n_slots=n_pieces * splits, device=device) as attention:
            rows = rows_of(ring, runs, piece_cells)

            def use(i: int) -> None:
                at = i % n_pieces
                attention.attend(
                    q, rows[i][0], rows[i][1], piece_cells, first=at * splits, n_splits=splits
                )
                if at == n_pieces - 1:
                    attention.combine(1, n_pieces * splits)

            whole, longer = overlapped(ring, runs, use)
    finally:
        ring.close()
        device.close()
    pinned = pinned_bytes_per_s(piece_bytes)
    name = f"cold decode, G={group}, {n_cells} keys"
    return [
        Ratio(f"{name}: rate / pinned copy", len(runs) * piece_bytes / whole / pinned, 0.95, True),
        Ratio(f"{name}: time / max(copy, compute)", whole / longer, 1.10, False),
    ]


def cold_prefill(group: int, n_cells: int, n_q: int = 512, piece_cells: int = 1024) -> Ratio:
    """Prefill of n_q queries over cold pages, each staged once: time / max(stream, compute)."""
    xp = cupy()
    piece_bytes = piece_cells * CELL_BYTES
    memory = [xp.cuda.alloc_pinned_memory(piece_bytes) for _ in range(n_cells // piece_cells)]
    runs = [ColdRun(m, piece_cells, piece_bytes // 2, piece_bytes) for m in memory]
    shape = Shape(N_KV_HEAD * group, N_KV_HEAD, D, D, n_q, piece_cells)
    q = xp.random.standard_normal((n_q, shape.n_head, D), dtype="float32")
    device = GpuDevice()
    ring = GpuRing(device, 4, piece_bytes)
    try:
        with GpuAttention(shape, n_slots=1, device=device) as attention:
            rows = rows_of(ring, runs, piece_cells)

            def use(i: int) -> None:
                attention.attend(q, rows[i][0], rows[i][1], piece_cells, join=i > 0)

            whole, longer = overlapped(ring, runs, use)
    finally:
        ring.close()
        device.close()
    name = f"cold prefill, G={group}, {n_q} queries, {n_cells} keys: time / max(stream, compute)"
    return Ratio(name, whole / longer, 1.15, False)


def all_ratios() -> list[Ratio]:
    """Row 7."""
    read_rate = read_bytes_per_s()
    ratios = [
        hot_decode(group, n_cells, read_rate)
        for group in (1, 4, 5, 8)
        for n_cells in (8192, 32768, 131072)
    ]
    ratios += cold_decode(5, 16384)
    ratios.append(cold_prefill(5, 16384))
    return ratios
