"""The user's own Ollama, from which a build takes GGML's libraries for GPUs: where it is, whether
it fits.

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
from dataclasses import dataclass, replace
from pathlib import Path

from ollama_tiering.errors import MissingTool, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import elf, identity, release_archive
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from ollama_tiering.system.files import without_links

LIBRARY = "libggml-cuda.so"
# Of each kind of GPU: GGML's library, and how the names of those begin that it needs of the vendor.
# They lie beside it, or the system has them; what a driver brings is not asked for.
KINDS = {
    "cuda": (LIBRARY, ("libcu",)),
    "rocm": ("libggml-hip.so", ("libamdhip64", "libhip", "libroc")),
    "vulkan": ("libggml-vulkan.so", ("libvulkan",)),
}
DRIVERS = ("libcuda.so",)
DATA = ("rocblas", "hipblaslt")  # folders of kernels, which ROCm's libraries look for beside them
BASE = "libggml-base.so"
OPTION = "stock"  # of --gpu, alone or as stock=PLACE
INTERFACE = "ml/backend/ggml/ggml/"  # what is pinned below it: the headers both sides compile
USUAL = (Path("/usr/local"), Path("/usr"))  # prefixes of install.sh and of distributions
RELEASES = "https://github.com/ollama/ollama/releases"

_LIBRARIES = " or ".join(library for library, _ in KINDS.values())
_NOBODY = {"OLLAMA_HOST": "127.0.0.1:1"}  # else a server that runs is asked, too


@dataclass(frozen=True, slots=True)
class GpuFolder:
    """One of `cuda_v12`, `rocm`, `vulkan`, …; `others` are the vendor's libraries beside GGML's,
    and folders of what these read.
    """

    name: str
    library: Path
    others: tuple[Path, ...]

    @property
    def is_cuda(self) -> bool:
        return self.library.name == LIBRARY

    @property
    def wanted(self) -> tuple[str, ...]:
        """How the names of the vendor's libraries begin."""
        return next(names for library, names in KINDS.values() if library == self.library.name)


@dataclass(frozen=True, slots=True)
class Installation:
    """An Ollama with libraries for GPUs. `place`: what a person would call it; `root`: the
    folder of its libraries.
    """

    place: Path
    root: Path
    program: Path | None
    base: Path
    folders: tuple[GpuFolder, ...]

    def files(self) -> Iterator[Path]:
        yield self.base
        for folder in self.folders:
            yield from (folder.library, *folder.others)

    def state(self) -> list[list[str | int]]:
        """Changes with every file; quick. OSError where one is gone."""
        infos = [(path, path.stat()) for path in self.files()]
        return [[str(path), info.st_size, info.st_mtime_ns] for path, info in infos]

    def content(self) -> dict[str, str]:
        """What decides the bits of a result: GGML's code by its digest, a vendor's libraries by the
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
            f"no Ollama with {_LIBRARIES} on PATH, in {' or '.join(map(str, USUAL))}",
            hint=f"install Ollama, or name its folder or a release archive of {RELEASES}: "
            "--gpu stock=PLACE",
        )
    if not place.exists():
        raise UsageError(f"{place}: no such file or directory", hint="--gpu stock=PLACE")
    root = release_archive.unpacked(place, report) if release_archive.is_archive(place) else place
    found = at(root, shown=place)
    if found is None:
        raise UsageError(
            f"{place}: no {_LIBRARIES} in a folder of lib/ollama with a {BASE} there",
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
    folders for a kind of GPU, or a source tree with its build.
    """
    place = place.absolute()
    alone = place if place.name.startswith(tuple(KINDS)) and _libraries(place) else None
    roots = [place.parent] if alone else [place / "lib/ollama", place / "build/lib/ollama", place]
    for root in roots:
        base = next((b for folder in (root, place) for b in sorted(folder.glob(f"{BASE}*"))), None)
        folders = [alone] if alone else sorted(path for path in root.glob("*/") if path != root)
        # The folder itself last: some distributions lay all out there.
        libraries = [one for folder in folders for one in _libraries(folder)] or _libraries(root)
        if base and libraries:
            gpu = tuple(_folder(library, root) for library in libraries)
            return Installation(shown or place, root, _program(root), base, gpu)
    return None


def usable(found: Installation, report: Report) -> Installation:
    """Without what needs a library that is not here, which is said in a line with its cure; raised
    where nothing else is left.
    """
    kept, lacking = [], []
    for folder in found.folders:
        try:
            _require_vendors(folder, _read(folder.library))
            kept.append(folder)
        except MissingTool as missing:
            lacking.append(missing)
    if not kept:
        raise lacking[0]
    for one in lacking:
        report.warn(f"not taken: {one.message}; {one.hint}")
    return replace(found, folders=tuple(kept))


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
        _require_vendors(folder, library)
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
        hint=f"name a release archive of {RELEASES}/tag/{tag} with --gpu stock=FILE{other}",
    )


def _require_processor(path: Path, library: elf.Library) -> None:
    machine = platform.machine().lower()
    if library.machine != elf.MACHINES.get(machine):
        raise UnsupportedUpstream(
            f"{path} is for another processor than this {machine}",
            hint=f"name the release archive for it, of {RELEASES}",
        )


def _require_vendors(folder: GpuFolder, library: elf.Library) -> None:
    """The vendor's libraries lie in the folder, as in a release, or the system has them."""
    here = {path.name for path in folder.others}
    needed = [n for n in library.needed if n.startswith(folder.wanted)]
    needed = [name for name in needed if not name.startswith(DRIVERS)]
    lacking = [name for name in needed if name not in here]
    if lacking and (lacking := [name for name in lacking if name not in _system_libraries()]):
        raise MissingTool(
            f"{folder.library} needs {', '.join(lacking)}, which is neither beside it nor known to "
            "the system",
            hint=f"install it, or name a release archive of {RELEASES}",
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


def _libraries(folder: Path) -> list[Path]:
    return [p for library, _ in KINDS.values() if (p := folder / library).is_file()]


def _folder(library: Path, root: Path) -> GpuFolder:
    folder = library.parent
    others = [
        p for p in folder.glob("lib*.so*") if p.is_file() and not p.name.startswith("libggml")
    ]
    others += [path for name in DATA if (path := folder / name).is_dir()]
    if folder == root:  # all kinds of libraries lie there
        others = [p for p in others if re.match(r"libcu(dart|blas)", p.name)]
        kind = next(kind for kind, (name, _) in KINDS.items() if name == library.name)
        return GpuFolder(kind, library, tuple(sorted(others)) if kind == "cuda" else ())
    return GpuFolder(folder.name, library, tuple(sorted(others)))


def _program(root: Path) -> Path | None:
    """Of prefix/lib/ollama it is prefix/bin/ollama, of tree/build/lib/ollama tree/ollama."""
    above = root.parents
    candidates = [above[1] / "bin/ollama"] if len(above) > 1 else []
    candidates += [above[2] / "ollama"] if len(above) > 2 else []
    return next((p for p in candidates if p.is_file() and os.access(p, os.X_OK)), None)
