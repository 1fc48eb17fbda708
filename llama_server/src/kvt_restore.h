// What of a prompt can be had from files: look-up, reading, checking, and into the slot, block by block.
//
// A block is read and checked whole before a cell is touched for it. What cannot be had ends the restored prefix there.
#pragma once

#include "kvt_client.h"
#include "kvt_rows.h"

#include <cstdint>
#include <vector>

namespace kvt {

// Numbers of `Shortfall` in block_store.proto: why there is not more.
enum shortfall : uint32_t {
    shortfall_none = 0,
    shortfall_too_short = 4,
    shortfall_sidecar_away = 7,
    shortfall_sidecar_late = 8,
    shortfall_sidecar_error = 9,
    shortfall_damaged = 11,
    shortfall_unreadable = 12,
    shortfall_no_cells = 16,
    shortfall_not_looked_up = 19,
    shortfall_not_text = 20,
    shortfall_failed = 21,
};

// The slot holds the first `have` rows of the prompt, and `sink` gets what comes after them. Fills in what was restored:
// tokens, bytes, times, reason and place.
void restore(client & look_up, const hello & said, const std::vector<int32_t> & tokens, uint32_t have, row_sink & sink,
             finished & report);

} // namespace kvt
