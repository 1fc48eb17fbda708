#include "kvt_complete.h"

#include "kvt_cache.h"
#include "kvt_cells.h"

#include "llama-io.h"
#include "llama-memory.h"
#include "llama.h"

#include <vector>

namespace kvt {

namespace {

// Counts bytes of tensors: all else that is written says where they belong.
class tensor_counter : public llama_io_write_i {
public:
    void write(const void *, size_t size) override { all_ += size; }

    void write_tensor(ggml_tensor *, size_t, size_t size) override {
        all_ += size;
        tensors_ += size;
    }

    size_t n_bytes() override { return all_; }
    size_t tensors() const { return tensors_; }

private:
    size_t all_ = 0;
    size_t tensors_ = 0;
};

size_t written(const llama_memory_i & memory, int32_t seq, llama_state_seq_flags flags) {
    tensor_counter counter;
    memory.state_write(counter, seq, flags);
    return counter.tensors();
}

size_t row_bytes(const llama_kv_cache & cache, int32_t seq, bool has_v, std::string & why) {
    size_t bytes = 0;
    for (const auto & one : planes_of(cache, seq, has_v, why)) {
        bytes += one.row_bytes;
    }
    return bytes;
}

} // namespace

// A cache with cells of its own writes how many it has, also if they are none.
bool holds_nothing(llama_context * ctx) {
    const auto * memory = llama_get_memory(ctx);
    tensor_counter counter;
    if (memory != nullptr) {
        memory->state_write(counter, 0, 0);
    }
    return memory != nullptr && counter.n_bytes() == 0;
}

std::string why_incomplete(llama_context * ctx, int32_t seq) {
    std::string why;
    const auto parts = parts_of(ctx, why);
    if (parts.rows == nullptr) {
        return why;
    }
    const auto & memory = *llama_get_memory(ctx);
    const size_t whole = written(memory, seq, 0);
    const size_t state = parts.states ? written(memory, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) : 0;
    const size_t rows = held_cells(*parts.rows, seq).size()*row_bytes(*parts.rows, seq, parts.has_v, why);
    if (whole != rows + state) {
        return "llama.cpp keeps " + std::to_string(whole) + " bytes of a sequence, of which " + std::to_string(rows + state) +
               " are known here";
    }
    if (parts.window != nullptr) { // those that no token sees any more are not written
        const size_t row = row_bytes(*parts.window, seq, parts.has_v, why);
        if (row == 0 || state % row != 0 || state/row > held_cells(*parts.window, seq).size()) {
            return "llama.cpp keeps other bytes of a window than its rows";
        }
    }
    return "";
}

} // namespace kvt
