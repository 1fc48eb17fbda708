// An engine that is made up: slots that hold rows of which each is known by its token, position and plane.
#pragma once

#include "../src/kvt_client.h"
#include "../src/kvt_loaded.h"
#include "../src/kvt_rows.h"
#include "../src/kvt_states.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace made_up {

using clock_type = std::chrono::steady_clock;

const kvt::milliseconds patience { 20000 };
inline size_t bytes_by(const char * variable, size_t usual) {
    const char * value = std::getenv(variable);
    return value != nullptr ? (size_t) std::stoul(value) : usual;
}

inline const size_t row_bytes = bytes_by("KVT_ROW_BYTES", 8u << 10); // of each of the four planes: a block has 2 MiB, a batch 8 blocks
inline const size_t window_row_bytes = bytes_by("KVT_WINDOW_BYTES", 0); // 0: it has no windows
constexpr size_t planes = 4;

inline kvt::hello make_hello(bool states) {
    kvt::hello said;
    said.fields = { { "model", "sha256-slots" }, { "engine", "slots/1+0" }, { "flash_attention", "on" } };
    for (uint16_t i = 0; i < 2; ++i) {
        kvt::layer one;
        one.index = i;
        one.kv_heads = 1;
        one.k_head_dim = one.v_head_dim = (uint32_t) row_bytes/2;
        one.k_row_bytes = one.v_row_bytes = (uint32_t) row_bytes;
        said.layers.push_back(one);
    }
    said.min_tokens = 1;
    said.states = states || window_row_bytes > 0;
    said.files.push_back(kvt::look_at("/proc/self/exe")); // any file
    said.window_row_bytes = (uint32_t) window_row_bytes;
    said.window_least = said.window_most = window_row_bytes > 0 ? 128 : 0;
    return said;
}

inline std::vector<int32_t> tokens_of(int32_t first, size_t count) {
    std::vector<int32_t> tokens(count);
    for (size_t i = 0; i < count; ++i) {
        tokens[i] = first + (int32_t) i;
    }
    return tokens;
}

// A row is known by its token, its position and its plane.
inline char mark_of(int32_t token, uint32_t position, size_t plane) { return (char) ((uint32_t) token*31 + position*7 + (uint32_t) plane*3); }

struct slot {
    std::vector<int32_t> tokens; // whose rows it holds
    bool broken = false;         // a row came back that is not the token's
    uint32_t turned = UINT32_MAX; // from there on, rows are not what the tokens give
};

struct engine : kvt::row_source {
    std::map<int, slot> slots;
    int slow_ms = 0;
    int computes_ms = 0;
    size_t cells = 1u << 20;
    int direct = -1; // every so many blocks there is no place for one
    int asked = 0;
    int placed = 0; // blocks that were read into their places
    int reads_left = 1 << 30;

    bool read(int number, const std::vector<int32_t> & tokens, uint32_t first, uint32_t rows, size_t plane, char * out) override {
        std::this_thread::sleep_for(kvt::milliseconds(slow_ms));
        if (--reads_left < 0) {
            throw std::bad_alloc();
        }
        const auto & held = slots[number].tokens;
        const uint32_t turned = slots[number].turned;
        const size_t end = first + rows;
        if (end > held.size() || end > tokens.size() || !std::equal(held.begin(), held.begin() + (std::ptrdiff_t) end, tokens.begin())) {
            return false;
        }
        for (uint32_t i = first; i < end; ++i) {
            const size_t bytes = plane < planes ? row_bytes : window_row_bytes;
            std::fill_n(out, bytes, (char) (mark_of(held[i], i, plane) + (i >= turned ? 1 : 0)));
            out += bytes;
        }
        return true;
    }
};

// A state is known by the token before it.
inline kvt::state make_state(const std::vector<int32_t> & tokens, size_t bytes) {
    const auto n_tokens = (uint32_t) tokens.size();
    kvt::state made = kvt::make_state({ n_tokens, 0, (int32_t) n_tokens - 1 }, bytes);
    std::fill(made.bytes.begin() + kvt::state_head_bytes, made.bytes.end(), mark_of(tokens.back(), n_tokens, 0));
    return made;
}

struct cells : kvt::row_sink {
    cells(engine & of, slot & to, const std::vector<int32_t> & tokens) : own(of), into(to), prompt(tokens) {}

