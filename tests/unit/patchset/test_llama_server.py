"""Hooks by anchor: into sources made up here, and into a tree of llama.cpp where one is at hand."""

from __future__ import annotations

import os
import re
import tarfile
from difflib import ndiff
from pathlib import Path

import pytest

from ollama_tiering.errors import PatchConflict, UsageError
from ollama_tiering.patchset.llama_server.anchors import Anchored, Spot, place
from ollama_tiering.patchset.llama_server.hooks import CMAKE, COMMON, CONTEXT, HOOKS, NEEDED, OURS
from ollama_tiering.patchset.llama_server.tree import patch_tree

SOURCES = Path(__file__).parents[3] / "llama_server" / "src"
# Of llama.cpp: a folder, or an sdist of llama-cpp-python.
SDIST = "OLLAMA_TIERING_TEST_LLAMA_CPP"
GIVEN = os.environ.get(SDIST)  # before a fixture clears it

MADE_UP = {
    CMAKE: "set(TARGET server-context)\nadd_library(${TARGET} STATIC one.cpp)",  # no line end
    CONTEXT: """\
struct server_slot {
    llama_context * ctx_dft = nullptr;
    bool can_split() const {
        return true;
    }
};

struct server_context_impl {
    server_queue    queue_tasks;
    server_response queue_results;
    common_params params_base;
    std::vector<server_slot> slots;
    std::unique_ptr<server_prompt_cache> prompt_cache;

    bool load_model(common_params & params) {
        params_base = params;
        slot.callback_on_release = [this](int id_slot) {
            other();
        };
    }
    server_slot * get_slot_by_id(int id) { return nullptr; }
    server_slot * get_available_slot(const server_task & task) {
        ret->prompt_save(*prompt_cache);
    }
    void process_single_task(server_task && task) {
        switch (task.type) {
            case SERVER_TASK_TYPE_SLOT_RESTORE:
                {
                    read();
                }
        }
    }
    void destroy() {
        llama_init.reset();
    }
    void update_slots() {
        pre_decode();
    }
    void pre_decode() {
        slot.mem.seq_rm (slot.id, n_keep            , n_keep + n_discard);
        if (slot.state == SLOT_STATE_WAIT_OTHER) {
            SLT_DBG(slot, "waiting");
            return;
        }
        if (cache_prompt) {
            n_past = slot.prompt.tokens.get_common_prefix(input_tokens);
        }
    }
};

void server_context::start_loop() {
    auto & params = impl->params_base;
    impl->queue_tasks.start_loop(params.sleep_idle_seconds * 1000);
}
""",
    COMMON: """\
#include "mtmd.h"
#include "mtmd-helper.h"

server_tokens process_mtmd_prompt(mtmd_context * mctx, bool is_placeholder) {
    mtmd::bitmaps bitmaps;
    auto bitmaps_c_ptr = bitmaps.c_ptr();
    return tokenized(bitmaps_c_ptr);
}
""",
    "tools/server/server-common.h": """\
    const mtmd::input_chunk_ptr & find_chunk(size_t idx) const;
    void push_back(const mtmd_input_chunk * chunk);
bool are_lora_equal(
""",
    "tools/mtmd/mtmd.h": """\
MTMD_API struct mtmd_decoder_pos
    mtmd_image_tokens_get_decoder_pos(const mtmd_image_tokens * image, llama_pos pos_0, size_t i);
""",
    "src/llama-kv-cache.h": """\
    const llama_kv_cells & get_cells(llama_seq_id seq_id) const;
    std::vector<uint32_t> get_layer_ids() const;
    ggml_tensor * get_k(ggml_context * ctx, int32_t il) const;
    ggml_tensor * get_v(ggml_context * ctx, int32_t il) const;
    slot_info find_slot(const llama_ubatch & ubatch, bool cont) const;
    void apply_ubatch(const slot_info & sinfo, const llama_ubatch & ubatch);
    bool get_has_shift() const;
    uint32_t get_size()     const;
    uint32_t get_n_stream() const;
""",
    "src/llama-io.h": "    virtual void write_tensor(ggml_tensor * tensor, size_t offset) = 0;\n",
    "src/llama-memory.h": "virtual void state_write(llama_io_write_i & io, llama_seq_id s) = 0;\n",
    "src/llama-kv-cells.h": """\
    bool seq_has(uint32_t i, llama_seq_id seq_id) const;
    llama_pos pos_get(uint32_t i) const;
    uint32_t used_max_p1() const;
""",
    "src/llama-batch.h": "    llama_ubatch ubatch_reserve(uint32_t a, uint32_t b);\n",
    "src/llama-context.h": """\
    const llama_cparams & get_cparams() const;
    ggml_backend_sched_t get_sched() const;
    bool memory_update(bool optimize);
""",
    "src/llama-hparams.h": "    bool is_mla() const;\n    bool use_alibi     = false;\n",
    "src/llama-model.h": """\
    ggml_backend_dev_t dev_layer(int il) const;
    std::vector<std::pair<std::string, struct ggml_tensor *>> tensors_by_name;
""",
    "src/llama-memory-hybrid-iswa.h": "class llama_memory_hybrid_iswa {};\n",
    "src/llama-kv-cache-iswa.h": """\
    llama_kv_cache * get_base() const;
    llama_kv_cache * get_swa () const;
""",
    "src/llama-adapter.h": (
        "using llama_adapter_loras = std::unordered_map<llama_adapter_lora *, float>;\n"
    ),
    "src/llama-memory-hybrid.h": "    llama_kv_cache * get_mem_attn() const;\n",
    "common/common.h": """\
struct common_prompt_checkpoint {
    std::vector<uint8_t> data_tgt;
};
struct common_params {
    bool    cache_idle_slots = true;
    int32_t cache_ram_mib    = 8192;
    bool no_op_offload  = false;
    bool no_extra_bufts = false;
    bool no_host        = false;
    int32_t control_vector_layer_start = -1;
    int image_max_tokens = -1;
    int mtmd_batch_max_tokens = 1024;
};
""",
    "common/build-info.h": "const char * llama_build_info(void);\n",
    "tools/server/server-task.h": """\
    SERVER_TASK_TYPE_NEXT_RESPONSE,
    int32_t n_cache_reuse = 0;
        int id_slot;
    std::list<common_prompt_checkpoint> checkpoints;
    bool need_logits() const {
    std::list<server_prompt_cache_state> states;
""",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in MADE_UP.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def contents(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


def edit(tree: Path, path: str, old: str, new: str) -> None:
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new))


