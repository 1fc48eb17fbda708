"""Maintainer: is llama-server's tiering right in a patched tree of llama.cpp? Without a build.

Each call has to be in the function it belongs into, and what calls and what is called have to pass
a compiler's check of syntax and types.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ollama_tiering.patchset.llama_server.hooks import COMMON, CONTEXT, OURS, SERVER

INCLUDED = (SERVER, "tools/mtmd", ".", OURS, "common", "vendor", "include", "ggml/include")
COMPILER = "g++"
FLAGS = ("-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-DLLAMA_SHARED", "-DGGML_SHARED")

# The functions of llama-server that each call belongs into: if another one has the line of
# llama.cpp beside which it is placed, what is done there has to be looked at again.
FUNCTIONS = {
    "before_load": ("load_model",),
    "before_prompt": ("pre_decode",),
    "before_shift": ("pre_decode",),
    "before_slot_file": ("process_single_task",),
    "before_swap": ("get_available_slot",),
    "before_end": ("destroy", "start_loop"),
    "after_answer": ("load_model",),
    "step": ("update_slots",),
}


def misplaced(tree: Path) -> str:
    """The calls that are not in the functions they belong into."""
    wrong, function = [], ""
    for line in (tree / CONTEXT).read_text(encoding="utf-8").splitlines():
        begins = re.match(r"(?: {4})?\w.*?\b(\w+)\(.*\{$", line)
        function = begins[1] if begins else function
        call = re.search(r"\bkv_tiering\.(\w+)\(", line)
        if call and function not in (right := FUNCTIONS.get(call[1], ())):
            wrong.append(f"{call[1]} is in {function}, not in {' or '.join(right)}")
    return "; ".join(wrong)


def digest_of(tree: Path) -> str:
    """Of all that the compiler is given, and of the compiler."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(repr((version, FLAGS, INCLUDED)).encode())
    for path in sorted(path for path in tree.rglob("*") if path.is_file()):
        name, data = path.relative_to(tree), path.read_bytes()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def syntax_errors(tree: Path) -> str:
    """The first of each file."""
    ours = sorted((tree / OURS).glob("*.cpp"))
    files = [*ours, tree / CONTEXT, tree / COMMON]
    includes = [f"-I{tree / part}" for part in INCLUDED]

    def first_of(path: Path) -> str:
        own = [f"-I{tree / 'src'}"] if path in ours else []
        command = [COMPILER, *FLAGS, *includes, *own, str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        wrong = re.findall(r"^\S*?([\w.-]+:\d+):\d+: (?:fatal )?(error: .*)$", ran.stderr, re.M)
        if not ran.returncode and not wrong:
            return ""
        place, said = wrong[0] if wrong else (path.name, ran.stderr.strip()[:200])
        return f"{place} {said}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return "; ".join(filter(None, pool.map(first_of, files)))
