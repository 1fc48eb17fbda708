// Why a model is not tiered, and what its file is known by.
#pragma once

#include "kvt_cache.h"
#include "kvt_messages.h"

#include <string>
#include <vector>

struct common_params;
struct llama_context;

namespace kvt {

// What speculative decoding guesses the next tokens by.
enum class drafts {
    none,
    of_tokens, // those before (n-grams): nothing but the target has rows
    of_rows,   // a context of its own, which has to hold the same positions as the target's
};

std::string base_name(const std::string & path);

// A name that says what is in the file, as those of Ollama's blobs.
bool named_by_digest(const std::string & name);

// Empty if it is tiered: then `planes` has what is stored of it. `loaded` is the model's file as it was before it was read. For
// the others, see describe_server().
std::string why_not(const common_params & params, llama_context * ctx, drafts drafting, const loaded_file & loaded, std::vector<plane> & planes);

} // namespace kvt
