"""GGML's libraries for GPUs beside a build, out of a stock Ollama (stock.py), where GGML's loader
finds them: `cuda_*`, `rocm` and `vulkan` in `build/lib/ollama` beside the program.

GGML's own libraries are copied: an update of the stock Ollama must not put another version below
the build. The vendors', which are larger and keep their interface, are links. Beside each
libggml-cuda lies the shim (csrc/shim), which the loader prefers while OLLAMA_PAGED_ATTN=1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ollama_tiering.patchset import elf, release_archive, shim
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.stock import BASE, KINDS, LIBRARY, GpuFolder, Installation
from ollama_tiering.system.files import without_links

BELOW = Path("build/lib/ollama")  # from the folder of a program that was built
SHIM = shim.LIBRARY
RECORD = "gpu.json"  # in the folder of the build: what was put there, of what
FORMAT = 1


def put(
    found: Installation, folder: Path, tree: Path, report: Report, *, own_base: bool = False
) -> None:
    """Libraries of `found` beside the program of `tree`; those that are there already stay.
    `folder` has the record. With `own_base` the build has made GGML's base itself.
    """
    target, record = tree / BELOW, folder / RECORD
    wanted: dict[str, Any] = {
        "format": FORMAT,
        "place": str(found.place.absolute()),
        "root": str(found.root),
        "files": found.state(),
        "base": not own_base,
        "folders": [one.name for one in found.folders],
    }
    old = read_record(record)
    there = all((target / one.name / one.library.name).exists() for one in found.folders)
    if old != wanted or not there:
        record.unlink(missing_ok=True)
        with report.stage(f"putting libraries for GPUs of {found.place} beside the build"):
            target.mkdir(parents=True, exist_ok=True)
            kinds = [f"{kind}*" for kind in KINDS]
            for name in (*kinds, ".filling-*"):  # also of a run that was killed
                for path in target.glob(name):
                    shutil.rmtree(path)
            if not own_base:
                _replace(found.base, target / _soname(found))
            for one in found.folders:
                _fill(one, target)
        record.write_text(json.dumps(wanted), encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """Empty where there is none, or none that this version wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if content["format"] == FORMAT else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def of_stock(program: Path) -> dict[str, Any]:
    """The record of a program that was built with libraries of a stock Ollama; else empty. That of
    an older `tiering` lies above it.
    """
    return read_record(program.parent / RECORD) or read_record(program.parent.parent / RECORD)


def changed_since(record: dict[str, Any]) -> list[str]:
    """Files of the stock Ollama that are gone, or not what they were when the record was made."""
    changed = []
    for name, size, modified in record.get("files", []):
        try:
            info = Path(name).stat()
        except OSError:
            changed.append(name)
            continue
        if [info.st_size, info.st_mtime_ns] != [size, modified]:
            changed.append(name)
    return changed


def _fill(one: GpuFolder, target: Path) -> None:
    """The folder appears whole."""
    with tempfile.TemporaryDirectory(dir=target, prefix=".filling-") as scratch:
        fresh = Path(scratch, one.name)
        fresh.mkdir()
        _replace(one.library, fresh / one.library.name)
        for path in one.others:
            (fresh / path.name).symlink_to(without_links(path))
        fresh.rename(target / one.name)


def _replace(source: Path, target: Path) -> None:
    """A copy of its own, whole or not at all. What was unpacked out of an archive is never changed,
    and shares its bytes.
    """
    real = without_links(source)
    fresh = target.with_name(f".{target.name}.new")
    fresh.unlink(missing_ok=True)
    if without_links(release_archive.folder()) in real.parents:
        with contextlib.suppress(OSError):  # a file system without such links
            os.link(real, fresh)
    if not fresh.exists():
        shutil.copy2(real, fresh)
    fresh.replace(target)


def _soname(found: Installation) -> str:
    """The name by which GGML's libraries ask for the base."""
    needed = elf.read(found.folders[0].library).needed
    return next((name for name in needed if name.startswith(BASE)), BASE)


# --- what is loaded -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """What GGML loads out of one folder; `broken`: links that lead nowhere."""

    folder: Path
    library: str
    broken: tuple[str, ...]


def loaded_by(program: Path, paged: bool) -> list[Loaded]:
    """For GPUs, by a program: its folders of libraries as Ollama and GGML look for them (v0.16.3
    ml/path.go, discover/runner.go, ggml-backend-reg.cpp:539). Empty: the CPU alone.
    """
    program = without_links(program)
    places = (program.parent.parent / "lib/ollama", program.parent / BELOW)
    root = next((place for place in places if place.exists()), None)
    if root is None:
        return []
    found = []
    for library, _ in KINDS.values():
        paths = [*root.glob(f"*/{library}"), root / library]
        for folder in sorted({path.parent for path in paths if os.path.lexists(path)}):
            with_shim = paged and library == LIBRARY and (folder / SHIM).is_file()
            broken = sorted(p.name for p in folder.iterdir() if p.is_symlink() and not p.exists())
            found.append(Loaded(folder, SHIM if with_shim else library, tuple(broken)))
    return found
