"""What the model of a GPU (gpu_model.py) says of the GPU that is here, to print beside what is
measured on it.
"""

from __future__ import annotations

from ollama_tiering.kernels import gpu_model, nvrtc
from ollama_tiering.kernels.gpu_device import GpuDevice
from ollama_tiering.kernels.gpu_model import GpuType, ThreadBlock
from ollama_tiering.kernels.nvrtc import Instance


def thread_blocks(instance: Instance, arch: int) -> dict[str, ThreadBlock]:
    """What a block of each kernel needs, by the assembler and by the image itself."""
    image = nvrtc.image(instance, arch)
    launches = image.launches(instance, arch)
    return {
        used.kernel: ThreadBlock(
            launches[used.kernel].threads,
            used.registers,
            launches[used.kernel].shared_bytes + used.shared_bytes,
        )
        for used in image.resources()
        if used.kernel in launches
    }


def resident(instance: Instance, arch: int) -> dict[str, int]:
    """Blocks of each kernel that a multiprocessor holds; empty for a chip that the model does not
    know.
    """
    if (limits := gpu_model.LIMITS.get(arch)) is None:
        return {}
    return {
        name: gpu_model.blocks_per_multiprocessor(limits, block)
        for name, block in thread_blocks(instance, arch).items()
    }


def share(
    device: GpuDevice, instance: Instance, *, group: int, n_cells: int, n_kv_head: int, rate: float
) -> float | None:
    """Of decode over VRAM, what part of the measured read rate (bytes per second) it should reach;
    None for a chip that the model does not know.
    """
    if device.arch not in gpu_model.LIMITS:
        return None
    gpu = GpuType(
        device.name,
        device.arch,
        device.attribute("multiprocessors"),
        device.attribute("clock_khz") / 1e6,
        rate / gpu_model.READ_SHARE / 1e9,
    )
    block = thread_blocks(instance, device.arch)["pa_decode"]
    made = gpu_model.decode(
        gpu, block, group=group, n_cells=n_cells, n_kv_head=n_kv_head, d=instance.d_k
    )
    return made.share