def added(tree: Path, path: str) -> list[str]:
    """Nothing of theirs is removed or changed."""
    compared = list(ndiff(MADE_UP[path].splitlines(), (tree / path).read_text().splitlines()))
    assert not [line for line in compared if line.startswith("- ")]
    return [line[2:] for line in compared if line.startswith("+ ")]


def test_every_line_stands_beside_its_anchor(tree: Path) -> None:
    assert patch_tree(tree, SOURCES)
    text = (tree / CONTEXT).read_text()
    assert '#include "kvt_server.h"\n\nstruct server_context_impl {\n' in text
    assert (
        "    server_response queue_results;\n    kvt::tiering kv_tiering { queue_tasks };\n" in text
    )
    after = "if (auto * s = get_slot_by_id(id_slot)) { kv_tiering.after_answer(*s); }"
    assert f"[this](int id_slot) {{\n            {after}\n            other();\n" in text
    assert "kv_tiering.before_shift(slots, slot, n_keep);\n        slot.mem.seq_rm (slot.id" in text
    assert "params_base = params;\n        kv_tiering.before_load(params_base);\n" in text
    of_a_file = "kv_tiering.before_slot_file(get_slot_by_id(task.slot_action.id_slot));"
    assert f"SLOT_RESTORE:\n                {{\n                    {of_a_file}\n" in text
    assert "kv_tiering.before_swap(*ret);\n        ret->prompt_save" in text
    assert "kv_tiering.before_prompt(slot);\n            n_past = " in text
    assert "void destroy() {\n        kv_tiering.before_end(slots);\n        llama_init" in text
    assert "* 1000);\n    impl->kv_tiering.before_end(impl->slots);\n}" in text
    common = (tree / COMMON).read_text()
    assert '#include "mtmd-helper.h"\n#include "kvt_named.h"\n' in common
    named = "kvt::name_images(bitmaps, files, prompt, get_media_marker()); }"
    assert f"    if (!is_placeholder) {{ {named}\n    auto bitmaps_c_ptr" in common
    step = "if (kv_tiering.step(slots, params_base, prompt_cache)) { return; }"
    assert f"void update_slots() {{\n        {step}\n" in text
    lines = sum(hook.path == CONTEXT for hook in HOOKS)
    assert len(added(tree, CONTEXT)) == lines + 1  # an empty line below the include
    assert len(added(tree, COMMON)) == 2
    assert added(tree, CMAKE) == ["include(${CMAKE_CURRENT_SOURCE_DIR}/kvt/kvt.cmake)"]


def test_all_our_sources_lie_there_and_are_compiled(tree: Path) -> None:
    patch_tree(tree, SOURCES)
    ours = {path.name for path in SOURCES.rglob("*") if path.is_file()}
    assert {path.name for path in (tree / OURS).iterdir()} == ours | {"kvt.cmake"}
    text = (tree / OURS / "kvt.cmake").read_text()
    compiled = set(re.findall(r"CURRENT_LIST_DIR}/(kvt_\w+\.cpp)", text))
    assert compiled == {name for name in ours if name.endswith(".cpp")}


def test_a_second_time_changes_nothing(tree: Path) -> None:
    assert patch_tree(tree, SOURCES)
    before = contents(tree)
    assert not patch_tree(tree, SOURCES)
    assert contents(tree) == before


def test_a_tree_with_other_sources_of_ours_is_refused(tree: Path) -> None:
    patch_tree(tree, SOURCES)
    edit(tree, f"{OURS}/kvt_crc.cpp", "0x82f63b78", "0x82f63b79")
    with pytest.raises(PatchConflict, match=r"other sources: kvt_crc\.cpp"):
        patch_tree(tree, SOURCES)


