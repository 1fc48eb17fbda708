"""Which GPUs a machine has, by a made-up /sys, /proc and /dev."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.patchset import gpus


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    return tmp_path


def device(
    root: Path, place: str, vendor: str, kind: str, driver: str = "", name: str = ""
) -> None:
    folder = root / "sys/bus/pci/devices" / place
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    (folder / "device").write_text("0x744c\n")
    if name:
        (folder / "product_name").write_text(f"{name}\n")
    if driver:
        target = root / "sys/bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(target)


def test_cards_of_three_vendors_with_their_drivers(root: Path) -> None:
    device(root, "0000:01:00.0", "0x10de", "0x030000", "nvidia")
    device(root, "0000:02:00.0", "0x1002", "0x038000", "amdgpu", "Radeon RX 7900 XTX")
    device(root, "0000:03:00.0", "0x8086", "0x030000")
    device(root, "0000:04:00.0", "0x8086", "0x020000", "e1000e")  # a network card
    device(root, "0000:05:00.0", "0x1234", "0x030000", "bochs")  # of a virtual machine
    information = root / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA GeForce RTX 3090\nIRQ: 1\n")
    version = root / "sys/module/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("570.86.15\n")
    assert list(map(str, gpus.here())) == [
        "NVIDIA NVIDIA GeForce RTX 3090, driver nvidia 570.86.15",
        "AMD Radeon RX 7900 XTX, driver amdgpu",
        "Intel 0x744c, no driver",
    ]


def test_in_a_container_the_drivers_device_is_enough(root: Path) -> None:
    assert gpus.here() == []
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()
    assert [one.vendor for one in gpus.here()] == ["AMD"]
    device(root, "0000:02:00.0", "0x1002", "0x030000", "amdgpu")
    assert [str(one) for one in gpus.here()] == ["AMD 0x744c, driver amdgpu"]
