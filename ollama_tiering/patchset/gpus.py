"""The GPUs of this machine: by the PCI bus, and by what their drivers leave in /dev."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_DISPLAY = "0x03"  # how the class of a display controller begins, with a screen or without
_KFD = "dev/kfd"  # of AMD's driver; in a container the bus may not be seen
ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. `model` is what its driver calls it, else its number; without a driver it is empty."""

    vendor: str
    model: str
    driver: str

    def __str__(self) -> str:
        driver = f"driver {self.driver}" if self.driver else "no driver"
        return f"{self.vendor} {self.model}, {driver}"


def here() -> list[Card]:
    """Those that Ollama may use."""
    root, found = ROOT, []
    for place in sorted(root.glob("sys/bus/pci/devices/*")):
        vendor = VENDORS.get(_read(place / "vendor"), "")
        if vendor and _read(place / "class").startswith(_DISPLAY):
            found.append(Card(vendor, _model(root, place), _driver(root, place)))
    if (root / _KFD).exists() and all(one.vendor != "AMD" for one in found):
        found.append(Card("AMD", f"GPU of /{_KFD}", "amdgpu"))
    return found


def _model(root: Path, place: Path) -> str:
    for line in _read(root / f"proc/driver/nvidia/gpus/{place.name}/information").splitlines():
        if line.startswith("Model:"):
            return line.partition(":")[2].strip()
    return _read(place / "product_name") or _read(place / "device")


def _driver(root: Path, place: Path) -> str:
    """Its name, and the version where it has one of its own."""
    link = place / "driver"
    name = link.resolve().name if link.exists() else ""
    version = _read(root / f"sys/module/{name}/version") if name else ""
    return f"{name} {version}".strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
