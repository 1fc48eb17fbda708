"""Where llama-server calls the tiering, and what the tiering uses of llama.cpp.

docs/llama-server.md says what each call is for. Data only: anchors.py places it, tree.py writes it.
"""

from __future__ import annotations

from typing import Final

from ollama_tiering.patchset.llama_server.anchors import Anchored, NeededText, Spot

SERVER: Final = "tools/server"
OURS: Final = f"{SERVER}/kvt"  # where our sources go
CMAKE: Final = f"{SERVER}/CMakeLists.txt"
CONTEXT: Final = f"{SERVER}/server-context.cpp"
COMMON: Final = f"{SERVER}/server-common.cpp"
INCLUDED: Final = "kvt.cmake"

HOOKS: Final = (
    Anchored(
        *(CMAKE, "the build"),
        r"set\(TARGET server-context\)",
        Spot.END,
        "include(${CMAKE_CURRENT_SOURCE_DIR}/kvt/kvt.cmake)",
    ),
    Anchored(
        *(CONTEXT, "the include"),
        r"struct server_context_impl \{",
        Spot.BEFORE,
        '#include "kvt_server.h"\n',
    ),
    Anchored(
        *(CONTEXT, "the tiering"),
        r"(?P<indent> *)server_response queue_results;",
        Spot.AFTER,
        r"\g<indent>kvt::tiering kv_tiering { queue_tasks };",
    ),
    Anchored(
        *(CONTEXT, "what is done before the model is loaded"),
        r"(?P<indent> *)params_base = params;",
        Spot.AFTER,
        r"\g<indent>kv_tiering.before_load(params_base);",
    ),
    Anchored(
        *(CONTEXT, "what is done before a prompt"),
        r"(?P<indent> *)n_past = slot\.prompt\.tokens\.get_common_prefix\(input_tokens\);",
        Spot.BEFORE,
        r"\g<indent>kv_tiering.before_prompt(slot);",
    ),
    Anchored(
        *(CONTEXT, "what is done after an answer"),
        r"(?P<indent> *)slot\.callback_on_release = \[this\]\(int (?P<id>\w+)\) \{",
        Spot.AFTER,
        r"\g<indent>    if (auto * s = get_slot_by_id(\g<id>)) { kv_tiering.after_answer(*s); }",
    ),
    Anchored(
        *(CONTEXT, "what is done before a context shift"),
        # Of the model's own context; until July 2026 a draft's had a line of its own.
        r"(?P<indent> *)[\w.]*seq_rm *\((ctx_tgt, *)?slot\.id, *n_keep *, *n_keep \+ n_discard\);",
        Spot.BEFORE,
        r"\g<indent>kv_tiering.before_shift(slots, slot, n_keep);",
    ),
    Anchored(
        *(CONTEXT, "what is done before a swap"),
        r"(?P<indent> *)ret->prompt_save\(\*prompt_cache\);",
        Spot.BEFORE,
        r"\g<indent>kv_tiering.before_swap(*ret);",
    ),
    Anchored(
        *(CONTEXT, "what is done before a slot's file is read"),
        r"(?P<indent> *)case SERVER_TASK_TYPE_SLOT_RESTORE:\n *\{",
        Spot.AFTER,
        r"\g<indent>        kv_tiering.before_slot_file(get_slot_by_id(task.slot_action.id_slot));",
    ),
    Anchored(
        *(CONTEXT, "what is done when the main loop has ended"),
        # Before connections are waited for, which may take for ever.
        r"(?P<indent> *)impl->queue_tasks\.start_loop\(.*\);",
        Spot.AFTER,
        r"\g<indent>impl->kv_tiering.before_end(impl->slots);",
    ),
    Anchored(
        *(CONTEXT, "what is done before the rows go"),
        r"(?P<indent> *)void destroy\(\) \{",
        Spot.AFTER,
        r"\g<indent>    kv_tiering.before_end(slots);",
    ),
    Anchored(
        *(CONTEXT, "what is done in each turn"),
        r"(?P<indent> *)void update_slots\(\) \{",
        Spot.AFTER,
        r"\g<indent>    if (kv_tiering.step(slots, params_base, prompt_cache)) { return; }",
    ),
    Anchored(
        *(COMMON, "the include for images"),
        r'#include "mtmd-helper\.h"',
        Spot.AFTER,
        '#include "kvt_named.h"',
    ),
    Anchored(
        *(COMMON, "the names of images"),
        r"(?P<indent> *)auto bitmaps_c_ptr = bitmaps\.c_ptr\(\);",
        Spot.BEFORE,
        r"\g<indent>if (!is_placeholder) "
        r"{ kvt::name_images(bitmaps, files, prompt, get_media_marker()); }",
    ),
)

