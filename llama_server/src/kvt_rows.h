// What is needed of an engine: rows of a slot out of its cache, and into it. Both are used in the engine's main loop only.
//
// The rows of a block are handed over as its segments are: by layer, K before V, each segment with all its rows, and no
// gaps between segments.
#pragma once

#include "kvt_file.h"
#include "kvt_messages.h"
#include "kvt_states.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace kvt {

using steady_clock = std::chrono::steady_clock;

// Bytes of a block of so many rows, as it is handed over.
size_t block_bytes(const hello & said, uint32_t rows);

inline uint32_t common_prefix(const std::vector<int32_t> & a, const std::vector<int32_t> & b) {
    const auto most = (std::ptrdiff_t) std::min(a.size(), b.size());
    return (uint32_t) (std::mismatch(a.begin(), a.begin() + most, b.begin()).first - a.begin());
}

// Memory for blocks that is better than any other, as long as there is some left. Used by all threads; it begins on a page.
class block_memory {
public:
    virtual ~block_memory() = default;
    virtual char * take(size_t bytes) noexcept = 0; // nullptr: there is none
    virtual void give(char * at) noexcept = 0;      // it is not used any more
};

// Memory for a block; it begins on a page, as direct reads want it. Not filled with zeros, as a vector's would be: that
// takes as long as copying the rows.
class buffer {
public:
    buffer() = default;
    explicit buffer(size_t bytes, std::shared_ptr<block_memory> from = nullptr) : bytes_(bytes) {
        char * at = from != nullptr ? from->take(bytes) : nullptr;
        if (at == nullptr) {
            from.reset();
            at = static_cast<char *>(::operator new(bytes, on_page));
        }
        at_ = { at, release { std::move(from) } };
    }

    char * data() { return at_.get(); }
    const char * data() const { return at_.get(); }
    size_t size() const { return bytes_; }
    bool empty() const { return bytes_ == 0; }

private:
    static constexpr std::align_val_t on_page { page_bytes };
    struct release {
        std::shared_ptr<block_memory> to;
        void operator()(char * at) const { to != nullptr ? to->give(at) : ::operator delete(at, on_page); }
    };
    std::unique_ptr<char, release> at_;
    size_t bytes_ = 0;
};

class row_source {
public:
    virtual ~row_source() = default;

    // One segment of the rows [first, first + rows); the one after the block's is their window. False if the slot does not
    // hold the rows of these tokens.
    virtual bool read(int slot, const std::vector<int32_t> & tokens, uint32_t first, uint32_t rows, size_t segment, char * out) = 0;
};

class row_sink {
public:
    virtual ~row_sink() = default;

    // Waits until no device computes what it was given before: rows may be written then. Called before all else, because waiting
    // is not copying, whose time is taken.
    virtual void settle() {}

    // Rows [first, first + rows) of the prompt. `block` holds `block_rows` rows, of which they begin with row `skip`.
    // Called in the order of positions, each beginning where the last one ended. False if there are no cells for them.
    virtual bool write(uint32_t first, uint32_t rows, const char * block, uint32_t block_rows, uint32_t skip) = 0;

    // Where the rows of these positions may be read into: for each segment memory that holds them one after the other. Their
    // cells are taken. Empty if there is none, or not in one piece; then they come by write().
    virtual std::vector<char *> places(uint32_t /* first */, uint32_t /* rows */) { return {}; }

    // What was asked for by places() is there. Called in the order of positions.
    virtual void put(uint32_t /* first */, uint32_t /* rows */) {}

    // It is not, from this position on: what was read there is no row, and nobody may see its bytes; the cells are free again.
    virtual void spoiled(uint32_t /* first */) noexcept {}

    // Of a model with states, when all rows before `n_tokens` are written: with the state, or the windows if it is empty, the
    // slot goes on after them. Rows without it count for nothing. False if it is of no use: then the slot is empty.
    virtual bool resume(uint32_t /* n_tokens */, const std::vector<char> & /* state */, const std::vector<window> & /* windows */) {
        return false;
    }
};

} // namespace kvt
