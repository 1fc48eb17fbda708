// States and windows. A state is what a slot of a model with recurrent layers or windows needs, beside rows, to go on at a position: the
// engine's own bytes, and a head that says where they belong. A window is the rows of one block in the layers that keep only
// the last rows; with enough of them the slot goes on, too. Both are stored beside the blocks of their conversation.
#pragma once

#include "kvt_lease.h"
#include "kvt_messages.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvt {

constexpr size_t state_head_bytes = 24; // magic, version, n_tokens, least and greatest position
constexpr size_t most_states = 3;       // that are stored of one answer

struct state {
    uint32_t n_tokens = 0;   // that were computed when it was made
    std::vector<char> bytes; // head, then the engine's
};

struct state_head {
    uint32_t n_tokens = 0;
    int32_t least = 0; // positions that the engine noted with it
    int32_t greatest = 0;
};

// A state with its head, and room for so many bytes of the engine's.
state make_state(const state_head & head, size_t engine_bytes);

// False if these bytes are no state after so many tokens.
bool read_head(const std::vector<char> & bytes, uint32_t n_tokens, state_head & head);

// The window of one block: rows [first, first + rows), of each plane one after the other.
struct window {
    uint32_t first = 0;
    uint32_t rows = 0;
    std::vector<char> bytes;
};

// All of a state's or a window's file, checked, while the lease lasts: 0, or the shortfall. It is no larger than the sidecar
// lets states be.
uint32_t read_state(const file & named, lease & held, std::vector<char> & bytes);

bool write_state(const reserved & named, const char * bytes, size_t count, filled & done);

} // namespace kvt
