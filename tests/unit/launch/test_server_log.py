"""What the server's log says of GPUs and plans: lines as Ollama v0.16.3 writes them."""

from __future__ import annotations

import pytest

from ollama_tiering.launch import server_log
from ollama_tiering.launch.server_log import LoggedGpu

MIB, GIB = 1 << 20, 1 << 30
LISTENS = 'time=x level=INFO source=routes.go:1718 msg="Listening on 127.0.0.1:4 (version 0.16.3)"'
GPU = (
    'time=x level=INFO source=types.go:42 msg="inference compute" id=GPU-1 filter_id="" '
    'library=CUDA compute=8.9 name=CUDA0 description="A card" libdirs=ollama,cuda_v13 '
    'driver=13.0 pci_id=0000:01:00.0 type=discrete total="24.0 GiB" available="23.5 GiB"'
)
CPU = (
    'time=x level=INFO source=types.go:60 msg="inference compute" id=cpu library=cpu compute="" '
    'name=cpu description=cpu libdirs=ollama driver="" pci_id="" type="" total="23.5 GiB" '
    'available="20.1 GiB"'
)


def memory(what: str, place: str, size: str, level: str = "INFO") -> str:
    return f'time=x level={level} source=device.go:240 msg="{what}" device={place} size="{size}"'


LOADING = 'time=x level=INFO source=server.go:757 msg="loading model" "model layers"=9 requested=-1'
LOADED = [
    LOADING,
    memory("kv cache", "CUDA0", "999.0 MiB", "DEBUG"),
    'time=x level=INFO source=ggml.go:482 msg="offloaded 4/9 layers to GPU"',
    'time=x level=INFO source=ggml.go:482 msg="offloaded 9/9 layers to GPU"',
    memory("model weights", "CUDA0", "15.5 MiB"),
    memory("model weights", "CPU", "130.0 KiB"),
    memory("kv cache", "CUDA0", "192.0 MiB"),
    memory("kv cache", "Pinned", "320.0 MiB"),
    memory("compute graph", "CUDA0", "162.5 MiB"),
    memory("compute graph", "CPU", "1.0 MiB"),
    memory("kv cache", "Pinned", "1.0 GiB", "DEBUG"),
]


def test_a_gpu_is_what_its_line_says() -> None:
    found = server_log.gpus("\n".join([LISTENS, GPU]))
    assert found == [LoggedGpu("GPU-1", "A card", "8.9", 24 * GIB, 47 * GIB // 2)]


def test_a_cpu_is_no_gpu_and_one_that_has_not_looked_is_not_one_that_found_none() -> None:
    assert server_log.gpus("\n".join([LISTENS, CPU])) == []
    assert server_log.gpus(LISTENS) is None
    assert server_log.gpus("\n".join([LISTENS, GPU, LISTENS])) is None  # started again


def test_a_card_of_another_maker_is_not_ours() -> None:
    assert server_log.gpus(GPU.replace("library=CUDA", "library=ROCm")) == []


def test_a_plan_is_what_was_loaded_and_not_what_was_tried() -> None:
    plan = server_log.load_plan("\n".join(LOADED))
    assert plan
    assert (plan.layers_on_gpu, plan.layers, plan.all_on_gpu) == (9, 9, True)
    assert plan.vram_bytes == 370 * MIB
    assert (plan.kv_vram_bytes, plan.pinned_bytes, plan.kv_cpu_bytes) == (192 * MIB, 320 * MIB, 0)


def test_the_plan_is_that_of_the_last_model() -> None:
    divided = [LOADING, 'level=INFO msg="offloaded 2/9 layers to GPU"']
    divided += [memory("kv cache", "CPU", "448.0 MiB"), memory("kv cache", "CUDA0", "64.0 MiB")]
    plan = server_log.load_plan("\n".join([*LOADED, *divided]))
    assert plan
    assert not plan.all_on_gpu
    assert (plan.kv_vram_bytes, plan.pinned_bytes, plan.kv_cpu_bytes) == (64 * MIB, 0, 448 * MIB)
    assert plan.weights == {}


@pytest.mark.parametrize("log", ["", "\n".join(LOADED[1:]), LOADING])
def test_without_a_loaded_model_there_is_no_plan(log: str) -> None:
    assert server_log.load_plan(log) is None


def test_sizes_are_in_ollamas_words() -> None:
    assert server_log.size_bytes("17 B") == 17
    assert server_log.size_bytes("1.5 GiB") == 3 * GIB // 2
    for text in ("1.5", "1.5 GB", "", "x MiB"):
        with pytest.raises(ValueError, match=r"size|float"):
            server_log.size_bytes(text)
