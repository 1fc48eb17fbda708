// Kinds of models and settings that failed the self-test with this llama.cpp (ollama_tiering/launch/self_test): they are served as
// stock. The tree of links names them, in OLLAMA_KV_TIER_REFUSED_KINDS with commas between them.
#pragma once

#include "kvt_cache.h"

#include <string>
#include <vector>

struct common_params;

namespace kvt {

// Whether prompts are tiered behind images: not where that failed the self-test.
bool images_refused();

// The first of the model's kinds that is refused, as a reason; empty if none is.
std::string refused_kind(const common_params & params, llama_context * ctx, const memory_parts & parts, const std::vector<plane> & planes);

} // namespace kvt
