"""An installed Ollama, a source of llama.cpp and a compiler, all made of a few lines of shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.launch import llama_up
from ollama_tiering.patchset import elf
from ollama_tiering.patchset.llama_server import choose, exported, installation
from ollama_tiering.patchset.llama_server.compile import EMBED, HTTP, LIBRARIES
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, InstalledOllama
from ollama_tiering.patchset.llama_server.outcome import SelfTestOutcome
from tests.unit.patchset.test_llama_server import MADE_UP

VERSION = "v0.32.15"
PIN = "b10488"

# What a compiler is asked: its macros, an object, a program (the embedder of the page), a library.
COMPILER = """\
#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in
*-dM*) echo '#define __GNUC__ {gcc}'; echo '#define __VERSION__ "{gcc}.1.0"'; exit 0;;
esac
case "$*" in
*{failing}*) echo 'server.cpp:3:1: error: no such thing' >&2; exit 1;;
esac
case "$*" in
*-shared*)
    if [ -n "{undefined}" ]; then
        echo "undefined reference to \\`{undefined}'" >&2
        exit 1
    fi;;
esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo made > "$out"
case "$out" in
*/embed) printf '#!/bin/sh\\ntouch "$1" "$2"\\n' > "$out"; chmod +x "$out";;
esac
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def compiler(folder: Path, *, gcc: int = 12, failing: str = "NOTHING", undefined: str = "") -> Path:
    values = {"{gcc}": str(gcc), "{failing}": failing, "{undefined}": undefined}
    text = COMPILER
    for name, value in values.items():
        text = text.replace(name, value)
    return script(folder / "c++", text)


def installed(folder: Path, *, version: str = VERSION, build: str = "10488 (abc1234)") -> Path:
    """The folder above bin and lib."""
    script(folder / "bin/ollama", f"#!/bin/sh\necho 'ollama version is {version[1:]}'\n")
    lib = folder / "lib/ollama"
    script(lib / "llama-server", f"#!/bin/sh\necho 'version: {build}' >&2\n")
    for name in (*LIBRARIES, IMPLEMENTATION.removesuffix(".so")):
        (lib / f"{name}.so").write_text(f"installed {name}")
    (lib / "cuda_v12").mkdir()
    (lib / "cuda_v12/libggml-cuda.so").write_text("installed CUDA")
    return folder


def at(folder: Path) -> InstalledOllama:
    return InstalledOllama(folder / "bin/ollama", folder / "lib/ollama")


def llama_source(folder: Path, files: dict[str, str] | None = None) -> Path:
    more = {
        EMBED: "int main() {}\n",
        f"{HTTP}/httplib.cpp": "\n",
        f"{HTTP}/CMakeLists.txt": "PRIVATE CPPHTTPLIB_LISTEN_BACKLOG=512\n",
        "tools/server/server.cpp": "\n",
        "tools/server/main.cpp": "int main() {}\n",
        "ggml/include/ggml.h": "\n",
        "docs/not-needed.h": "\n",
    }
    for path, text in (files or {**MADE_UP, **more}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def all_exported(_path: Path) -> elf.Library:
    return elf.Library(62, frozenset(exported.NEEDED), frozenset(), ())


def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that this machine has is found, what is made up here passes for programs and
    libraries, and no tree is tried out.
    """
    monkeypatch.setattr(installation, "_UNITS", ())
    monkeypatch.setattr(installation, "_PREFIXES", ())
    monkeypatch.setattr(installation, "PROGRAM_MAGIC", b"#!")  # scripts stand for programs here
    monkeypatch.setattr(elf, "read", all_exported)
    monkeypatch.setattr(llama_up, "self_test", lambda *_: SelfTestOutcome(1))
    monkeypatch.setattr(choose, "built_binaries", lambda: [])
