// What a server was given to compute with: files, and what changes the values in them.
#pragma once

#include "kvt_loaded.h"

#include <string>

struct common_params;

namespace kvt {

// The model first, in the order of its parts; one more than most_files if there are more.
used_files look_at_files(const common_params & params);

// The scales of the LoRA adapters, in the order of their files, and in which order llama.cpp adds what they do: empty without any.
std::string adapters_of(const common_params & params);

// Whether one of them is applied from some tokens on (aLoRA): its scale then says nothing of a row.
bool waits_for_tokens(const common_params & params);

// The strengths of the control vectors, in the order of their files, and their layers: empty without any.
std::string vectors_of(const common_params & params);

// A digest of the values that are taken in place of those of the model's file (--override-kv): empty without any.
std::string overrides_of(const common_params & params);

// A text as the value of a field: its digest, if it is too long for one, or cannot be printed.
std::string as_value(const std::string & text);

} // namespace kvt
