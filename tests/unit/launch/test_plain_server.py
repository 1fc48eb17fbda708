"""Which llama-server `tiering llama-server` starts, and with which library for GPUs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ollama_tiering.errors import MissingTool, UsageError
from ollama_tiering.launch import plain_server
from ollama_tiering.launch.plain_server import PlainRequest
from ollama_tiering.patchset.llama_server import built, link_tree, links
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report
from tests.unit.patchset import fake_installed as fake

# Lists a GPU only with the libraries whose folders have this file.
LISTS = """\
#!/bin/sh
# OLLAMA_KV_TIER_ENGINE_SOCKET
folder=$(dirname "${GGML_BACKEND_PATH:-/nowhere/x}")
[ -e "$folder/finds" ] && echo "  CUDA0: GPU (8 MiB, 7 MiB free)"
[ -e "$folder/crashes" ] && exit 1
exit 0
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GGML_BACKEND_PATH", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path / "cache/llama-server"


def make_tree(root: Path, *, made: float) -> LinkTree:
    """`made`: Unix seconds. Its program is as old as the release, as in a real one."""
    place = fake.installed(root)
    for name in ("cuda_v13", "rocm", "vulkan"):
        (place / "lib/ollama" / name).mkdir()
        (place / f"lib/ollama/{name}/libggml-{name}.so").touch()
    fake.script(place / "lib/ollama/llama-server", LISTS)
    os.utime(place / "lib/ollama/llama-server", (1000, 1000))
    installation = fake.at(place)
    folder = built.folder() / root.name
    (root / "ours.so").write_text("OLLAMA_KV_TIER_ENGINE_SOCKET")
    state = installation.state()
    links.lay(folder, links.entries(installation, state, "v1", root / "ours.so"))
    tree = LinkTree(folder, str(installation.program), "v1", "b1", state, "ours")
    (folder / built.RECORD).write_text(link_tree.text_of(tree))
    os.utime(folder / built.RECORD, (made, made))
    return tree


def build(folder: Path, *, made: float) -> Path:
    program = fake.script(folder / "build/bin/llama-server", LISTS)
    os.utime(program, (made, made))
    return program


def test_the_latest_of_trees_that_fit_and_of_builds(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingTool, match="no llama-server with the tiering"):
        plain_server.find_program(None)
    old, tree = build(cache / "old", made=2000), make_tree(tmp_path / "one", made=3000)
    assert plain_server.find_program(None) == tree.lib / "llama-server"
    (tmp_path / "one/lib/ollama/libllama.so").write_text("updated")
    assert plain_server.find_program(None) == old
    new = build(cache / "new", made=4000)
    assert plain_server.find_program(None) == new


def test_a_folder_that_is_no_tree_is_not_taken(cache: Path, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "one", made=3000)
    (tree.folder / built.RECORD).unlink()
    with pytest.raises(MissingTool):
        plain_server.find_program(None)


@pytest.mark.parametrize("gone", [False, True])
def test_a_stale_one_is_not_even_started_by_name(cache: Path, tmp_path: Path, gone: bool) -> None:
    tree = make_tree(tmp_path / "one", made=3000)
    program = tmp_path / "link"
    program.symlink_to(tree.lib / "llama-server")
    assert plain_server.find_program(program) == program
    changed = tmp_path / "one/lib/ollama/libllama.so"
    changed.unlink() if gone else changed.write_text("updated")
    with pytest.raises(UsageError, match="was made for other files"):
        plain_server.find_program(program)


def test_a_gpu_is_used_as_ollama_would(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vendor's own library before Vulkan, a later CUDA before an earlier one; none that fails."""
    tree = make_tree(tmp_path / "one", made=3000)
    program, installed = tree.lib / "llama-server", tmp_path / "one/lib/ollama"
    lone = plain_server.library_environment(program, Report())
    assert lone == {"LD_LIBRARY_PATH": str(tree.lib), "GGML_BACKEND_PATH": None}
    for better in ("vulkan", "cuda_v12", "cuda_v13"):
        (installed / better / "finds").touch()
        env = plain_server.library_environment(program, Report())
        assert env["LD_LIBRARY_PATH"] == f"{tree.lib}:{tree.lib / better}"
        assert str(env["GGML_BACKEND_PATH"]).startswith(f"{tree.lib / better}/libggml-")
    (installed / "cuda_v13/crashes").touch()
    env = plain_server.library_environment(program, Report())
    assert env["GGML_BACKEND_PATH"] == str(tree.lib / "cuda_v12/libggml-cuda.so")
    said = capsys.readouterr().err
    assert "cuda_v13/libggml-cuda_v13.so is left out" in said
    assert f"GPUs are used with {env['GGML_BACKEND_PATH']} (or set GGML_BACKEND_PATH=" in said


def test_the_library_that_the_person_names_is_taken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(tmp_path / "one", made=3000)
    monkeypatch.setenv("GGML_BACKEND_PATH", "/opt/gpu/libggml-own.so")
    assert plain_server.library_environment(tree.lib / "llama-server", Report()) == {
        "LD_LIBRARY_PATH": f"{tree.lib}:/opt/gpu",
        "GGML_BACKEND_PATH": "/opt/gpu/libggml-own.so",
    }


def test_it_is_started_with_that_library(cache: Path, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "one", made=3000)
    (tmp_path / "one/lib/ollama/cuda_v12/finds").touch()
    program = tree.lib / "llama-server"
    says = '[ "$1" = --list-devices ] || echo "$GGML_BACKEND_PATH" > "$1"'
    program.write_text(LISTS.replace("exit 0", says))
    request = PlainRequest(program, (str(tmp_path / "said"),), tmp_path / "s", None)
    child = plain_server._start(request, None, Report(quiet=True))
    while child.running:
        time.sleep(0.05)
    assert (tmp_path / "said").read_text() == f"{tree.lib}/cuda_v12/libggml-cuda.so\n"


@pytest.mark.parametrize("attention", ["exact", "stock"])
def test_it_is_asked_for_the_attention_of_the_settings(
    cache: Path, tmp_path: Path, attention: str
) -> None:
    program = build(cache / "one", made=1)
    program.write_text('#!/bin/sh\necho "$OLLAMA_CPU_ATTENTION" > "$1"\n')
    arguments = (str(tmp_path / "said"),)
    request = PlainRequest(program, arguments, tmp_path / "s", None, cpu_attention=attention)
    child = plain_server._start(request, None, Report(quiet=True))
    while child.running:
        time.sleep(0.05)
    assert (tmp_path / "said").read_text() == f"{attention}\n"


def test_a_build_of_ones_own_finds_its_libraries_itself(cache: Path) -> None:
    assert plain_server.library_environment(build(cache / "one", made=1), Report()) == {}
