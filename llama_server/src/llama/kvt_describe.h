// What decides the bits of this server's rows, as the sidecar is told; or why the model is not tiered.
#pragma once

#include "kvt_loaded.h"

struct common_params;
struct llama_context;

namespace kvt {

enum class drafts;

// A context that is not tiered has `unsupported` set. `drafting`: other tokens than the answer's are computed, too. `loaded`:
// the files before they were loaded. If one is another now, nobody knows which of the two was loaded.
hello describe_server(const common_params & params, llama_context * ctx, drafts drafting, const used_files & loaded);

// Whether a context shift leaves the bits of rows that keep their positions as they are: it rotates all of them, most by 0.
bool shifts_exactly(llama_context * ctx);

// Whether a shift was asked for and comes with the next batch.
bool shift_waits(llama_context * ctx);

} // namespace kvt
