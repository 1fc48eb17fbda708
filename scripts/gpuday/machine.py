"""What a machine has of what a day with a GPU needs: the GPU, a CUDA toolkit or its wheels, and
tools to build with.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
SMI = "nvidia-smi"
_QUERY = ("name", "driver_version", "memory.total", "compute_cap", "pcie.link.gen.max")

Ask = Callable[..., str]  # a program and its arguments; what it says, or nothing


@dataclass(frozen=True, slots=True)
class GpuFacts:
    name: str
    driver: str
    memory_mib: int
    compute: str  # as 9.0
    pcie: str

    @property
    def arch(self) -> str:
        """As CMake writes it, machine code alone; upstream builds 90a for Hopper."""
        number = self.compute.replace(".", "")
        return f"{number}a-real" if number == "90" else f"{number}-real"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA compiler with its headers and libraries; `root` has bin/ and lib/ or lib64/."""

    nvcc: Path
    root: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])


def ask(*command: str | Path) -> str:
    """Empty if there is no such program, or it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus(ask: Ask = ask) -> list[GpuFacts]:
    """By the driver's own program, which answers for every GPU in a line."""
    found = []
    for line in ask(SMI, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader").splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(_QUERY) and (memory := re.match(r"\d+", words[2])):
            found.append(GpuFacts(words[0], words[1], int(memory[0]), words[3], words[4]))
    return found


def site_folders() -> list[Path]:
    """Where `nvidia/*` wheels may lie: of this Python, and of the `python3` on PATH."""
    named = [*site.getsitepackages(), *sys.path]
    other = ask("python3", "-c", "import site; print('\\n'.join(site.getsitepackages()))")
    named += other.splitlines()
    folders = [Path(name) for name in dict.fromkeys(named)]
    return [folder for folder in folders if (folder / "nvidia").is_dir()]


def toolkits(
    sites: Iterable[Path], ask: Ask = ask, which: Callable[[str], str | None] = shutil.which
) -> list[Toolkit]:
    """The compilers that work, the usual places first."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [Path(found)] if (found := which("nvcc")) else []
    candidates += [Path(home) / "bin/nvcc" for home in homes if home]
    for folder in sites:
        candidates += sorted(folder.glob("nvidia/*/bin/nvcc"))
    made: dict[Path, Toolkit] = {}
    for nvcc in candidates:
        if nvcc.is_file() and (said := re.search(r"release ([\d.]+)", ask(nvcc, "--version"))):
            real = nvcc.resolve()
            made.setdefault(real, Toolkit(real, real.parent.parent, said[1]))
    return list(made.values())


def libraries_of(toolkit: Toolkit) -> list[Path]:
    """Folders with its shared libraries."""
    below = ("lib64", "lib", "targets/x86_64-linux/lib")
    return [toolkit.root / name for name in below if (toolkit.root / name).is_dir()]


def look(work: Path, ask: Ask = ask) -> dict[str, Any]:
    """All of it, as JSON."""
    sites = site_folders()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    work.mkdir(parents=True, exist_ok=True)
    tools = ("cmake", "ninja", "make", "c++", "go", "compute-sanitizer", "ncu")
    return {
        "cpu": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory / GIB, 1),
        "disk_gib": round(shutil.disk_usage(work).free / GIB, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "gpus": [asdict(gpu) for gpu in gpus(ask)],
        "toolkits": [
            {"nvcc": str(one.nvcc), "root": str(one.root), "version": one.version}
            for one in toolkits(sites, ask)
        ],
        "wheels": sorted(
            {one.name for folder in sites for one in (folder / "nvidia").glob("[!_]*")}
        ),
        "tools": {name: found for name in tools if (found := shutil.which(name))},
    }


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    said = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return said[1] if said else platform.processor()


def words(facts: dict[str, Any]) -> list[str]:
    """Lines of a report."""
    gpus = [
        f"{one['name']}, {one['memory_mib']} MiB, CC {one['compute']}, driver {one['driver']}, "
        f"PCIe {one['pcie']}"
        for one in facts["gpus"]
    ]
    kits = [f"CUDA {one['version']} ({one['nvcc']})" for one in facts["toolkits"]]
    tools = ", ".join(f"{name} ({path})" for name, path in facts["tools"].items())
    return [
        f"- {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB of memory, "
        f"{facts['disk_gib']} GiB of disk, {facts['system']}, Python {facts['python']}",
        f"- GPUs: {'; '.join(gpus) or f'none ({SMI} does not answer)'}",
        f"- Toolkits: {'; '.join(kits) or 'none'}",
        f"- NVIDIA's wheels: {', '.join(facts['wheels']) or 'none'}",
        f"- Tools: {tools or 'none'}",
    ]
