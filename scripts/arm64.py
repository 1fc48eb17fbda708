"""Maintainer: the patched Ollama for ARM64, cross-compiled, and its demo in an emulator.

    scripts/arm64 [--cpu cortex-a76] [--build-only]

The compiler is told what `-march=native` would say on such a processor (a Raspberry Pi 5, unless
--cpu names another). The sidecar runs as it is, and Ollama in qemu; an emulated program starts
programs, its runner, of the same kind only where the kernel knows the emulator (binfmt_misc). If
this machine's does not, it is told so for our processes alone, in a namespace of their own.

Nothing is installed: what is missing is named, with exit code 0 and the word SKIPPED, so that
`scripts/test` can say it. Exit code 1 if a restored answer differs, or nothing was restored.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import TieringError
from ollama_tiering.kernels import compile as compiling
from ollama_tiering.patchset import apply, elf, gomod, identity, manifest, tools
from ollama_tiering.patchset.binary import ENV_BINARY
from ollama_tiering.patchset.go_env import go_environment
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache

REPO = Path(__file__).resolve().parent.parent
CC, CXX = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++"
NEON = "src/isa_neon.cpp"
HERE = config.cache_dir() / "arm64"
LIBRARIES = Path("/usr/aarch64-linux-gnu")  # where Debian's packages put what programs load
KNOWN = Path("/proc/sys/fs/binfmt_misc")
PACKAGES = {
    CC: "gcc-aarch64-linux-gnu",
    CXX: "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
}
# An ELF file of AArch64, as Debian's qemu-user-static describes it. F: the emulator is opened now.
FORMAT = (
    r":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:"
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{}:F"
)


def missing() -> list[str]:
    """Debian's packages that have to be installed first."""
    return [package for tool, package in PACKAGES.items() if not shutil.which(tool)]


def in_emulator() -> Callable[..., list[str]] | None:
    """What makes a command whose programs of ARM64 run here; None if the kernel does not let us."""
    if elf.MACHINES.get(os.uname().machine) == elf.MACHINES["aarch64"]:
        return lambda *command: list(command)
    if (KNOWN / "qemu-aarch64").exists():
        return lambda *command: list(command)
    line = FORMAT.format(shutil.which("qemu-aarch64-static"))
    script = f"mount -t binfmt_misc none {KNOWN} && echo '{line}' >{KNOWN}/register && exec \"$@\""
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        return None
    return lambda *command: [*own, *command]


def flags(cpu: str) -> dict[str, str]:
    """Of cgo. The processor's name takes the place of what `native` would be."""
    wanted = f"-O3 -mcpu={cpu}"
    return {"CGO_CFLAGS": wanted, "CGO_CXXFLAGS": wanted}


def cross_build(cpu: str, report: Report) -> Path:
    """The binary. The source must be in the cache."""
    tag, patchset, cache = config.DEFAULT_TAG, manifest.load(), SourceCache()
    tree, log = HERE / "src", HERE / "build.log"
    HERE.mkdir(parents=True, exist_ok=True)
    with locked(HERE / "lock", "another build for ARM64 is at work", report):
        if not tree.is_dir():
            cache.extract(tag, tree)
        go = tools.find_go(gomod.go_version_wanted((tree / gomod.GO_MOD).read_bytes()), report)
        apply.apply(patchset, tree, tag=tag, allow_untested=False, go=go, cache=cache)
        made_of = f"{patchset.compiled_digest} {flags(cpu)}"
        build_id = hashlib.sha256(made_of.encode()).hexdigest()[: identity.DIGITS]
        linked = {"github.com/ollama/ollama/version.Version": tag.removeprefix("v")} | {
            name: value.replace(identity.PLACEHOLDER, build_id)
            for name, value in patchset.go_ldflags.items()
        }
        ldflags = " ".join(["-s", "-w", *(f"-X={name}={value}" for name, value in linked.items())])
        target = go_environment("arm64") | {"CC": CC, "CXX": CXX} | flags(cpu)
        command = [str(go), "build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags]
        binary = HERE / f"ollama-{cpu}"
        merged = {**os.environ, **target}
        environment = {name: value for name, value in merged.items() if value is not None}
        with report.stage(f"compiling Ollama {tag} for {cpu}"), log.open("wb") as sink:
            done = subprocess.run(
                [*command, "-o", str(binary), "."],
                cwd=tree,
                env=environment,
                stdout=sink,
                stderr=sink,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"error: the build failed, see {log}")
    return binary


def kernels_test(cpu: str) -> Path:
    """A program that compares the kernels with docs/attention/exact.md's own program, bit for bit.
    They are compiled as in Ollama, which lets the compiler fuse products into sums; the rest is
    not.
    """
    folder, csrc = HERE / f"exact-{cpu}", REPO / "csrc"
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [source.path for source in compiling.sources(csrc, "aarch64")]
    tests = [f"tests/{name}.cpp" for name in ("exact_test", "exact_model", "problem", "testing")]
    objects = []
    for source in (*kernels, *tests):
        target = folder / f"{source.replace('/', '-')}.o"
        own = flags(cpu)["CGO_CXXFLAGS"] if source == NEON else "-O2 -ffp-contract=off"
        command = [CXX, "-std=c++17", "-pthread", "-Iinclude", "-I.", *own.split()]
        subprocess.run([*command, "-c", source, "-o", target], cwd=csrc, check=True)
        objects.append(target)
    program = folder / "exact_test"
    subprocess.run([CXX, "-static", "-pthread", *objects, "-o", program], check=True)
    return program


def demonstrate(binary: Path, wrapped: Callable[..., list[str]]) -> int:
    """`tiering demo` with it. Its exit code."""
    command = wrapped(sys.executable, "-m", "ollama_tiering", "demo", "--engine", "ollama")
    environment = os.environ | {ENV_BINARY: str(binary), "QEMU_LD_PREFIX": str(LIBRARIES)}
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", default="cortex-a76", help="as gcc's -mcpu (default: %(default)s)")
    parser.add_argument("--build-only", action="store_true", help="compile and link, run nothing")
    given = parser.parse_args()
    if lacking := missing():
        print(f"SKIPPED arm64: apt-get install {' '.join(lacking)}")
        return 0
    if not SourceCache().has(config.DEFAULT_TAG):
        print(
            f"SKIPPED arm64: {config.DEFAULT_TAG} is not in the source cache; scripts/tiering fetch"
        )
        return 0
    try:
        binary = cross_build(given.cpu, Report())
    except TieringError as error:
        print(f"error: {error.message}", *filter(None, [error.hint]), sep="\n", file=sys.stderr)
        return error.exit_code
    print(binary, flush=True)
    if given.build_only:
        return 0
    wrapped = in_emulator()
    if wrapped is None:
        print(
            "SKIPPED arm64: it compiles, but the kernel does not know the emulator: "
            "`update-binfmts --enable qemu-aarch64` as root, or Linux 6.7 and user namespaces"
        )
        return 0
    print("exact attention against the scalar model:", flush=True)
    if subprocess.run(wrapped(str(kernels_test(given.cpu))), check=False).returncode:
        return 1
    return demonstrate(binary, wrapped)


if __name__ == "__main__":
    sys.exit(main())