_CACHE: Final = "src/llama-kv-cache.h"
_CELLS: Final = "src/llama-kv-cells.h"
_TASK: Final = f"{SERVER}/server-task.h"
_TOKENS: Final = f"{SERVER}/server-common.h"

NEEDED: Final = (
    NeededText(
        *(_CACHE, "llama_kv_cache::get_cells or state_write"),
        r"llama_kv_cells & get_cells\(llama_seq_id"
        r"|void state_write\(llama_io_write_i & io, llama_seq_id",
    ),
    NeededText("src/llama-io.h", "llama_io_write_i::write_tensor", r"virtual void write_tensor\("),
    NeededText(
        *("src/llama-memory.h", "llama_memory_i::state_write"),
        r"virtual void state_write\(llama_io_write_i & io, llama_seq_id",
    ),
    NeededText(_CACHE, "llama_kv_cache::get_layer_ids", r"get_layer_ids\(\) const;"),
    NeededText(
        _CACHE, "llama_kv_cache::get_k", r"ggml_tensor \* get_k\(ggml_context \* ctx, int32_t"
    ),
    NeededText(
        _CACHE, "llama_kv_cache::get_v", r"ggml_tensor \* get_v\(ggml_context \* ctx, int32_t"
    ),
    NeededText(
        *(_CACHE, "llama_kv_cache::find_slot"),
        r"slot_info find_slot\(const llama_ubatch & ubatch, bool cont\) const;",
    ),
    NeededText(
        *(_CACHE, "llama_kv_cache::apply_ubatch"),
        r"void apply_ubatch\(const slot_info & sinfo, const llama_ubatch & ubatch\);",
    ),
    NeededText(_CACHE, "llama_kv_cache::get_has_shift", r"bool get_has_shift\(\) const;"),
    NeededText(_CACHE, "llama_kv_cache::get_n_stream", r"get_n_stream\(\) +const;"),
    NeededText(_CACHE, "llama_kv_cache::get_size", r"get_size\(\) +const;"),
    NeededText(_CELLS, "llama_kv_cells::seq_has", r"bool seq_has\(uint32_t i, llama_seq_id"),
    NeededText(_CELLS, "llama_kv_cells::pos_get", r"llama_pos pos_get\(uint32_t i\) const"),
    NeededText(_CELLS, "llama_kv_cells::used_max_p1", r"used_max_p1\(\) const"),
    NeededText("src/llama-batch.h", "llama_batch_allocr::ubatch_reserve", r"ubatch_reserve\("),
    NeededText("src/llama-context.h", "llama_context::get_cparams", r"get_cparams\(\) const;"),
    NeededText("src/llama-context.h", "llama_context::get_sched", r"get_sched\(\) const;"),
    NeededText(
        "src/llama-context.h",
        "llama_context::memory_update",
        r"bool memory_update\(bool optimize\);",
    ),
    NeededText("src/llama-hparams.h", "llama_hparams::is_mla", r"bool is_mla\(\) const;"),
    NeededText("src/llama-model.h", "llama_model::dev_layer", r"dev_layer\(int il\) const;"),
    NeededText(
        *("src/llama-model.h", "llama_model::tensors_by_name"),
        r"std::vector<std::pair<std::string, struct ggml_tensor \*>> tensors_by_name;",
    ),
    NeededText("src/llama-hparams.h", "llama_hparams::use_alibi", r"bool use_alibi +="),
    NeededText(
        "src/llama-memory-hybrid-iswa.h", "hybrid caches", r"class llama_memory_hybrid_iswa"
    ),
    NeededText(
        *("src/llama-kv-cache-iswa.h", "llama_kv_cache_iswa::get_base"),
        r"llama_kv_cache \* get_base *\(\) const;",
    ),
    NeededText(
        *("src/llama-kv-cache-iswa.h", "llama_kv_cache_iswa::get_swa"),
        r"llama_kv_cache \* get_swa *\(\) const;",
    ),
    NeededText(
        *("src/llama-memory-hybrid.h", "llama_memory_hybrid::get_mem_attn"),
        r"llama_kv_cache \* get_mem_attn\(\) const;",
    ),
    NeededText("common/common.h", "checkpoints", r"^struct common_prompt_checkpoint \{"),
    NeededText("common/common.h", "data of a checkpoint", r"^ +std::vector<uint8_t> data_tgt;"),
    NeededText(
        *(_TASK, "checkpoints of a prompt"), r"^ +std::list<common_prompt_checkpoint> checkpoints;"
    ),
    NeededText("common/build-info.h", "llama_build_info", r"llama_build_info\("),
    NeededText(CONTEXT, "server_slot::ctx_dft", r"llama_context \* ctx_dft"),
    NeededText(CONTEXT, "can_split of a slot", r"^ +bool can_split\(\) const \{"),
    NeededText(
        *(CONTEXT, "slots that are passed over"),
        r"^ +if \(slot\.state == SLOT_STATE_WAIT_OTHER\) \{",
    ),
    NeededText(CONTEXT, "get_slot_by_id", r"server_slot \* get_slot_by_id\("),
    NeededText(CONTEXT, "params_base", r"^ +common_params params_base;"),
    NeededText(CONTEXT, "the slots", r"std::vector<server_slot> slots;"),
    NeededText(
        *(CONTEXT, "the server's own cache of prompts"),
        r"^ +std::unique_ptr<server_prompt_cache> prompt_cache;",
    ),
    NeededText(_TASK, "prompts of that cache", r"^ +std::list<server_prompt\w*> states;"),
    NeededText("common/common.h", "cache_ram_mib", r"^ +int32_t cache_ram_mib\b"),
    NeededText("common/common.h", "no_op_offload", r"^ +bool no_op_offload\b"),
    NeededText("common/common.h", "no_extra_bufts", r"^ +bool no_extra_bufts\b"),
    NeededText("common/common.h", "no_host", r"^ +bool no_host\b"),
    NeededText("common/common.h", "cache_idle_slots", r"^ +bool +cache_idle_slots\b"),
    NeededText(_TASK, "server_task::need_logits", r"bool need_logits\(\) const"),
    NeededText(_TASK, "the slot of a slot's file", r"^ +int id_slot;"),
    NeededText(_TASK, "an empty task", r"SERVER_TASK_TYPE_NEXT_RESPONSE"),
    NeededText(_TASK, "n_cache_reuse", r"n_cache_reuse"),
    NeededText(
        *(_TOKENS, "server_tokens::find_chunk"),
        r"const mtmd::input_chunk_ptr & find_chunk\(size_t idx\) const;",
    ),
    NeededText(
        *(_TOKENS, "server_tokens::push_back of an image"),
        r"void push_back\(const mtmd_input_chunk \* chunk\);",
    ),
    NeededText(
        *("tools/mtmd/mtmd.h", "mtmd_image_tokens_get_decoder_pos"),
        r"mtmd_image_tokens_get_decoder_pos\(const mtmd_image_tokens \* \w+, llama_pos pos_0,",
    ),
    NeededText("common/common.h", "mtmd_batch_max_tokens", r"^ +int mtmd_batch_max_tokens\b"),
    NeededText("common/common.h", "image_max_tokens", r"^ +int image_max_tokens\b"),
    NeededText(
        *("common/common.h", "layers of a control vector"),
        r"^ +int32_t control_vector_layer_start\b",
    ),
    NeededText(_TOKENS, "are_lora_equal", r"^bool are_lora_equal\("),
    NeededText(
        *("src/llama-adapter.h", "llama_adapter_loras"),
        r"^using llama_adapter_loras = std::\w*map<",
    ),
)
