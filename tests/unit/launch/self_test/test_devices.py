"""The devices of a tree are those of the installed llama-server. The servers are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import ResultDiffers, TieringError
from ollama_tiering.launch import llama_devices
from ollama_tiering.launch.self_test.devices import require_same_devices
from ollama_tiering.patchset.llama_server.installation import InstalledOllama

CUDA = Path("cuda_v12/libggml-cuda.so")
LISTED = (
    '#!/bin/sh\necho "Available devices:"\necho "  {device} $(basename "$GGML_BACKEND_PATH")"\n'
)


def side(folder: Path, device: str) -> InstalledOllama:
    lib = folder / "lib/ollama"
    (lib / "cuda_v12").mkdir(parents=True)
    (lib / "cuda_v12/libggml-cuda.so").touch()
    (lib / "llama-server").write_text(LISTED.replace("{device}", device))
    (lib / "llama-server").chmod(0o755)
    return InstalledOllama(folder / "bin/ollama", lib)


def test_the_same_devices(tmp_path: Path) -> None:
    require_same_devices(side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU"))


def test_another_device(tmp_path: Path) -> None:
    with pytest.raises(ResultDiffers, match=r"GPU.*, ours .*CPU"):
        require_same_devices(side(tmp_path / "a", "GPU"), side(tmp_path / "b", "CPU"))


def test_another_device_with_a_library_for_gpus(tmp_path: Path) -> None:
    installed, tree = side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU")
    tree.server.write_text(
        '#!/bin/sh\necho "Available devices:"\n[ -z "$GGML_BACKEND_PATH" ] && '
        'echo "  GPU " || exit 0\n'
    )
    with pytest.raises(ResultDiffers, match=r"with cuda_v12/libggml-cuda\.so"):
        require_same_devices(installed, tree)


def test_memory_that_is_free_is_another_in_each_run(tmp_path: Path) -> None:
    gpu = "CUDA0: NVIDIA GeForce RTX 3090 (24081 MiB, {} MiB free)"
    sides = [side(tmp_path / free, "") for free in ("23456", "23455")]
    for one in sides:
        free = one.lib.parents[1].name
        one.server.write_text(
            f'#!/bin/sh\necho "Available devices:"\necho "  {gpu.format(free)}"\n'
        )
    assert require_same_devices(*sides) == [None, CUDA]
    sides[1].server.write_text(sides[1].server.read_text().replace("3090", "4090"))
    with pytest.raises(ResultDiffers, match="RTX 4090"):
        require_same_devices(*sides)


def test_a_gpu_is_tested_with_the_library_that_finds_it(tmp_path: Path) -> None:
    """BLAS is listed as a device without memory."""
    text = (
        '#!/bin/sh\necho "Available devices:"\necho "  BLAS: OpenBLAS (0 MiB, 0 MiB free)"\n'
        '[ -n "$GGML_BACKEND_PATH" ] && echo "  CUDA0: GPU (8 MiB, 7 MiB free)"\nexit 0\n'
    )
    sides = [side(tmp_path / name, "") for name in "ab"]
    for one in sides:
        one.server.write_text(text)
    assert require_same_devices(*sides) == [CUDA]


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    installed, tree = side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU")
    tree.server.write_text("#!/bin/sh\necho undefined symbol >&2; exit 127\n")
    with pytest.raises(ResultDiffers, match="undefined symbol"):
        require_same_devices(installed, tree)


def test_a_server_that_hangs_is_said_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_devices, "LIST_SECONDS", 0.2)
    installed, tree = side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU")
    tree.server.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(TieringError, match=r"b/.*--list-devices did not end within"):
        require_same_devices(installed, tree)
