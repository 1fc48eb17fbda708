// Of llama.cpp's header of this name, what kvt_complete and kvt_given use.
#pragma once

#include <cstdint>

using llama_state_seq_flags = uint32_t;
constexpr llama_state_seq_flags LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY = 1;

struct llama_context;
struct llama_memory_i;
llama_memory_i * llama_get_memory(const llama_context * ctx);

struct llama_adapter_lora;
uint64_t llama_adapter_get_alora_n_invocation_tokens(const llama_adapter_lora * adapter);

enum llama_model_kv_override_type {
    LLAMA_KV_OVERRIDE_TYPE_INT,
    LLAMA_KV_OVERRIDE_TYPE_FLOAT,
    LLAMA_KV_OVERRIDE_TYPE_BOOL,
    LLAMA_KV_OVERRIDE_TYPE_STR,
};

struct llama_model_kv_override {
    llama_model_kv_override_type tag;
    char key[128];
    union {
        int64_t val_i64;
        double val_f64;
        bool val_bool;
        char val_str[128];
    };
};
