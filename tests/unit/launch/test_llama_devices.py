"""With which variables llama-server is started for a GPU: those that `ollama` v0.32.15 sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.launch import llama_devices


def lib(folder: Path) -> Path:
    """As in Ollama's release, behind links as in a tree."""
    installed, tree = folder / "installed", folder / "tree"
    for name in (
        "libggml-base.so.0",
        "libggml-cpu-haswell.so",
        "cuda_v12/libcudart.so.12",
        "cuda_v12/libggml-cuda.so",
        "cuda_v13/libggml-cuda.so",
        "rocm/libggml-base.so",
        "rocm/libggml-cpu-x64.so",
        "rocm/libggml-hip.so",
        "rocm/libggml-zz.so",
        "mlx/libmlx.so",
    ):
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).touch()
    tree.mkdir()
    for path in installed.iterdir():
        (tree / path.name).symlink_to(path)
    return tree


def test_one_library_of_each_folder_and_none_for_cpus(tmp_path: Path) -> None:
    wanted = ["cuda_v12/libggml-cuda.so", "cuda_v13/libggml-cuda.so", "rocm/libggml-hip.so"]
    assert llama_devices.backends(lib(tmp_path)) == list(map(Path, wanted))


def test_its_own_folder_comes_first_then_the_gpus_then_what_the_person_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/usr/local/lib/ollama::{tmp_path}")
    assert llama_devices.environment(tmp_path, Path("cuda_v12/libggml-cuda.so")) == {
        "LD_LIBRARY_PATH": f"{tmp_path}:{tmp_path}/cuda_v12:/usr/local/lib/ollama",
        "GGML_BACKEND_PATH": f"{tmp_path}/cuda_v12/libggml-cuda.so",
    }
    assert llama_devices.environment(tmp_path, None)["GGML_BACKEND_PATH"] is None
