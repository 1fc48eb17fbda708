// Cells of llama-server's that rows were read into and that hold something else: nothing of it stays when they are given back.
// Says "zero" or what is wrong.
#include "common.h"
#include "llama.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

constexpr int32_t LLAMA_TOKEN_NULL = -1;

// Of llama.cpp, what kvt_slots uses.
struct mtmd_input_chunk {};
struct server_tokens {
    std::vector<int32_t> all;
    size_t size() const { return all.size(); }
    int32_t operator[](size_t i) const { return all[i]; }
    std::unique_ptr<const mtmd_input_chunk> find_chunk(size_t) const { return nullptr; } // there is no image
    void push_back(int32_t token) { all.push_back(token); }
    void push_back(const mtmd_input_chunk *) {}
    void keep_first(size_t count) { all.resize(count); }
    void clear() { all.clear(); }
};
struct server_prompt {
    server_tokens tokens;
    std::list<common_prompt_checkpoint> checkpoints;
};
struct server_task {
    server_tokens tokens;
};
struct server_slot {
    int id = 0;
    const server_task * task = nullptr;
    llama_context * ctx_tgt = nullptr;
    server_prompt prompt;
};
void llama_memory_seq_rm(llama_memory_i *, int32_t, int32_t, int32_t) {}
llama_memory_i * llama_get_memory(const llama_context *) { return nullptr; }

#include "../src/llama/kvt_slots.h"

namespace {

constexpr size_t row_bytes = 32;
constexpr size_t cells = 1000;
constexpr uint32_t first_cell = 7; // of the first row
std::vector<char> memory[2] = { std::vector<char>(cells*row_bytes, 'o'), std::vector<char>(cells*row_bytes, 'o') };
uint32_t dropped = UINT32_MAX;
uint32_t apart = UINT32_MAX; // from this row on, cells lie apart

} // namespace

namespace kvt {

memory_parts parts_of(llama_context *, std::string &) { return { reinterpret_cast<llama_kv_cache *>(memory), nullptr, false }; }

std::vector<plane> planes_of(const llama_kv_cache &, int32_t, bool, std::string &) {
    plane k, v;
    v.is_v = true;
    k.row_bytes = v.row_bytes = row_bytes;
    return { k, v };
}

char * host_row(const plane & of, uint32_t cell) { return memory[of.is_v].data() + cell*row_bytes; }

std::vector<uint32_t> take_cells(llama_context *, llama_kv_cache &, int32_t, uint32_t first, uint32_t count, const std::vector<int32_t> &) {
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < count; ++i) {
        found.push_back(first_cell + first + i*(first < apart ? 1 : 2));
    }
    return found;
}

void settle(llama_context *) {}
void drop_rows(llama_kv_cache &, int32_t, int32_t from) { dropped = (uint32_t) from; }
std::vector<uint32_t> cells_of(const llama_kv_cache &, int32_t, uint32_t, uint32_t, const std::vector<int32_t> &) { return {}; }
bool has_axes(llama_context *) { return false; }
int32_t number_of_chunk(const mtmd_input_chunk *) { return 0; }
void read_rows(const plane &, const uint32_t *, size_t, char *) {}
void row_writer::write(const plane &, const uint32_t *, size_t, const char *) {}
row_writer::~row_writer() {}
bool put_state(llama_context *, int32_t, checkpoints &, uint32_t, uint32_t, const std::vector<char> &, const std::vector<int32_t> &) { return false; }
bool put_windows(llama_context *, int32_t, checkpoints &, uint32_t, uint32_t, const std::vector<window> &, const std::vector<int32_t> &) {
    return false;
}

} // namespace kvt

namespace {

// What is wrong with the cells: those of the first `kept` rows hold what was read, and those up to `end` nothing.
std::string wrong(uint32_t kept, uint32_t end) {
    if (dropped != kept) {
        return "not given back";
    }
    for (const auto & plane : memory) {
        for (size_t i = 0; i < plane.size(); ++i) {
            const size_t cell = i/row_bytes;
            const char read = cell < first_cell + kept ? (char) 0x7e : (char) 0;
            if (plane[i] != (cell < first_cell || cell >= first_cell + end ? 'o' : read)) {
                return "cell " + std::to_string(cell);
            }
        }
    }
    return "";
}

// Three blocks are to be read, of which the first are sound.
std::string after(uint32_t sound) {
    for (auto & plane : memory) {
        std::fill(plane.begin(), plane.end(), 'o');
    }
    dropped = UINT32_MAX;
    server_slot slot;
    const server_task task { { std::vector<int32_t>(300, 1) } };
    const std::vector<int32_t> & prompt = task.tokens.all;
    slot.task = &task;
    kvt::slot_cells into(slot, prompt);
    uint32_t end = 0;
    for (; end < 192; end += 64) {
        const auto places = into.places(end, 64);
        if (places.empty()) {
            break;
        }
        for (char * place : places) {
            std::fill_n(place, 64*row_bytes, (char) 0x7e); // an f16 of such bytes is a NaN
        }
    }
    uint32_t kept = 0;
    for (; kept < std::min(sound, end); kept += 64) {
        into.put(kept, 64);
    }
    if (kept < end) {
        into.spoiled(kept);
    }
    return wrong(kept, end);
}

// Rows that came in earlier steps stay: of an image with M-RoPE all would go.
std::string later() {
    dropped = UINT32_MAX;
    server_slot slot;
    const server_task task { { std::vector<int32_t>(300, 1) } };
    slot.task = &task;
    slot.prompt.tokens.all.assign(64, 1);
    kvt::slot_cells into(slot, task.tokens.all, 64);
    const std::vector<char> block(2*64*row_bytes);
    const bool written = into.write(64, 64, block.data(), 64, 0);
    return written && dropped == UINT32_MAX && slot.prompt.tokens.size() == 128 ? "" : "a later step drops what has come";
}

} // namespace

int main() {
    std::string bad = after(64);
    bad = bad.empty() ? later() : bad;
    for (const uint32_t sound : { 0u, 64u, 128u }) {
        apart = 128; // the third block's cells
        bad = bad.empty() ? after(sound) : bad;
    }
    std::cout << (bad.empty() ? "zero" : bad) << std::endl;
    return 0;
}
