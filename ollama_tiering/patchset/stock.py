"""The user's own Ollama, from which a build takes libggml-cuda: where it is, whether it fits.

GGML's backend interface has no version that would say what Ollama changed in it. So a stock Ollama
fits a version that is patched if both have the same headers, by the names that upstream.toml pins,
or are the same version; and if its libraries fit each other, symbol by symbol.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.errors import MissingTool, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import elf, identity, release_archive
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from ollama_tiering.system.files import without_links

LIBRARY = "libggml-cuda.so"
BASE = "libggml-base.so"
OPTION = "stock"  # of --cuda, alone or as stock=PLACE
INTERFACE = "ml/backend/ggml/ggml/"  # what is pinned below it: the headers both sides compile
USUAL = (Path("/usr/local"), Path("/usr"))  # prefixes of install.sh and of distributions
RELEASES = "https://github.com/ollama/ollama/releases"

_NOBODY = {"OLLAMA_HOST": "127.0.0.1:1"}  # else a server that runs is asked, too


@dataclass(frozen=True, slots=True)
class CudaFolder:
    """One of `cuda_v12`, `cuda_v13`, …; `others` are NVIDIA's libraries beside GGML's."""

    name: str
    library: Path
    others: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Installation:
    """An Ollama with libraries for NVIDIA GPUs. `place`: what a person would call it; `root`: the
    folder of its libraries.
    """

    place: Path
    root: Path
    program: Path | None
    base: Path
    folders: tuple[CudaFolder, ...]

    def files(self) -> Iterator[Path]:
        yield self.base
        for folder in self.folders:
            yield from (folder.library, *folder.others)

    def state(self) -> list[list[str | int]]:
        """Changes with every file; quick. OSError where one is gone."""
        infos = [(path, path.stat()) for path in self.files()]
        return [[str(path), info.st_size, info.st_mtime_ns] for path, info in infos]

    def content(self) -> dict[str, str]:
        """What decides the bits of a result: GGML's code by its digest, NVIDIA's libraries by the
        full name, which has the version, and the size. Reads a gigabyte or two.
        """
        found = {}
        for folder in self.folders:
            with folder.library.open("rb") as file:
                found[folder.name] = hashlib.file_digest(file, "sha256").hexdigest()
            for path in folder.others:
                real = without_links(path)
                found[f"{folder.name}/{path.name}"] = f"{real.name} {real.stat().st_size}"
        return found


def place_of(option: str) -> Path | None:
    """PLACE of `stock=PLACE`; None: look for one."""
    place = option.partition("=")[2]
    return Path(place) if place else None


def find(option: str, report: Report) -> Installation:
    """The installation that the option means. MissingTool where there is none, UsageError where the
    place that it names is not what it should be.
    """
    place = place_of(option)
    if place is None:
        if found := usual():
            return found
        raise MissingTool(
            f"no Ollama with {LIBRARY} on PATH, in {' or '.join(map(str, USUAL))}",
            hint=f"install Ollama, or name its folder or a release archive of {RELEASES}: "
            "--cuda stock=PLACE",
        )
    if not place.exists():
        raise UsageError(f"{place}: no such file or directory", hint="--cuda stock=PLACE")
    root = release_archive.unpacked(place, report) if release_archive.is_archive(place) else place
    found = at(root, shown=place)
    if found is None:
        raise UsageError(
            f"{place}: no lib/ollama/cuda_v*/{LIBRARY} with a {BASE} there",
            hint="name the folder above bin and lib of an Ollama, or a release archive for Linux",
        )
    return found


def usual() -> Installation | None:
    """The Ollama on PATH, if it is not one of ours, else one in the usual places."""
    program = shutil.which("ollama")
    places = list(USUAL)
    if program and not identity.build_id_of(without_links(Path(program))):
        places.insert(0, without_links(Path(program)).parent.parent)
    return next((found for place in places if (found := at(place))), None)


def at(place: Path, shown: Path | None = None) -> Installation | None:
    """What lies there: `place` is the folder above bin and lib, that of the libraries, one of its
    cuda_v*, or a source tree with its build.
    """
    place = place.absolute()
    alone = place if place.name.startswith("cuda") and (place / LIBRARY).is_file() else None
    roots = [place.parent] if alone else [place / "lib/ollama", place / "build/lib/ollama", place]
    for root in roots:
        base = next((b for folder in (root, place) for b in sorted(folder.glob(f"{BASE}*"))), None)
        folders = [alone] if alone else sorted(p.parent for p in root.glob(f"cuda*/{LIBRARY}"))
        if not folders and (root / LIBRARY).is_file():  # as some distributions lay it out
            folders = [root]
        if base and folders:
            cuda = tuple(_folder(folder, root) for folder in folders)
            return Installation(shown or place, root, _program(root), base, cuda)
    return None


def check(found: Installation, tag: str, patchset: Patchset) -> str:
    """The stock version, where all of it fits `tag`. UnsupportedUpstream where it does not,
    MissingTool where a library that it needs is not here, UsageError where a file is damaged.
    """
    base = _read(found.base)
    for folder in found.folders:
        library = _read(folder.library)
        _require_processor(folder.library, library)
        if "ggml_backend_init" not in library.defined:
            raise UsageError(f"{folder.library}: it is no backend of GGML", hint=_again(tag))
        lacking = sorted(s for s in library.wanted if s.startswith(("ggml_", "gguf_")))
        if lacking := [s for s in lacking if s not in base.defined]:
            raise UnsupportedUpstream(
                f"{folder.library} needs {lacking[0]}, which {found.base.name} beside it has not: "
                "they are of two versions",
                hint=_again(tag),
            )
        _require_cuda(folder, library)
    version = version_of(found)
    _require_version(found, version, tag, patchset)
    return version


def version_of(found: Installation) -> str:
    """As its program says."""
    if found.program is None:
        raise UnsupportedUpstream(
            f"{found.place}: no `ollama` beside the libraries that would say their version",
            hint="name the folder above bin and lib of a whole Ollama, or a release archive",
        )
    try:
        lines = run(found.program, "--version", env=_NOBODY).tail
    except OSError as error:  # damaged, or for another processor
        lines = (str(error.strerror),)
    said = re.search(r"version is v?(\d[\w.+-]*)", "\n".join(lines))
    if said is None:
        last = lines[-1] if lines else "it says nothing"
        raise UnsupportedUpstream(
            f"{found.program} does not say its version: {last}",
            hint=f"install Ollama again, or name a release archive of {RELEASES}",
        )
    return said[1]


def interface(patchset: Patchset, tag: str) -> dict[str, str]:
    """The pinned names of GGML's headers; empty where the tag has none."""
    pin = patchset.pin(tag)
    places = pin.folders | pin.files if pin else {}
    return {path: oid for path, oid in places.items() if path.startswith(INTERFACE)}


