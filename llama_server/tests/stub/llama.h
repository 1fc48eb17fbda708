// Of llama.cpp's header of this name, what kvt_complete uses.
#pragma once

#include <cstdint>

using llama_state_seq_flags = uint32_t;
constexpr llama_state_seq_flags LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY = 1;

struct llama_context;
struct llama_memory_i;
llama_memory_i * llama_get_memory(const llama_context * ctx);
