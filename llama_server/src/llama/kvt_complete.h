// Whether what is stored of a sequence is all that llama.cpp keeps of it.
#pragma once

#include <cstdint>
#include <string>

struct llama_context;

namespace kvt {

// Of a sequence that has rows: what llama.cpp itself would write of it has just the bytes of its rows, and of its state or windows.
// Else what is more, in words: a cache that this code does not know would come back empty.
std::string why_incomplete(llama_context * ctx, int32_t seq);

// Whether a context keeps no sequence: its layers read the rows of another one.
bool holds_nothing(llama_context * ctx);

} // namespace kvt
