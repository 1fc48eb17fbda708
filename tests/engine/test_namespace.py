"""What changes the bits of K/V and is no token is in the namespace.

Each check stores a prompt under one condition, asks again under another (nothing may come back),
and again under the first (all of it must): without the last, a store that is off would pass.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.patchset import identity
from ollama_tiering.store.tools.listing import build_of
from tests.engine.conftest import LIBRARIES
from tests.engine.harness import Server, Sidecar, assert_same, text
from tests.engine.namespaces import descriptions, parts

EXACT = {"OLLAMA_CPU_ATTENTION": "exact"}
PROMPT_TOKENS = 300


def _installed(binary: Path, libraries: Path, name: str, folder: Path) -> Path:
    """The binary where it finds this CPU library and no other, as an installed Ollama would."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib/ollama").mkdir(parents=True)
    shutil.copy2(binary, folder / "bin/ollama")
    for file in libraries.glob("libggml-base*"):
        shutil.copy2(file, folder / "lib/ollama", follow_symlinks=False)
    shutil.copy2(libraries / f"libggml-cpu-{name}.so", folder / "lib/ollama")
    return folder / "bin/ollama"


def _restored(server: Server) -> int:
    return sum(restore.tokens for restore in server.restores())


@pytest.mark.timeout(900)
def test_two_cpu_libraries_of_one_build_never_share_a_block(
    binary: Path, libraries: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = text(PROMPT_TOKENS, "libraries")
    programs = {n: _installed(binary, libraries, n, tmp_path / n) for n in LIBRARIES}
    first = {}
    for number, name in enumerate((*LIBRARIES, *LIBRARIES)):
        with Server(
            programs[name], tmp_path / f"server{number}", models, socket=sidecar.socket
        ) as server:
            server.generate("g2", prompt, predict=1)  # cold, or restored
            answer = server.generate("g2", prompt)  # all but the last token is in memory
            sidecar.settle(server, "g2")
            assert f"libggml-cpu-{name}.so" in server.log_text()
            came_back = _restored(server)
        if name not in first:
            assert came_back == 0, f"rows of {LIBRARIES[0]} came back under {name}"
            first[name] = answer
        else:
            assert came_back == PROMPT_TOKENS - 1
            assert_same(answer, first[name], name)
    cpus = {parts(description)["cpu"] for description in descriptions(sidecar)}
    assert len(cpus) == 2
    assert {"FMA" in cpu.split(",") for cpu in cpus} == {False, True}


@pytest.mark.parametrize(
    ("model", "env", "shared"),
    [
        pytest.param("g2", EXACT, True, marks=pytest.mark.slow),
        ("g2", {}, True),
        ("sliding", EXACT, True),
        ("sliding", {}, False),
        ("llama", {}, False),
        ("llama", EXACT, False),
    ],
    ids=["exact", "stock", "windows, exact", "windows, stock", "llama.cpp", "llama.cpp, exact"],
)
def test_another_batch_size_is_another_namespace_where_bits_depend_on_it(
    binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    model: str,
    env: dict[str, str],
    shared: bool,
) -> None:
    """On the Go engine stock's flash attention gives the same rows however a prompt is cut, if they
    lie in the same cells, and ours wherever they lie: those are shared.
    """
    prompt = text(PROMPT_TOKENS, ("batch", shared))
    came_back = []
    for number, batch in enumerate((512, 64, 512, 64)):
        folder = tmp_path / str(number)
        with Server(binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate(model, prompt, predict=1, num_batch=batch)
            sidecar.settle(server, model)
            came_back.append(_restored(server))
    everything = PROMPT_TOKENS - 1
    assert came_back == [0, everything if shared else 0, everything, everything]
    batches = {parts(description).get("batch") for description in descriptions(sidecar)}
    assert batches == ({None} if shared else {"512", "64"})


def test_off_is_stock_and_exact_without_flash_attention_is_neither(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """Products with one column are summed in another order as soon as exact attention is asked for,
    also where it computes nothing.
    """
    prompt, found = text(PROMPT_TOKENS, "columns"), []
    off = {"OLLAMA_FLASH_ATTENTION": "0"}
    for number, env in enumerate((off, off | EXACT, off, off | EXACT)):
        folder = tmp_path / str(number)
        with Server(binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate("g2", prompt, predict=1)
            sidecar.settle(server, "g2")
            found.append(_restored(server))
    assert found == [0, 0, PROMPT_TOKENS - 1, PROMPT_TOKENS - 1]
    columns = {parts(description).get("columns") for description in descriptions(sidecar)}
    assert columns == {None, "1"}


def test_another_salt_finds_nothing_and_the_same_one_everything(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = text(PROMPT_TOKENS, "salt")
    came_back = []
    for number, salt in enumerate(("one", "other", "", "one")):
        env = {"OLLAMA_KV_TIER_SALT": salt}
        folder = tmp_path / str(number)
        with Server(binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate("g2", prompt, predict=1)
            sidecar.settle(server, "g2")
            came_back.append(_restored(server))
    assert came_back == [0, 0, 0, PROMPT_TOKENS - 1]


@pytest.mark.parametrize("model", ["g2", "llama"])
def test_another_driver_finds_nothing_whatever_its_name(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str
) -> None:
    """A library in the runner's memory, as AMD's Vulkan driver and Mesa's compiler are, that is not
    what it was when the rows were computed; and one that computes nothing.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None, "the binary was built with one"
    libraries = []
    for name, number in (("amdvlk64.so", 1), ("amdvlk64.so", 2), ("libssl.so.3", 1)):
        folder = tmp_path / f"driver{number}"
        folder.mkdir(exist_ok=True)
        (source := folder / f"{name}.c").write_text(f"int kvt{number}(void) {{ return {number}; }}")
        words = [compiler, "-shared", "-fPIC", "-Wl,--build-id", source, "-o", folder / name]
        subprocess.run(words, check=True)
        libraries.append(folder / name)
    old, new, harmless = libraries
    prompt, came_back = text(PROMPT_TOKENS, ("driver", model)), []
    for number, preload in enumerate(([], [old], [new], [harmless, old], [harmless])):
        env = {"LD_PRELOAD": ":".join(map(str, preload))}
        folder = tmp_path / str(number)
        with Server(binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate(model, prompt, predict=1)
            sidecar.settle(server, model)
            came_back.append(_restored(server))
    assert came_back == [0, 0, 0, PROMPT_TOKENS - 1, PROMPT_TOKENS - 1]
    assert len({parts(one)["libraries"] for one in descriptions(sidecar)}) == 3


def test_the_engine_is_named_by_what_it_was_built_from(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """A build of ours carries the stamp that the cache knows."""
    with Server(binary, tmp_path, models, socket=sidecar.socket) as server:
        server.generate("g2", text(100, "engine"), predict=1)
        sidecar.settle(server, "g2")
    (description,) = descriptions(sidecar)
    build = build_of(description["engine"])
    assert len(build) == identity.DIGITS
    if binary.is_relative_to(config.cache_dir()):
        assert build in identity.known_build_ids()
    assert parts(description)["cpu"]
    assert parts(description)["devices"] == "none"