@pytest.mark.parametrize("one", HOOKS, ids=lambda one: one.name)
def test_an_anchor_that_is_missing_or_there_twice_leaves_all_as_it_was(
    tree: Path, one: Anchored
) -> None:
    line = re.search(f"^{one.pattern}$", MADE_UP[one.path], re.MULTILINE)
    assert line is not None
    for instead, said in ((f"// {line[0]}", "not there"), (f"{line[0]}\n{line[0]}", "2 times")):
        (tree / one.path).write_text(MADE_UP[one.path].replace(line[0], instead))
        before = contents(tree)
        with pytest.raises(PatchConflict, match=f"{re.escape(one.name)} is {said}"):
            patch_tree(tree, SOURCES)
        assert contents(tree) == before


@pytest.mark.parametrize("one", NEEDED, ids=lambda one: one.name)
def test_without_what_the_code_uses_nothing_is_written(tree: Path, one: object) -> None:
    needed = next(each for each in NEEDED if each is one)
    line = next(
        line for line in MADE_UP[needed.path].splitlines() if re.search(needed.pattern, line)
    )
    edit(tree, needed.path, f"{line}\n", "")
    before = contents(tree)
    with pytest.raises(PatchConflict, match=re.escape(needed.name)):
        patch_tree(tree, SOURCES)
    assert contents(tree) == before


def test_cells_that_are_not_shown_are_had_by_what_the_cache_writes(tree: Path) -> None:
    """As llama.cpp was until July 2026."""
    shown = "    const llama_kv_cells & get_cells(llama_seq_id seq_id) const;\n"
    written = (
        "    void state_write(llama_io_write_i & io, llama_seq_id seq_id = -1) const override;\n"
    )
    edit(tree, "src/llama-kv-cache.h", shown, written)
    assert patch_tree(tree, SOURCES)


def test_of_two_contexts_that_are_shifted_the_models_own_is_the_anchor(tree: Path) -> None:
    """As llama.cpp was until July 2026."""
    one = "        slot.mem.seq_rm (slot.id, n_keep            , n_keep + n_discard);\n"
    own = one.replace("slot.mem.seq_rm (", "common_context_seq_rm (ctx_tgt, ")
    edit(tree, CONTEXT, one, own + own.replace("ctx_tgt", "ctx_dft"))
    assert patch_tree(tree, SOURCES)
    before = "        kv_tiering.before_shift(slots, slot, n_keep);\n"
    assert before + own in (tree / CONTEXT).read_text()


def test_every_reason_is_named_at_once(tree: Path) -> None:
    edit(tree, CONTEXT, "get_common_prefix", "common_prefix")
    edit(tree, CONTEXT, "void update_slots()", "void turn()")
    with pytest.raises(PatchConflict) as refused:
        patch_tree(tree, SOURCES)
    assert "before a prompt" in refused.value.message
    assert "in each turn" in refused.value.message


def test_half_a_patch_is_refused(tree: Path) -> None:
    patch_tree(tree, SOURCES)
    edit(tree, CONTEXT, "            kv_tiering.before_prompt(slot);\n", "")
    before = contents(tree)
    with pytest.raises(PatchConflict, match="placed already"):
        patch_tree(tree, SOURCES)
    assert contents(tree) == before


def test_a_folder_of_that_name_is_not_overwritten(tree: Path) -> None:
    (tree / OURS).mkdir()
    with pytest.raises(PatchConflict, match="exists already"):
        patch_tree(tree, SOURCES)
    assert (tree / CONTEXT).read_text() == MADE_UP[CONTEXT]


def test_no_tree_and_no_sources_are_usage(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UsageError, match=r"no source of llama\.cpp"):
        patch_tree(empty, SOURCES)
    with pytest.raises(UsageError, match="no sources"):
        patch_tree(tree, empty)


def test_a_file_that_is_not_there_is_a_reason() -> None:
    one = Anchored("a", "it", "line", Spot.BEFORE, "x")
    with pytest.raises(PatchConflict, match="a: no such file"):
        place({}, [one])


def real_tree(place: Path, to: Path) -> Path:
    """The files that matter of a folder or of an sdist."""
    wanted = {one.path for one in HOOKS} | {one.path for one in NEEDED}
    if place.is_dir():
        found = {path: (place / path).read_bytes() for path in wanted}
    else:
        with tarfile.open(place) as archive:
            found = {}
            for member in archive:
                path = member.name.partition("vendor/llama.cpp/")[2]
                if path in wanted:
                    part = archive.extractfile(member)
                    assert part is not None
                    found[path] = part.read()
    for path, data in found.items():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_bytes(data)
    return to


@pytest.mark.upstream
def test_the_real_source_takes_all_hooks(tmp_path: Path) -> None:
    if not GIVEN:
        pytest.skip(f"{SDIST} names no source of llama.cpp")
    tree = real_tree(Path(GIVEN), tmp_path)
    assert patch_tree(tree, SOURCES)
    assert (tree / CONTEXT).read_text().count("kv_tiering.") == 7
    assert not patch_tree(tree, SOURCES)
