// Kinds of memory that llama.cpp may have, made up: is all of a sequence stored, and is one that derives from a known one refused?
// A line each: what it is, and why it is not tiered.
#include "../src/kvt_exactly.h"
#include "../src/llama/kvt_cache.h"
#include "../src/llama/kvt_cells.h"
#include "../src/llama/kvt_complete.h"
#include "llama-memory.h"

#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr size_t rows = 100;
constexpr size_t seen_of_window = 30; // of the 40 that it holds
constexpr size_t row_bytes = 64;      // of a plane: there are four

size_t more_of_whole = 0; // bytes of a cache that nobody knows
size_t more_of_state = 0;
bool has_states = false;
bool has_window = false;

// A cache with rows, and what goes with them.
struct plain : llama_memory_i {
    void state_write(llama_io_write_i & io, int32_t, llama_state_seq_flags flags) const override {
        const uint32_t count = 1;
        io.write(&count, sizeof count);
        if ((flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == 0) {
            io.write_tensor(nullptr, 0, rows*4*row_bytes + more_of_whole);
        }
        if (has_states) {
            io.write_tensor(nullptr, 0, (has_window ? seen_of_window*4*row_bytes : 12345) + more_of_state);
        }
    }
};
struct derived : plain {};

plain memory;
char caches[2];

void say(const std::string & what) {
    std::cout << what << ": " << kvt::why_incomplete(nullptr, 0) << std::endl;
}

} // namespace

llama_memory_i * llama_get_memory(const llama_context *) { return &memory; }

namespace kvt {

memory_parts parts_of(llama_context *, std::string &) {
    auto * known = reinterpret_cast<llama_kv_cache *>(caches);
    auto * window = reinterpret_cast<llama_kv_cache *>(caches + 1);
    return { known, has_window ? window : nullptr, has_states };
}

std::vector<plane> planes_of(const llama_kv_cache &, int32_t, bool, std::string &) {
    plane one;
    one.row_bytes = row_bytes;
    return { 4, one };
}

std::vector<cell> held_cells(const llama_kv_cache & cache, int32_t) {
    return std::vector<cell>(reinterpret_cast<const char *>(&cache) == caches ? rows : 40);
}

} // namespace kvt

int main() {
    say("rows");
    more_of_whole = rows*2; // a key of two bytes for each
    say("rows and keys");
    has_states = true;
    say("rows, states and keys");
    more_of_whole = 0;
    say("rows and states");
    has_window = true;
    say("rows and windows");
    more_of_state = 1;
    say("rows and windows with more");
    more_of_state = 20*4*row_bytes;
    say("windows of more rows than are held");
    derived other;
    llama_memory_i * as_it_comes = &other;
    std::cout << "derived: " << (kvt::exactly<plain>(as_it_comes) == nullptr && kvt::exactly<derived>(as_it_comes) != nullptr ? "refused" : "taken")
              << std::endl;
    as_it_comes = &memory;
    std::cout << "known: " << (kvt::exactly<plain>(as_it_comes) == &memory ? "taken" : "refused") << std::endl;
    return 0;
}