    void settle() override {
        std::this_thread::sleep_for(kvt::milliseconds(settled ? 0 : own.computes_ms));
        settled = true;
    }

    bool write(uint32_t first, uint32_t rows, const char * block, uint32_t block_rows, uint32_t skip) override {
        settle();
        std::this_thread::sleep_for(kvt::milliseconds(own.slow_ms));
        if (!cut) { // its other rows go with the first that come
            into.tokens.resize(first);
            cut = true;
        }
        if (first != into.tokens.size() || first + rows > own.cells) {
            return false;
        }
        for (size_t plane = 0; plane < planes; ++plane) {
            for (uint32_t i = 0; i < rows; ++i) {
                const char * row = block + (plane*block_rows + skip + i)*(row_bytes);
                const char mark = mark_of(prompt[first + i], first + i, plane);
                into.broken = into.broken || !std::all_of(row, row + row_bytes, [mark](char byte) { return byte == mark; });
            }
        }
        into.tokens.insert(into.tokens.end(), prompt.begin() + first, prompt.begin() + first + rows);
        return true;
    }

    std::vector<char *> places(uint32_t first, uint32_t rows) override {
        settle();
        if ((own.direct > 0 && ++own.asked % own.direct == 0) || first + rows > own.cells) {
            return {};
        }
        auto & block = taken[first];
        block.resize(rows*row_bytes*planes);
        std::vector<char *> found;
        for (size_t plane = 0; plane < planes; ++plane) {
            found.push_back(block.data() + plane*rows*row_bytes);
        }
        return found;
    }

    void put(uint32_t first, uint32_t rows) override {
        const auto found = taken.find(first);
        into.broken = into.broken || found == taken.end() || !write(first, rows, found->second.data(), rows, 0);
        taken.erase(first);
        ++own.placed;
    }

    void spoiled(uint32_t first) noexcept override { taken.erase(taken.lower_bound(first), taken.end()); }

    bool resume(uint32_t n_tokens, const std::vector<char> & state, const std::vector<kvt::window> & windows) override {
        settle();
        const std::vector<int32_t> before(prompt.begin(), prompt.begin() + n_tokens);
        into.broken = into.broken || into.tokens != before; // without its rows a state is that of another prompt
        if (!state.empty()) {
            into.broken = into.broken || state != make_state(before, state.size() - kvt::state_head_bytes).bytes;
            return !into.broken;
        }
        for (const auto & one : windows) {
            const char * row = one.bytes.data();
            for (uint32_t i = one.first; i < one.first + one.rows; ++i, row += window_row_bytes) { // as many as it says
                const char mark = mark_of(i < prompt.size() ? prompt[i] : 0, i, planes);
                into.broken = into.broken || (i < n_tokens && !std::all_of(row, row + window_row_bytes, [mark](char byte) { return byte == mark; }));
            }
        }
        return !into.broken;
    }

    engine & own;
    slot & into;
    const std::vector<int32_t> & prompt;
    bool cut = false;
    bool settled = false;
    std::map<uint32_t, std::vector<char>> taken;
};

inline long long since(clock_type::time_point began) {
    return std::chrono::duration_cast<kvt::milliseconds>(clock_type::now() - began).count();
}

// Memory that only its owner may release.
class pinned : public kvt::block_memory {
public:
    explicit pinned(size_t most) : most_(most) {}
    pinned(const pinned &) = delete;
    pinned & operator=(const pinned &) = delete;
    ~pinned() override {
        for (char * at : lent_) {
            std::free(at);
        }
    }

    char * take(size_t bytes) noexcept override {
        const std::lock_guard<std::mutex> lock(mutex_);
        char * at = lent_.size() < most_ ? static_cast<char *>(std::aligned_alloc(kvt::page_bytes, kvt::page_aligned(bytes))) : nullptr;
        if (at != nullptr) {
            ++taken_;
            lent_.insert(at);
        }
        return at;
    }

    void give(char * at) noexcept override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (lent_.erase(at) != 1) {
            std::abort();
        }
        std::free(at);
    }

    std::string said() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return std::to_string(taken_) + " taken, " + std::to_string(lent_.size()) + " out";
    }

private:
    const size_t most_;
    mutable std::mutex mutex_;
    std::set<char *> lent_;
    size_t taken_ = 0;
};

} // namespace made_up
