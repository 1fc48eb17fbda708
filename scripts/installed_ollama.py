"""Maintainer: an Ollama from v0.30 on as if installed, for tests/engine_ollama_llama_server.

    .venv/bin/python scripts/installed_ollama.py [FOLDER]

Ollama's program is built from the source cache (`tiering fetch --tag v0.32.15` puts it there),
llama-server and its libraries are those that scripts/llama_server.py built without our lines, with
GGML as releases have it. FOLDER, by default in the product's cache, gets `ollama/bin` and
`ollama/lib`. What is there already is left as it is. On 2 cores it takes four minutes. Prints the
folder that has `bin` and `lib`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import TieringError, UsageError
from ollama_tiering.patchset import gomod, tools
from ollama_tiering.patchset.go_env import go_environment
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, SERVER
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from ollama_tiering.patchset.upstream import SourceCache

TAG = "v0.32.15"  # of the llama.cpp that scripts/llama_server.py is for
DEFAULT = config.cache_dir() / "installed-ollama-test"
LLAMA_SERVER = config.cache_dir() / "llama-server-test" / "stock"
GGML = config.cache_dir() / "llama-server-test" / "release" / "bin"
CPU, RELEASED_CPU = "libggml-cpu.so", "libggml-cpu-native.so"  # a release's are named so


def build_program(program: Path, report: Report) -> None:
    cache = SourceCache()
    if not cache.has(TAG):
        raise UsageError(
            f"{TAG} is not in the source cache", hint=f"run `tiering fetch --tag {TAG}`"
        )
    source = program.parents[2] / "source"
    if not source.exists():
        cache.extract(TAG, source)
    go = tools.find_go(gomod.go_version_wanted((source / gomod.GO_MOD).read_bytes()), report)
    version = f"-X=github.com/ollama/ollama/version.Version={TAG.removeprefix('v')}"
    mode = "-X=github.com/ollama/ollama/server.mode=release"
    program.parent.mkdir(parents=True, exist_ok=True)
    fresh = program.with_name(".new")
    words = ("-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {version} {mode}")
    done = run(go, "build", *words, "-o", fresh, ".", cwd=source, env=go_environment())
    if done.returncode:
        raise UsageError(f"go build failed in {source}:\n" + "\n".join(done.tail))
    fresh.rename(program)


def copy_libraries(built: Path, ggml: Path, lib: Path) -> None:
    if not (built / SERVER).exists() or not (built / IMPLEMENTATION).exists():
        raise UsageError(
            f"{built} has no {SERVER} with {IMPLEMENTATION}",
            hint="run scripts/llama_server.py SOURCE",
        )
    if not (ggml / CPU).exists():
        raise UsageError(f"{ggml} has no {CPU}", hint="run scripts/llama_server.py")
    part = lib.with_name(f".{lib.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(built, part, symlinks=True, ignore=shutil.ignore_patterns("libggml*"))
    shutil.copytree(
        ggml, part, symlinks=True, ignore=shutil.ignore_patterns(CPU), dirs_exist_ok=True
    )
    shutil.copy2(ggml / CPU, part / RELEASED_CPU)
    shutil.rmtree(lib, ignore_errors=True)
    part.rename(lib)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?", default=DEFAULT)
    folder = parser.parse_args().folder.resolve() / "ollama"
    program, lib = folder / "bin" / "ollama", folder / "lib" / "ollama"
    try:
        if not (lib / RELEASED_CPU).exists():  # an older run's has GGML in another way
            lib.parent.mkdir(parents=True, exist_ok=True)
            copy_libraries(LLAMA_SERVER, GGML, lib)
        if not program.exists():
            build_program(program, Report())
    except TieringError as error:
        print(f"error: {error.message}", *filter(None, [error.hint]), sep="\n", file=sys.stderr)
        return error.exit_code
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