def _require_version(found: Installation, version: str, tag: str, patchset: Patchset) -> None:
    own = f"v{version}"
    headers = interface(patchset, tag)
    if own == tag or (headers and headers == interface(patchset, own)):
        return
    other = f", or patch that version (--tag {own})" if patchset.pin(own) else ""
    raise UnsupportedUpstream(
        f"{found.place} is Ollama {version}, whose GGML is not known to fit {tag}",
        hint=f"name a release archive of {RELEASES}/tag/{tag} with --cuda stock=FILE{other}",
    )


def _require_processor(path: Path, library: elf.Library) -> None:
    machine = platform.machine().lower()
    if library.machine != elf.MACHINES.get(machine):
        raise UnsupportedUpstream(
            f"{path} is for another processor than this {machine}",
            hint=f"name the release archive for it, of {RELEASES}",
        )


def _require_cuda(folder: CudaFolder, library: elf.Library) -> None:
    """NVIDIA's libraries lie in the folder, as in a release, or the system has them. libcuda.so.1
    comes with the driver.
    """
    here = {path.name for path in folder.others}
    needed = [n for n in library.needed if n.startswith("libcu") and not n.startswith("libcuda.so")]
    lacking = [name for name in needed if name not in here]
    if lacking and (lacking := [name for name in lacking if name not in _system_libraries()]):
        raise MissingTool(
            f"{folder.library} needs {', '.join(lacking)}, which is neither beside it nor known to "
            "the system",
            hint=f"install CUDA's libraries, or name a release archive of {RELEASES}",
        )


def _system_libraries() -> set[str]:
    program = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    listed = run(program, "-p").stdout if program else ""
    return {line.split()[0] for line in listed.splitlines()[1:] if line.strip()}


def _read(path: Path) -> elf.Library:
    try:
        return elf.read(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: {error}", hint="install Ollama again") from None


def _again(tag: str) -> str:
    return f"install Ollama again, or name a release archive of {RELEASES}/tag/{tag}"


def _folder(folder: Path, root: Path) -> CudaFolder:
    others = [
        p for p in folder.glob("lib*.so*") if p.is_file() and not p.name.startswith("libggml")
    ]
    if folder == root:  # all kinds of libraries lie there
        others = [p for p in others if re.match(r"libcu(dart|blas)", p.name)]
    name = "cuda" if folder == root else folder.name
    return CudaFolder(name, folder / LIBRARY, tuple(sorted(others)))


def _program(root: Path) -> Path | None:
    """Of prefix/lib/ollama it is prefix/bin/ollama, of tree/build/lib/ollama tree/ollama."""
    above = root.parents
    candidates = [above[1] / "bin/ollama"] if len(above) > 1 else []
    candidates += [above[2] / "ollama"] if len(above) > 2 else []
    return next((p for p in candidates if p.is_file() and os.access(p, os.X_OK)), None)
