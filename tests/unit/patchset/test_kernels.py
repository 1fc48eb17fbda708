from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import PatchConflict
from ollama_tiering.patchset import kernels, manifest


def library(root: Path, **files: str) -> Path:
    for name, text in {"core.h": "int core;\n", **files}.items():
        path = root / "paged_attn/cpu" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "paged_attn/paged_attn.h").write_text("int api;\n")
    (root / "paged_attn/cuda").mkdir(exist_ok=True)
    (root / "paged_attn/cuda/decode.h").write_text("int device;\n")
    return root


def test_the_headers_of_the_cpu_part_lie_below_the_backend_with_their_bytes(tmp_path: Path) -> None:
    files = kernels.overlay(library(tmp_path))
    assert files.pop(kernels.STAMP).startswith(b'#define EXACTATTN_HEADERS "')
    assert files == {
        f"{kernels.BACKEND}/paged_attn/cpu/core.h": b"int core;\n",
        f"{kernels.BACKEND}/paged_attn/paged_attn.h": b"int api;\n",
    }


def test_the_stamp_follows_every_name_and_byte_of_the_cpu_part(tmp_path: Path) -> None:
    """Go's cache sees the stamp only: two states of the kernels must never have the same one."""
    stamps = [kernels.overlay(library(tmp_path))[kernels.STAMP]]
    assert kernels.overlay(library(tmp_path))[kernels.STAMP] == stamps[0]
    library(tmp_path, **{"core.h": "int core; \n"})
    stamps.append(kernels.overlay(tmp_path)[kernels.STAMP])
    library(tmp_path, **{"core.h": "int core; \n", "mask.h": ""})
    stamps.append(kernels.overlay(tmp_path)[kernels.STAMP])
    (tmp_path / "paged_attn/cpu/mask.h").rename(tmp_path / "paged_attn/cpu/masks.h")
    stamps.append(kernels.overlay(tmp_path)[kernels.STAMP])
    assert len(set(stamps)) == 4
    (tmp_path / "paged_attn/cuda/decode.h").write_text("int other;\n")
    assert kernels.overlay(tmp_path)[kernels.STAMP] == stamps[-1]


def test_a_patch_set_with_the_adapter_and_without_kernels_is_refused(patches: Path) -> None:
    adapter = patches / "overlay" / kernels.ADAPTER
    adapter.parent.mkdir(parents=True)
    adapter.write_text("")
    with pytest.raises(PatchConflict, match="no kernels there"):
        manifest.load(patches)
    library(patches.parent / "csrc/include")
    loaded = manifest.load(patches)
    assert {kernels.ADAPTER, kernels.STAMP} < loaded.overlay.keys()


def test_a_changed_kernel_is_another_patch_set(patches: Path) -> None:
    adapter = patches / "overlay" / kernels.ADAPTER
    adapter.parent.mkdir(parents=True)
    adapter.write_text("")
    include = library(patches.parent / "csrc/include")
    before = manifest.load(patches).digest
    library(include, **{"core.h": "int changed;\n"})
    assert manifest.load(patches).digest != before


def test_an_installed_package_carries_the_headers(tmp_path: Path) -> None:
    package = tmp_path / "ollama_tiering"
    assert kernels.default_include(package / "_patches") == package / "_csrc/include"


def test_the_adapter_includes_the_stamp() -> None:
    adapter = manifest.load().overlay[kernels.ADAPTER].decode()
    assert f'#include "{Path(kernels.STAMP).name}"' in adapter
