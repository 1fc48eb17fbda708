"""libggml-cuda-tiering.so by itself, in front of a library that records what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ollama_tiering.patchset import shim, tools
from ollama_tiering.patchset.report import Report
from tests.engine import paged

TESTS = Path(__file__).parents[2] / "csrc/tests"
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror")

# What keeps answers right on a device: each of these made wrong is noticed by a test.
MUTANTS = {
    "rows are not written again": (
        "attention.cpp",
        "part_of(graph, both, 2)",
        "part_of(graph, both, 1)",
    ),
    "a slot is filled before it was read": (
        "attention.cpp",
        "if (index >= 2) copier_->iface.event_wait(copier_, slot.drained);",
        "",
    ),
    "a slot is read before it was filled": (
        "attention.cpp",
        "compute_->iface.event_wait(compute_, slot.filled);",
        "",
    ),
    "a copy does not wait for what was computed before": (
        "attention.cpp",
        "copier_->iface.event_wait(copier_, begun_);",
        "",
    ),
    "what others write is copied ahead": (
        "attention.cpp",
        " && graph->nodes[write]->op == GGML_OP_SET_ROWS",
        "",
    ),
    "what was written earlier is copied ahead": ("attention.cpp", "write > before &&", ""),
    "rows are computed together with what makes them": (
        "attention.cpp",
        "run(compute_, graph, next, write, batch_size)",
        "run(compute_, graph, next, write + 1, batch_size)",
    ),
    "only one stream is waited for": ("staging.cpp", "    wait_for(copier_);\n", ""),
    "any operation is taken": (
        "pinned.cpp",
        "default: // would read all of K/V over the bus, unasked\n        return false;",
        "default:\n        return true;",
    ),
    "K and V may share a tensor": ("pinned.cpp", "root(k) == root(v) || ", ""),
    "rows may have gaps": ("pinned.cpp", "ggml_is_contiguously_allocated(k) && ", ""),
    "K/V on a device may be staged": (
        "pinned.cpp",
        "lies_paged(op->src[i]) != (i == 1 || i == 2)",
        "lies_paged(op->src[i]) && i != 1 && i != 2",
    ),
    "memory that is not pinned passes for it": (
        "pinned.cpp",
        "if (buffer->buft != pinned) {",
        "if (false) {",
    ),
    "a device is reset under pinned memory": (
        "device.cpp",
        "if (const int count = paged_buffers()) {",
        "if (const int count = 0) {",
    ),
    "it is always on": ("device.cpp", 'on && !std::strcmp(on, "1")', "!on || *on"),
    "a wrapped backend is handed to the stock library": (
        "backend.cpp",
        "cpy_tensor_async(inner_of(from), inner, source, copy)",
        "cpy_tensor_async(from, inner, source, copy)",
    ),
    "staging is taken when it is measured": ("staging.cpp", "if (alloc && !layers.empty()) {", "{"),
    "staging is kept": (
        "staging.cpp",
        "    for (Slot &slot : slots_) {\n        give_back(slot);\n    }\n    k_bytes_",
        "    k_bytes_",
    ),
}


@pytest.fixture(scope="module")
def tests_folder(binary: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program and the recorder, compiled against the tree of the binary under test."""
    folder = tmp_path_factory.mktemp("shim") / "lib"
    folder.mkdir()
    for file in libraries.glob("libggml-base*"):
        shutil.copy2(file, folder, follow_symlinks=False)
    ggml = binary.parent / shim.GGML
    if not (ggml / "src/ggml-backend-impl.h").is_file():
        pytest.skip(f"needs the source tree of the binary ({binary.parent})")
    include = [f"-isystem{ggml / 'include'}", f"-isystem{ggml / 'src'}", f"-I{TESTS.parent}"]
    common = [*tools.cxx_compiler(), "-std=c++17", "-O0", "-g", *WARNINGS, *include]
    linked = ["-Wl,-rpath,$ORIGIN", shim.find_base(folder), "-ldl"]
    shared = ["-shared", "-fPIC", "-fvisibility=hidden"]
    rig = TESTS / "shim"
    for command in (
        [*common, *shared, rig / "recorder.cpp", *linked, "-o", folder / shim.STOCK],
        [*common, rig / "shim_test.cpp", TESTS / "testing.cpp", *linked, "-o", folder / "tests"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[-3000:]
    return folder


def _run(
    binary: Path, tests_folder: Path, sources: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    base = shim.find_base(tests_folder)
    target = tests_folder / shim.LIBRARY
    shim.compile_shim(sources, binary.parent, base, target, Report(), flags)
    return subprocess.run(
        [tests_folder / "tests"],
        env=os.environ | {"SHIM_TEST_FOLDER": str(tests_folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_stock_library_is_told_the_right_things_in_the_right_order(
    binary: Path, tests_folder: Path
) -> None:
    done = _run(binary, tests_folder, paged.SOURCES, *shim.WARNINGS)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTANTS)
def test_a_shim_that_is_wrong_is_noticed(
    binary: Path, tests_folder: Path, tmp_path: Path, fault: str
) -> None:
    name, old, new = MUTANTS[fault]
    sources = paged.copy_sources(tmp_path)
    text = (sources / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (sources / name).write_text(text.replace(old, new), encoding="utf-8")
    done = _run(binary, tests_folder, sources, "-O0")
    assert done.returncode, f"nobody noticed: {fault}"
