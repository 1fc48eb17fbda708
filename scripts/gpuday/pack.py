"""What has to travel to a machine with a GPU and no network, in one folder: the patched Ollama,
GGML's sources to build libggml-cuda from, and the wheels that our Python needs.

The checkout travels beside it. Standard library only, as it is unpacked where nothing is installed.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20
MOST_BYTES = 64 * MIB  # that such a machine takes, the checkout included
PROGRAM, SOURCES, WHEELS, ABOUT = "ollama.tar.xz", "ggml.tar.xz", "wheels", "pack.json"

GGML = Path("ml/backend/ggml/ggml")
TOP = ("CMakeLists.txt", "CMakePresets.json", "LICENSE")
# Backends that no NVIDIA GPU needs; the build does not look at them.
_OTHER_BACKENDS = ("ggml-vulkan", "ggml-metal", "ggml-hip", "ggml-blas")
_PYTHON = "3.12"  # of the machine; wheels of compiled packages are for one version
_GLIBC = (28, 27, 24, 17)
_THERE_ALREADY = {"numpy"}  # large, and CuPy, PyTorch and JAX all bring it


def sources_of(tree: Path) -> Iterator[Path]:
    """Files of a patched tree that libggml-cuda is built from, relative to it."""
    yield from (Path(name) for name in TOP if (tree / name).is_file())
    for path in sorted((tree / GGML).rglob("*")):
        relative = path.relative_to(tree)
        if path.is_file() and not set(_OTHER_BACKENDS) & set(relative.parts):
            yield relative


def cpu_libraries(tree: Path) -> Iterator[Path]:
    """GGML's, of a build for all processors (`tiering patch --cpu variants`), relative to it."""
    for path in sorted((tree / "build/lib/ollama").glob("libggml-cpu-*.so")):
        yield path.relative_to(tree)


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instructions of this machine's processor that compilers use by themselves."""
    said = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    used = re.compile(r"avx|fma|bmi|f16c|vaes|gfni|vpclmul|adx|sse4_|movbe|sha_ni")
    return {flag for flag in (said[1].split() if said else ()) if used.match(flag)}


def write_archive(target: Path, root: Path, files: Iterable[Path]) -> int:
    """A .tar.xz of files below `root`, the same bytes for the same files; returns its size."""
    fresh = target.with_name(f".{target.name}.new")
    with lzma.open(fresh, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for path in files:
            entry = tar.gettarinfo(root / path, str(path))
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
            if entry.isreg():
                with (root / path).open("rb") as content:
                    tar.addfile(entry, content)
            else:
                tar.addfile(entry)
    fresh.replace(target)
    return target.stat().st_size


def requirements(locks: Iterable[Path], leave_out: Iterable[str] = _THERE_ALREADY) -> str:
    """Of lock files, with their hashes: every package once, but those of `leave_out`."""
    blocks: dict[str, str] = {}
    for lock in locks:
        for block in re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8")):
            if match := re.match(r"([A-Za-z0-9._-]+)==", block):
                name = match[1].lower()
                # pip reads a marker for the Python that runs it, and not for the one asked for
                plain = re.sub(r"^(\S+) ;[^\\\n]*", r"\1 ", block)
                blocks.setdefault(name, plain.rstrip())
    left_out = set(leave_out)
    return "".join(f"{text}\n" for name, text in sorted(blocks.items()) if name not in left_out)


def download_wheels(target: Path, locks: Iterable[Path], say: Callable[[str], None]) -> None:
    """By pip, from its ordinary index. CalledProcessError with its words if that fails."""
    from ollama_tiering.patchset.pip import pip  # where it is packed, the package is at hand

    target.mkdir(parents=True, exist_ok=True)
    wanted = target.with_name("requirements.txt")
    wanted.write_text(requirements(locks), encoding="utf-8")
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    say(f"downloading wheels for Python {_PYTHON} into {target}")
    with pip() as (command, needs):
        subprocess.run(
            [
                *(*command, "download", "--quiet", "--disable-pip-version-check"),
                *("--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(target)),
                *("--python-version", _PYTHON, "--implementation", "cp"),
                *(word for name in platforms for word in ("--platform", name)),
                *("-r", str(wanted)),
            ],
            env=os.environ | needs,
            check=True,
        )


def make(
    target: Path, binary: Path, locks: Iterable[Path], say: Callable[[str], None], commit: str = ""
) -> dict[str, int]:
    """Writes the folder; returns the bytes of its parts. `binary` is a patched Ollama of our cache,
    or lies in the tree that it was built from. ValueError if that is not so. `commit` is the
    checkout's.
    """
    if len(binary.parents) < 3:
        raise ValueError(f"{binary} does not lie where builds do")
    # <cache>/builds/<tag>-<kind>/<digest>/ollama was built in <cache>/trees/<tag>-<kind>/src
    tree, beside = (
        binary.parents[2].with_name("trees") / binary.parents[1].name / "src",
        binary.parent,
    )
    tree = tree if tree.is_dir() else beside
    if not (tree / GGML / "src/ggml-cuda").is_dir():
        raise ValueError(f"{tree}: no sources of ggml-cuda that {binary.name} was built from")
    target.mkdir(parents=True, exist_ok=True)
    say(f"packing {binary}")
    program = write_archive(target / PROGRAM, beside, [Path(binary.name), *cpu_libraries(beside)])
    say(f"packing the sources of {tree / GGML}")
    sources = write_archive(target / SOURCES, tree, sources_of(tree))
    download_wheels(target / WHEELS, locks, say)
    wheels = sum(path.stat().st_size for path in (target / WHEELS).glob("*.whl"))
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()
    about = {"program": binary.name, "build": tree.parent.name, "sha256": digest, "commit": commit}
    about["processor"] = "" if any(cpu_libraries(beside)) else " ".join(sorted(processor_flags()))
    (target / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    return {PROGRAM: program, SOURCES: sources, WHEELS: wheels}


def checkout_bytes(root: Path) -> int:
    """Of the files that travel: tracked ones, and those that git does not ignore."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    files = [root / name.decode() for name in listed if name]
    return sum(path.lstat().st_size for path in files if path.is_symlink() or path.is_file())


def read_about(pack: Path) -> dict[str, Any]:
    """Empty where there is no whole pack."""
    try:
        about = json.loads((pack / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = all((pack / name).exists() for name in (PROGRAM, SOURCES, WHEELS))
    return about if whole and isinstance(about, dict) else {}


def unpack(pack: Path, work: Path) -> Path:
    """Into `work`: the program (whose path is returned), ggml/ and site/."""
    for name, folder in ((PROGRAM, "program"), (SOURCES, "ggml")):
        with tarfile.open(pack / name) as tar:
            tar.extractall(work / folder, filter="data")
    for wheel in sorted((pack / WHEELS).glob("*.whl")):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(work / "site")
    return work / "program" / str(read_about(pack)["program"])
