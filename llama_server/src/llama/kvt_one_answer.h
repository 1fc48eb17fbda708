// Whether a text has one set of rows, however it is cut into batches (docs/exact.md, "On llama-server").
#pragma once

#include "kvt_cache.h"

#include <string>
#include <vector>

struct common_params;
struct llama_context;

namespace kvt {

// `attention`: what the CPU's library says of its exact attention, empty of stock's. True only of what the page says was tested.
bool gives_one_answer(const common_params & params, llama_context * ctx, const memory_parts & parts, const std::vector<plane> & planes,
                      const std::string & attention);

} // namespace kvt
