// Why a model is not tiered.
#pragma once

#include "kvt_cache.h"
#include "kvt_loaded.h"

#include <string>
#include <vector>

struct common_params;
struct llama_context;

namespace kvt {

// What speculative decoding guesses the next tokens by.
enum class drafts {
    none,
    of_tokens, // those before (n-grams), or a model whose layers read the target's rows: nothing but the target has rows
    of_rows,   // a context of its own, which has to hold the same positions as the target's
};

// `draft`: the context of a draft, or nullptr.
drafts drafting_of(llama_context * ctx, llama_context * draft, bool speculates);

std::string base_name(const std::string & path);

// Empty if it is tiered: then `planes` has what is stored of it. `loaded` are the files as they were before they were read. For
// the others, see describe_server().
std::string why_not(const common_params & params, llama_context * ctx, drafts drafting, const used_files & loaded, std::vector<plane> & planes);

} // namespace kvt
