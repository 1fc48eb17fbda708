"""libggml-cuda-tiering.so: paged attention, to lie beside a stock libggml-cuda.so (csrc/shim).

It is compiled against GGML's backend interface, from the source tree of any accepted version of
Ollama: those headers are the same in all of them. No CUDA is needed, only a C++ compiler, and the
libggml-base.so that lies beside the stock library, or above it. The host side of our own kernels
(csrc/cuda/host) is compiled in; it finds the driver, and the kernels, when they are asked for.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ollama_tiering.errors import BuildError, UnsupportedUpstream
from ollama_tiering.patchset import tools
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run

LIBRARY = "libggml-cuda-tiering.so"
STOCK = "libggml-cuda.so"
BASE = "libggml-base.so"
GGML = Path("ml/backend/ggml/ggml")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror")
HOST = ("cuda/host/driver.cpp", "cuda/host/device.cpp", "cuda/host/plan.cpp")  # beside the sources
HEADERS = ("cuda/*.h", "cuda/host/*.h", "include/paged_attn/*.h")


def default_sources(root: Path) -> Path:
    """`csrc/shim` beside `patches/` of a checkout, or the copy an installed package carries; the
    rest of csrc lies beside it.
    """
    checkout = root.parent / "csrc/shim"
    return checkout if checkout.is_dir() else root.parent / "_csrc/shim"


def find_base(folder: Path) -> Path:
    """GGML's base for the stock library in `folder`. UnsupportedUpstream where there is none."""
    for place in (folder, folder.parent):
        if found := sorted(place.glob(f"{BASE}*")):
            return found[0]
    raise UnsupportedUpstream(
        f"{folder}: no {BASE} there or above, and {STOCK} needs one",
        hint="name the folder of libraries of a whole Ollama",
    )


def digest(sources: Path, tree: Path) -> str:
    """Of what the library is compiled from, GGML's headers of `tree` included, as hex digits."""
    seen = hashlib.sha256("\0".join(FLAGS).encode())
    beside = [file for pattern in (*HOST, *HEADERS) for file in sources.parent.glob(pattern)]
    own = (*sources.glob("*.cpp"), *sources.glob("*.h"), *beside)
    for file in (*sorted(own), *sorted((tree / GGML).glob("*/ggml*.h"))):
        seen.update(file.name.encode() + b"\0" + file.read_bytes())
    return seen.hexdigest()


def put(folders: Iterable[Path], root: Path, tree: Path, report: Report) -> None:
    """`put_beside` for each folder, out of the sources that belong to the patches at `root`."""
    sources = default_sources(root)
    if not sources.is_dir():  # an installed package may come without
        report.say(f"this version has no {LIBRARY}: K/V that do not fit a GPU are not paged")
        return
    for folder in folders:
        put_beside(folder, sources, tree, report)


def put_beside(folder: Path, sources: Path, tree: Path, report: Report) -> bool:
    """Compile the library into `folder` if a stock one lies there; False where none does. A file
    beside it says what it was made of: if that has not changed, nothing is compiled.
    """
    if not (folder / STOCK).is_file():
        return False
    target, record = folder / LIBRARY, folder / f"{LIBRARY}.sha256"
    wanted = digest(sources, tree)
    if not target.is_file() or not record.is_file() or record.read_text("utf-8") != wanted:
        record.unlink(missing_ok=True)
        with report.stage(f"compiling {LIBRARY}"):
            compile_shim(sources, tree, find_base(folder), target, report)
        record.write_text(wanted, encoding="utf-8")
    return True


def compile_shim(
    sources: Path, tree: Path, base: Path, target: Path, report: Report, flags: tuple[str, ...] = ()
) -> None:
    """Write the library to `target`, whole or not at all. `tree` is a source tree of Ollama, stock
    or patched. BuildError has the compiler's first error.
    """
    headers = tree / GGML
    if not (headers / "src/ggml-backend-impl.h").is_file():
        raise UnsupportedUpstream(f"{tree}: no headers of GGML there", hint="run `tiering fetch`")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compile-") as work:
        fresh = Path(work, LIBRARY)
        # GGML's headers are not ours to warn about
        include = [f"-isystem{headers / 'include'}", f"-isystem{headers / 'src'}"]
        include += [f"-I{sources.parent / 'include'}", f'-DSHIM_SOURCES="{digest(sources, tree)}"']
        # where libggml-base.so lies, from a folder such as lib/ollama/cuda_v13
        linked: list[str | Path] = ["-Wl,-rpath,$ORIGIN:$ORIGIN/..", "-Wl,--no-undefined", base]
        parts = [*sorted(sources.glob("*.cpp")), *(sources.parent / name for name in HOST)]
        compiler = tools.cxx_compiler()
        done = run(
            *compiler, *FLAGS, *flags, *include, *parts, *linked, "-ldl", "-o", fresh, report=report
        )
        if done.returncode:
            first = next((line for line in done.tail if "error" in line), "no message")
            raise BuildError(
                f"{compiler[0]}: {LIBRARY}: {first.strip()}",
                hint="CXX chooses another compiler (g++ 10, clang 12 or later)",
            )
        fresh.replace(target)
