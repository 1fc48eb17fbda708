"""A newer `tiering` compiles its library for llama-server again. What the one before has stored is
found, as long as the libraries that compute are the same.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ollama_tiering.patchset import elf
from tests.engine_llama_server.server import Starter
from tests.engine_llama_server.test_llama_server import WAYS, blocks_of, text, wait_stored
from tests.sidecar import SidecarProcess

OPTIONS = (*WAYS["flash attention"], "-c", "2048")
PROMPT = 300


def newer(folder: Path, library: str) -> None:
    """Changes what the linker says that the library was built from."""
    (file,) = (one for one in folder.glob(f"{library}*") if not one.is_symlink())
    old = bytes.fromhex(elf.build_id(file))
    content = file.read_bytes()
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, bytes(255 - byte for byte in old)))


@pytest.mark.parametrize(
    ("library", "found"),
    [
        ("libllama-server-impl.so", True),
        ("libllama.so", False),
        ("libggml-base.so", False),
        ("libggml-cpu.so", False),
        ("libmtmd.so", False),
    ],
)
def test_rows_are_found_if_only_our_own_library_is_another(
    start: Starter,
    sidecar: SidecarProcess,
    patched: Path,
    tmp_path: Path,
    library: str,
    found: bool,
) -> None:
    if not list(patched.parent.glob(f"{library}*")):
        pytest.skip(f"{patched.parent} has no {library} of its own")
    prompt = text(random.Random(library), PROMPT, first=8)
    first = start(*OPTIONS, sidecar=sidecar)
    first.complete(prompt)
    resident = first.complete([*prompt, 5])
    assert resident.cached == PROMPT
    wait_stored(sidecar, first, blocks_of(PROMPT))
    first.kill()
    folder = tmp_path / "bin"
    shutil.copytree(patched.parent, folder, symlinks=True)
    newer(folder, library)
    beside = {"LD_LIBRARY_PATH": str(folder)}
    second = start(*OPTIONS, sidecar=sidecar, env=beside, program=folder / patched.name)
    answer = second.complete([*prompt, 5])
    if found:
        assert answer == resident
    else:
        assert answer.cached == 0
