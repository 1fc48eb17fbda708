"""Exact attention in a tree of links: when it is made, and what is done where it cannot be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ollama_tiering.errors import PatchConflict
from ollama_tiering.patchset import elf
from ollama_tiering.patchset.llama_server import (
    anchors,
    built,
    exact_hooks,
    exact_library,
    exact_processor,
    link_tree,
    links,
)
from ollama_tiering.patchset.llama_server.link_tree import RECORD
from ollama_tiering.patchset.llama_server.outcome import SelfTestOutcome
from tests.unit.patchset import fake_installed as fake
from tests.unit.patchset.fake_build import Fakes, prepared
from tests.unit.patchset.test_llama_server import MADE_UP

FLAGS = "avx2 f16c fma sse4_2"
AVX512 = ("__AVX512F__", "__AVX512BW__", "__AVX512VL__", "__AVX512DQ__")
# Lines of GGML's files beside which ours go, and no more of them.
GGML = {
    "ggml/src/ggml-cpu/ggml-cpu.c": """\
#include "ops.h"
                ggml_compute_forward_flash_attn_ext(params, tensor);
                        cur += MAX(prefill, decode);
""",
    "ggml/src/ggml-cpu/ggml-cpu.cpp": """\
#include "traits.h"
    if (strcmp(name, "ggml_backend_get_features") == 0) {
""",
    "ggml/src/ggml-cpu/ggml-cpu-impl.h": "    bool use_ref;\n",
    "ggml/src/ggml-cpu/llamafile/sgemm.cpp": """\
#include "sgemm.h"
    if (n < 2)
        return false;
""",
    "ggml/src/ggml-cpu/repack.cpp": """\
#include "repack.h"
            case GGML_OP_MUL_MAT:
                {
                    size = ggml_row_size(PARAM_TYPE, ggml_nelements(op->src[1]));
        const char * src1_ptr = (const char *) params->wdata + (i11 + i12 * ne11) * src1_col_stride;
        for (int iter = nrows - (nrows % 4); iter < nrows; iter++) {
        const size_t nbw2  = nbw1 * ne11;
            const int64_t i11_processed = ne11 - ne11 % 4;
            int64_t src1_start = ith1 * ne11;
""",
    "ggml/src/ggml-cpu/amx/mmq.cpp": "\n",
    "ggml/src/ggml-cpu/arch/x86/quants.c": "\n",
    "ggml/src/ggml-cpu/arch/x86/cpu-feats.cpp": "\n",
    "ggml/src/ggml-cpu/arch/arm/quants.c": "\n",
    "ggml/src/ggml-cuda/common.h": "\n",
    "ggml/src/ggml-impl.h": "\n",
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """An Ollama that chooses its CPU library, as releases do, on a processor with AVX2."""
    made = prepared(tmp_path, monkeypatch)
    (made.installation.lib / "libggml-cpu-haswell.so").write_text("installed")
    for path, text in GGML.items():
        (made.source / path).parent.mkdir(parents=True, exist_ok=True)
        (made.source / path).write_text(text)
    has(made, "__AVX2__", "__FMA__", "__F16C__")
    monkeypatch.setattr(exact_processor, "flags", lambda: FLAGS)
    monkeypatch.setattr(exact_library.platform, "machine", lambda: "x86_64")
    return made


def has(fakes: Fakes, *macros: str) -> None:
    """What the compiler says of -march=native."""
    text = (fakes.compiler / "c++").read_text()
    said = "".join(f"echo '#define {name} 1'; " for name in macros)
    fake.script(fakes.compiler / "c++", text.replace("*-dM*) ", f"*-dM*) {said}", 1))


def calls(fakes: Fakes) -> list[str]:
    return (fakes.compiler / "calls").read_text().splitlines()


def compiled(fakes: Fakes, name: str) -> str:
    (line,) = [line for line in calls(fakes) if f"/{name} -o " in line]
    return line


def test_it_lies_beside_the_links(fakes: Fakes) -> None:
    tree = fakes.make()
    library = tree.lib / links.EXACT
    assert library.read_text() == "made\n"
    assert not library.is_symlink()
    assert (tree.lib / "libggml-cpu-haswell.so").is_symlink()
    assert (tree.exact, tree.not_exact, tree.processor) == ("avx2", "", FLAGS)
    assert tree.attention_here == "exact (avx2)"
    assert (fakes.tested[0].lib / links.EXACT).name == links.EXACT
    assert fakes.make() == tree


def test_the_name_of_its_kernels_is_that_of_isa_h(fakes: Fakes) -> None:
    has(fakes, *AVX512)
    assert fakes.make().exact == "avx512"


def test_what_is_compiled_for_which_processor(fakes: Fakes) -> None:
    fakes.make()
    usual = compiled(fakes, "repack.cpp")
    assert "-O3 -march=native" in usual
    assert "-DGGML_USE_CPU_REPACK" in usual
    assert "-fno-gnu-unique" in usual
    assert "-O2 -march=native" in compiled(fakes, "amx/mmq.cpp")
    assert "-x c " in compiled(fakes, "arch/x86/quants.c")
    score = compiled(fakes, "score.cpp")
    assert "-march" not in score, "it is asked on any processor"
    assert f'-DEXACTATTN_FLAGS="{FLAGS}"' in score
    assert not [line for line in calls(fakes) if "cpu-feats" in line or "arch/arm" in line]


def test_the_lines_are_placed_in_what_is_compiled() -> None:
    placed = anchors.place(dict(GGML), exact_hooks.HOOKS)
    assert anchors.missing_texts(dict(GGML), exact_hooks.NEEDED) == []
    assert set(placed) == {one.path for one in exact_hooks.HOOKS}
    for path, text in placed.items():
        kept = iter(text.splitlines())
        assert all(line in kept for line in GGML[path].splitlines()), "nothing of theirs is changed"
    sgemm = placed["ggml/src/ggml-cpu/llamafile/sgemm.cpp"]
    assert "    if (n != 1 || !exactattn_multiplies_one_column(Atype))\n    if (n < 2)\n" in sgemm


@pytest.mark.parametrize("hook", exact_hooks.HOOKS, ids=lambda one: one.name)
def test_an_anchor_that_is_not_there_is_said(hook: anchors.Anchored) -> None:
    with pytest.raises(PatchConflict, match=hook.name):
        anchors.place({**GGML, hook.path: "\n"}, exact_hooks.HOOKS)


def said_once(fakes: Fakes, capsys: pytest.CaptureFixture[str], why: str) -> None:
    """The tree is made without it, one line says so, and it is not tried again."""
    tree = fakes.make()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "attention" in line]
    assert line.startswith("warning: attention on the CPU stays stock's: ")
    assert why in line, line
    assert not (tree.lib / links.EXACT).exists()
    assert tree.exact == ""
    assert tree.attention_here.startswith("stock (")
    assert why in tree.attention_here
    assert len(fakes.tested) == 1, "it is tested and served all the same"
    before = len(calls(fakes))
    assert fakes.make() == tree
    assert len(calls(fakes)) == before


@pytest.mark.parametrize("failing", ["exactattn.cpp", "repack.cpp", "libggml-cpu-exact.so"])
def test_a_compiler_that_fails_leaves_a_tree_without_it(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    fake.compiler(fakes.compiler, failing=failing)
    has(fakes, "__AVX2__", "__FMA__", "__F16C__")
    said_once(fakes, capsys, "no such thing")


def test_a_source_that_it_does_not_fit(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    path = "ggml/src/ggml-cpu/repack.cpp"
    (fakes.source / path).write_text(GGML[path].replace("i11_processed", "i11_done"))
    said_once(fakes, capsys, "quantised last columns is not there")


def test_a_source_that_lacks_what_it_uses(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    (fakes.source / "ggml/src/ggml-cpu/ggml-cpu-impl.h").write_text("\n")
    said_once(fakes, capsys, "no ggml_compute_params::use_ref")


def test_an_ollama_that_does_not_choose_its_library(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    (fakes.installation.lib / "libggml-cpu-haswell.so").unlink()
    said_once(fakes, capsys, "no libggml-cpu-*.so to choose from")


def test_an_ollama_that_is_linked_to_one(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two would be there, and both would compute."""
    found = dataclasses.replace(fake.all_exported(Path()), needed=("libggml-cpu.so.0",))
    monkeypatch.setattr(elf, "read", lambda _path: found)
    said_once(fakes, capsys, "is linked to one libggml-cpu")


@pytest.mark.parametrize(
    ("flags", "machine", "why"),
    [
        (FLAGS, "aarch64", "it is not tried on aarch64"),
        ("", "x86_64", "Linux does not say"),
        ("avx2 " + 64 * "x", "x86_64", "Linux does not say"),
    ],
)
def test_another_processor(
    fakes: Fakes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    machine: str,
    why: str,
) -> None:
    monkeypatch.setattr(exact_processor, "flags", lambda: flags)
    monkeypatch.setattr(exact_library.platform, "machine", lambda: machine)
    said_once(fakes, capsys, why)


def test_a_processor_without_fused_products(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.compiler(fakes.compiler)
    has(fakes, "__AVX2__", "__F16C__")
    said_once(fakes, capsys, "lacks FMA")


def test_one_that_fails_its_check_does_not_stay(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.outcome = SelfTestOutcome(4, {}, not_exact="exact attention has other bits")
    said_once(fakes, capsys, "exact attention has other bits")


def test_on_another_processor_it_is_stock_until_it_is_made_again(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fakes.make()
    monkeypatch.setattr(exact_processor, "flags", lambda: f"{FLAGS} vnni")
    assert fakes.make() == first, "more instructions do not hurt"
    monkeypatch.setattr(exact_processor, "flags", lambda: FLAGS.replace("fma ", ""))
    assert first.attention_here.startswith("stock (the exact one is for another processor")
    second = fakes.make()
    assert second.folder != first.folder
    assert second.attention_here == "exact (avx2)"


def test_a_record_without_it_is_read(fakes: Fakes) -> None:
    """A service starts what an older `tiering` installed."""
    tree = fakes.make()
    values = json.loads((tree.folder / RECORD).read_text())
    older = {
        name: v for name, v in values.items() if name not in ("exact", "not_exact", "processor")
    }
    (tree.folder / RECORD).write_text(json.dumps({**older, "format": 3}))
    found = link_tree.read(tree.folder)
    assert found is not None
    assert (found.exact, found.attention_here) == ("", "stock")


def test_another_glue_or_kernel_makes_another_tree(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = built.default_sources()
    first = built.digest_of(sources)
    with monkeypatch.context() as patch:
        patch.setattr(exact_library, "SLOWER", {})
        second = built.digest_of(sources)
    headers = fakes.root / "headers/paged_attn"
    headers.mkdir(parents=True)
    (headers / "order.h").write_text("another order")
    monkeypatch.setattr(exact_library, "kernel_headers", lambda: headers.parent)
    assert len({first, second, built.digest_of(sources)}) == 3


def test_what_linux_says_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(exact_processor, "_INFO", info)
    assert exact_processor.flags() == ""
    info.write_text("model name\t: x\nflags\t\t: sse fma avx2\nflags\t\t: sse\nbugs\t\t: some\n")
    assert exact_processor.flags() == "avx2 fma sse"
    assert exact_processor.has_all("fma sse")
    assert not exact_processor.has_all("fma avx512f")
    info.write_text("Features\t: fp asimd\n")
    assert exact_processor.flags() == ""


def test_made_up_sources_have_it_not() -> None:
    """Else the other tests would make it."""
    assert not [path for path in MADE_UP if path.startswith(exact_hooks.BACKEND)]
