// Memory of the host that a device copies from by itself, for what is on its way into the device's memory. Of other memory the
// driver makes a copy first, in the thread that serves.
#pragma once

#include "kvt_rows.h"

#include <memory>

struct llama_context;

namespace kvt {

constexpr size_t most_pinned_bytes = 64u << 20; // kept as long as the process lives: to make it takes the driver milliseconds

// Of the device that has this context's rows. nullptr if none has.
std::shared_ptr<block_memory> pinned_memory(llama_context * ctx);

} // namespace kvt
