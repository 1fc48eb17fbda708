"""libggml-cuda-tiering.so by itself, in front of a library that records what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ollama_tiering.patchset import shim, tools
from ollama_tiering.patchset.finished import source_of
from ollama_tiering.patchset.report import Report
from tests.engine.attention import paged

TESTS = Path(__file__).parents[3] / "csrc/tests"
PROGRAMS = ("shim_test", "mirror_test", "room_test", "exact_test")
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
        "if (copy.turn >= 2) copier_->iface.event_wait(copier_, slot.drained);",
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
        "bad = run(graph, next, write, batch_size)",
        "bad = run(graph, next, write + 1, batch_size)",
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
    "staging is taken when it is measured": (
        "staging.cpp",
        "if (alloc && !provide_for",
        "if (!provide_for",
    ),
    "staging is kept": (
        "staging.cpp",
        "        for (Slot &slot : staging->slots) give_back(slot);\n",
        "",
    ),
    "new rows do not reach their mirror": (
        "copies.cpp",
        "bad = write_again(graph, rows, place, batch_size)",
        "bad = run(graph, write, write + 1, batch_size)",
    ),
    "a mirror is read before it has caught up": (
        "copies.cpp",
        "if (part.trusted >= part.end) continue;",
        "continue;",
    ),
    "a write that nobody saw is not noticed": (
        "mirror.cpp",
        "tag.number == mirror->number + 1 ? mirror->valid : 0",
        "mirror->valid",
    ),
    "a write without a tag is trusted": ("mirror.cpp", " && tag->magic == kTagMagic", ""),
    "a mirror is used without a write of V": (
        "mirror.cpp",
        " && look_at(graph, layers[i], 2, use.v)",
        " && (look_at(graph, layers[i], 2, use.v) || (use.v = use.k, true))",
    ),
    "what else writes is not noticed": (
        "mirror.cpp",
        "if (Mirror *mirror = mirror_of(root(graph->nodes[i]))) mirror->valid = 0;",
        "",
    ),
    "what else writes behind the attention is not noticed": (
        "mirror.cpp",
        "    return uses;\n}\n\n// What the mirror has after the graph",
        "    for (const Use &use : uses) {\n        if (use.mirrored) settle(use, use.v);\n    }\n"
        "    return uses;\n}\n\n// What the mirror has after the graph",
    ),
    "cells of a view pass for those of the whole": (
        "mirror.cpp",
        "    if (begin_of(write) != 0) return false; //",
        "    //",
    ),
    "mirrors of layers that are not written ahead are used": (
        "mirror.cpp",
        "if (!mirror || !layer.ahead) return false;",
        "if (!mirror) return false;",
    ),
    "rows that are not cells pass for them": (
        "mirror.cpp",
        " || write->nb[1] != row_bytes(seen)) return false;",
        ") return false;",
    ),
    "a write beyond a mirror is repeated in it": (
        "mirror.cpp",
        "std::max(part.end, part.high) <= part.mirror->size",
        "part.end <= part.mirror->size",
    ),
    "a write outside of what is seen counts as mirrored": (
        "mirror.cpp",
        "use.whole || part.high <= part.end ?",
        "true ?",
    ),
    "a failed graph leaves mirrors that are trusted": (
        "attention.cpp",
        "if (status) mirrors_->distrust();",
        "",
    ),
    "in turn, what was just written comes out of the mirror": (
        "attention.cpp",
        "            written.k.trusted = written.k.kept;\n",
        "",
    ),
    "cells before the view do not reach the mirror": (
        "copies.cpp",
        "if (part.kept < seen) copy_pinned(",
        "if (false) copy_pinned(",
    ),
    "what was staged does not reach the mirror": (
        "copies.cpp",
        "if (!copy_within(staged_rows, to, compute_)) copy_pinned(rows, seen, end, to, ",
        "if (false) copy_pinned(staged_rows.src[0], seen, end, to, ",
    ),
    "a copy within the device that was not made counts": (
        "copies.cpp",
        "until - start), stream)) from = until;",
        "until - start), stream) || true) from = until;",
    ),
    "mirrors are kept": ("staging.cpp", "    mirrors_->reset();\n", ""),
    "mirrors are taken when they are measured": (
        "staging.cpp",
        "if (alloc && compute_->iface.set_tensor_async) mirrors_",
        "if (compute_->iface.set_tensor_async) mirrors_",
    ),
    "mirrors keep memory that is needed": (
        "staging.cpp",
        "if (status && mirrors_->taken()) {",
        "if (false) {",
    ),
    "mirrors keep memory that a larger graph needs": (
        "attention.cpp",
        "if (!provided && mirrors_->taken()) {",
        "if (false) {",
    ),
    "mirrors that were given back are used": (
        "attention.cpp",
        "        uses.assign(layers.size(), {});\n",
        "",
    ),
    "mirrors that are given back are told": (
        "room.cpp",
        "    if (buffer_) device_.mirrored -= bytes_;\n",
        "",
    ),
    "mirrors that there was no memory for are told": (
        "room.cpp",
        "    if (buffer_) {\n        device_.mirrored += bytes_;\n",
        "    device_.mirrored += bytes_;\n    if (buffer_) {\n",
    ),
    "the last part of a graph has all mirrors": (
        "room.cpp",
        "std::vector<Mirror> planned = mirrors_;",
        "std::vector<Mirror> planned;",
    ),
    "mirrors that do not fit as planned are none": (
        "room.cpp",
        " && cells_ / 2 >= kStep",
        " && false",
    ),
    "fewer cells than planned are another plan": (
        "room.cpp",
        "a.wanted == b.wanted",
        "a.wanted == b.size",
    ),
    "fewer cells lie where more would": (
        "room.cpp",
        "mirror.offset = bytes_;",
        "if (!mirror.offset) mirror.offset = bytes_;",
    ),
    "mirrors are not counted": ("staging.cpp", " + mirrors_->bytes();", ";"),
    "a driver or an image is tried only after the engine has a name": (
        "images.cpp",
        "if (check(device, what)) {",
        "if (false) {",
    ),
    "kernels that are computed with are not those of the digest": (
        "images.cpp",
        "        add(digest, bytes);\n",
        "",
    ),
    "a device that may be reset is held": (
        "images.cpp",
        "    pa_cuda_close(gpu); // its backends",
        "    // its backends",
    ),
    "what is half open passes for open": (
        "exact.cpp",
        "if (status) close();",
        "",
    ),
    "mirrors take more than the plan has left": (
        "room.cpp",
        " <= device_.mirror_bytes) {",
        " <= SIZE_MAX) {",
    ),
}


@pytest.fixture(scope="module")
def tests_folder(binary: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program and the recorder, compiled against the tree of the binary under test."""
    folder = tmp_path_factory.mktemp("shim") / "lib"
    folder.mkdir()
    for file in libraries.glob("libggml-base*"):
        shutil.copy2(file, folder, follow_symlinks=False)
    ggml = source_of(binary) / shim.GGML
    if not (ggml / "src/ggml-backend-impl.h").is_file():
        pytest.skip(f"needs the source tree of the binary ({source_of(binary)})")
    include = [f"-isystem{ggml / 'include'}", f"-isystem{ggml / 'src'}", f"-I{TESTS.parent}"]
    include.append(f"-I{TESTS.parent / 'include'}")
    common = [*tools.cxx_compiler(), "-std=c++17", "-O0", "-g", *WARNINGS, *include]
    linked = ["-Wl,-rpath,$ORIGIN", shim.find_base(folder), "-ldl"]
    shared = ["-shared", "-fPIC", "-fvisibility=hidden"]
    rig = TESTS / "shim"
    programs = [
        [*common, rig / f"{name}.cpp", TESTS / "testing.cpp", *linked, "-o", folder / name]
        for name in PROGRAMS
    ]
    # exact_test has links to it, as libcuda.so.1
    stock = [rig / "recorder.cpp", rig / "driver.cpp"]
    recorder = [*common, *shared, *stock, *linked, "-o", folder / shim.STOCK]
    for command in (recorder, *programs):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[-3000:]
    return folder


def _compile(binary: Path, tests_folder: Path, sources: Path, *flags: str) -> None:
    base = shim.find_base(tests_folder)
    target = tests_folder / shim.LIBRARY
    shim.compile_shim(sources, source_of(binary), base, target, Report(), flags)


def _run(tests_folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tests_folder / program],
        env=os.environ | {"SHIM_TEST_FOLDER": str(tests_folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_stock_library_is_told_the_right_things_in_the_right_order(
    binary: Path, tests_folder: Path
) -> None:
    _compile(binary, tests_folder, paged.SOURCES, *shim.WARNINGS)
    for program in PROGRAMS:
        done = _run(tests_folder, program)
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
    _compile(binary, tests_folder, sources, "-O0")
    codes = [_run(tests_folder, program).returncode for program in PROGRAMS]
    assert any(codes), f"nobody noticed: {fault}"
