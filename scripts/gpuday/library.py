"""libggml-cuda for one GPU, from GGML's sources and a CUDA toolkit, and an Ollama that loads it,
with the shim (csrc/shim) beside it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from scripts.gpuday import machine
from scripts.gpuday.machine import Toolkit

STOCK = "libggml-cuda.so"
BUILT = Path("lib/ollama")  # below CMake's folder
_NO_HEADERS = ("cudnn", "nccl", "cutlass")  # large, and nothing of GGML's
_NVIDIAS = ("libcudart.so", "libcublas.so", "libcublasLt.so")


def whole(toolkit: Toolkit, sites: Iterable[Path], folder: Path) -> Toolkit:
    """The toolkit itself, if CMake can use it. One that came as wheels is put together in `folder`,
    with the names of libraries that linkers look for.
    """
    if any((place / _NVIDIAS[0]).exists() for place in machine.libraries_of(toolkit)):
        return toolkit
    packages = [toolkit.root]
    for site in sites:
        packages += [path for path in sorted(site.glob("nvidia/*")) if path != toolkit.root]
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    for package in packages:
        for name in ("bin", "nvvm", "include"):
            if (package / name).is_dir() and package.name not in _NO_HEADERS:
                shutil.copytree(package / name, folder / name, dirs_exist_ok=True)
        for library in sorted(package.glob("lib/lib*.so*")):
            for name in (library.name, f"{library.name.partition('.so')[0]}.so"):
                if not (folder / "lib" / name).exists():
                    (folder / "lib" / name).symlink_to(library)
    for program in (*folder.glob("bin/*"), *folder.glob("nvvm/bin/*")):
        program.chmod(0o755)
    (folder / "lib64").symlink_to("lib")
    return Toolkit(folder / "bin/nvcc", folder, toolkit.version)


def configure(
    source: Path, build: Path, toolkit: Toolkit, arch: str, tools: Iterable[str]
) -> list[str]:
    """CMake's command. The driver's own library stands in where the toolkit has no stub of it, and
    without either memory is taken the older way.
    """
    command = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    command += ["-G", "Ninja"] if "ninja" in tools else []
    command += [f"-DCMAKE_CUDA_COMPILER={toolkit.nvcc}", f"-DCUDAToolkit_ROOT={toolkit.root}"]
    command += [f"-DCMAKE_CUDA_ARCHITECTURES={arch}", "-DCMAKE_HIP_COMPILER=NOTFOUND"]
    command += ["-DCMAKE_DISABLE_FIND_PACKAGE_Vulkan=ON", "-DGGML_CCACHE=OFF"]
    if not any((folder / "stubs/libcuda.so").exists() for folder in machine.libraries_of(toolkit)):
        driver = driver_library()
        extra = f"-DCUDA_cuda_driver_LIBRARY={driver}" if driver else "-DGGML_CUDA_NO_VMM=ON"
        command.append(extra)
    return command


def driver_library() -> Path | None:
    """libcuda.so.1, as the loader finds it."""
    said = re.search(r"libcuda\.so\.1 .*=> (\S+)", machine.ask("ldconfig", "-p"))
    return Path(said[1]) if said else None


def build(
    source: Path, folder: Path, toolkit: Toolkit, arch: str, tools: Iterable[str], jobs: int
) -> Path:
    """Compiles; returns the folder with libggml-cuda.so and GGML's base. CalledProcessError if a
    command fails; what it said is on our own output.
    """
    commands = [
        configure(source, folder, toolkit, arch, tools),
        ["cmake", "--build", str(folder), "--target", "ggml-cuda", "--parallel", str(jobs)],
    ]
    for command in commands:
        print("+", *command, flush=True)
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return folder / BUILT


def install(
    program: Path, built: Path, toolkit: Toolkit, sites: Iterable[Path], target: Path
) -> Path:
    """An Ollama in `target` that finds the library, as one of a release does: returns its program.
    NVIDIA's libraries are links to the toolkit's, or to those of wheels.
    """
    shutil.rmtree(target, ignore_errors=True)
    libraries = target / "lib/ollama"
    cuda = libraries / f"cuda_v{toolkit.major}"
    cuda.mkdir(parents=True)
    (target / "bin").mkdir()
    for path in built.glob("libggml-base.so*"):
        shutil.copy2(path, libraries, follow_symlinks=False)
    for path in program.parent.glob("build/lib/ollama/libggml-cpu-*.so"):
        shutil.copy2(path, libraries)
    shutil.copy2(built / STOCK, cuda)
    places = [*machine.libraries_of(toolkit)]
    for folder in sites:
        places += sorted(folder.glob("nvidia/*/lib"))
    for name in _NVIDIAS:
        wanted = f"{name}.{toolkit.major}"
        if found := next((p / wanted for p in places if (p / wanted).exists()), None):
            (cuda / wanted).symlink_to(found)
    return Path(shutil.copy2(program, target / "bin/ollama"))


def put_shim(program: Path, sources: Path, tree: Path) -> list[Path]:
    """Compiles the shim beside every libggml-cuda of an installed Ollama."""
    from ollama_tiering.patchset import shim
    from ollama_tiering.patchset.report import Report

    made = []
    for library in sorted((program.parents[1] / "lib/ollama").glob(f"*/{STOCK}")):
        target = library.with_name(shim.LIBRARY)
        shim.compile_shim(sources, tree, shim.find_base(library.parent), target, Report())
        made.append(target)
    return made
