// What is needed of an engine: rows of a slot out of its cache, and into it. Both are used in the engine's main loop only.
//
// The rows of a block are handed over as its segments are: by layer, K before V, each segment with all its rows, and no
// gaps between segments.
#pragma once

#include "kvt_file.h"
#include "kvt_messages.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt {

constexpr uint32_t block_tokens = 64; // the sidecar's blocks begin at multiples of it

// Bytes of a block of so many rows, as it is handed over.
size_t block_bytes(const hello & said, uint32_t rows);

class row_source {
public:
    virtual ~row_source() = default;

    // Rows [first, first + rows). False if the slot does not hold the rows of these tokens.
    virtual bool read(int slot, const std::vector<int32_t> & tokens, uint32_t first, uint32_t rows, char * out) = 0;
};

class row_sink {
public:
    virtual ~row_sink() = default;

    // Rows [first, first + rows) of the prompt. `block` holds `block_rows` rows, of which they begin with row `skip`.
    // Called in the order of positions, each beginning where the last one ended. False if there are no cells for them.
    virtual bool write(uint32_t first, uint32_t rows, const char * block, uint32_t block_rows, uint32_t skip) = 0;
};

} // namespace kvt
