// The rows of llama-server's slots, as kvt_rows.h wants them. Included by server-context.cpp alone, below server_slot.
#pragma once

#include "kvt_cache.h"
#include "kvt_checkpoints.h"
#include "kvt_rows.h"
#include "kvt_tokens.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <string>
#include <vector>

namespace kvt {

// As llama.cpp does it; its own function for this is another one each month. A slot with a draft is not tiered.
inline void clear_slot(server_slot & slot) {
    llama_memory_seq_rm(llama_get_memory(slot.ctx_tgt), slot.id, -1, -1);
    slot.prompt.tokens.clear();
    slot.prompt.checkpoints.clear();
}

// Rows out of slots. For one step: it remembers which cells they are in.
class slot_rows : public row_source {
public:
    void add(const server_slot & slot) { slots_[slot.id].slot = &slot; }

    bool read(int slot, const std::vector<int32_t> & tokens, uint32_t first, uint32_t rows, size_t segment, char * out) override {
        const auto found = slots_.find(slot);
        if (found == slots_.end() || !prepare(found->second, tokens)) {
            return false;
        }
        const seen & one = found->second;
        if ((size_t) first + rows > one.equal || segment > one.planes.size()) {
            return false;
        }
        if (segment == one.planes.size()) {
            return read_window(*one.slot, first, rows, tokens, out);
        }
        read_rows(one.planes[segment], one.cells.data() + first, rows, out);
        return true;
    }

private:
    struct seen {
        const server_slot * slot = nullptr;
        bool looked = false;
        std::vector<int32_t> tokens;
        std::vector<uint32_t> cells;
        std::vector<plane> planes;
        const std::vector<int32_t> * compared = nullptr; // with these, which nobody changes meanwhile
        uint32_t equal = 0;
    };

    static bool read_window(const server_slot & slot, uint32_t first, uint32_t rows, const std::vector<int32_t> & tokens, char * out) {
        std::string why;
        const auto parts = parts_of(slot.ctx_tgt, why);
        const auto * cache = parts.window;
        const auto cells = cache != nullptr ? cells_of(*cache, slot.id, first, rows, tokens) : std::vector<uint32_t>();
        if (cells.empty()) {
            return false; // they are gone, as rows of a window are
        }
        for (const auto & plane : planes_of(*cache, slot.id, parts.has_v, why)) {
            read_rows(plane, cells.data(), rows, out);
            out += rows*plane.row_bytes;
        }
        return true;
    }

    static bool prepare(seen & one, const std::vector<int32_t> & tokens) {
        if (!one.looked) {
            std::string why;
            one.looked = true;
            settle(one.slot->ctx_tgt);
            one.tokens = tokens_of(one.slot->prompt.tokens);
            const auto parts = parts_of(one.slot->ctx_tgt, why);
            one.cells  = cells_of(*parts.rows, one.slot->id, 0, (uint32_t) one.tokens.size(), one.tokens);
            one.planes = planes_of(*parts.rows, one.slot->id, parts.has_v, why);
        }
        if (one.compared != &tokens) {
            one.compared = &tokens;
            one.equal = std::min(common_prefix(one.tokens, tokens), (uint32_t) one.cells.size());
        }
        return !one.planes.empty();
    }

    std::map<int, seen> slots_;
};

// Whether rows of the slot can be read into where they belong. Not those of images with M-RoPE: part of one cannot be dropped.
inline bool has_places(const server_slot & slot, const std::vector<int32_t> & tokens) {
    std::string why;
    if (has_images(tokens, tokens.size()) && has_axes(slot.ctx_tgt)) {
        return false;
    }
    const auto parts = parts_of(slot.ctx_tgt, why);
    const auto planes = planes_of(*parts.rows, slot.id, parts.has_v, why);
    return !planes.empty() && std::all_of(planes.begin(), planes.end(), [](const plane & one) { return host_row(one, 0) != nullptr; });
}

// Whether the slot has a row for each of its tokens, each once.
inline bool has_all_rows(const server_slot & slot) {
    std::string why;
    const auto tokens = tokens_of(slot.prompt.tokens);
    return tokens.empty() || !cells_of(*parts_of(slot.ctx_tgt, why).rows, slot.id, 0, (uint32_t) tokens.size(), tokens).empty();
}

// Rows into a slot, behind those that it keeps. Its other rows go with the first that come. For one step: between two of
// them a device may compute other slots' rows. With states, the slot says only then that it holds the rows when the state is
// there, too: until then the server finds all that it looks at as it was, and removes the rows by itself.
class slot_cells : public row_sink {
public:
    // `brought`: rows that have come in earlier steps.
    slot_cells(server_slot & slot, const std::vector<int32_t> & prompt, uint32_t brought = 0) : slot_(slot), prompt_(prompt), goes_on_(brought > 0) {
        std::string why;
        parts_ = parts_of(slot.ctx_tgt, why);
    }

    uint32_t rows() const { return rows_; } // so many have come

    void settle() override {
        if (!settled_) { // in this step nothing is computed
            kvt::settle(slot_.ctx_tgt);
            settled_ = true;
        }
    }

    bool write(uint32_t first, uint32_t rows, const char * block, uint32_t block_rows, uint32_t skip) override {
        if (planes_.empty() && !prepare(first)) {
            return false;
        }
        const auto cells = take_cells(slot_.ctx_tgt, *parts_.rows, slot_.id, first, rows, prompt_);
        if (cells.empty()) {
            return false;
        }
        row_writer copies(slot_.ctx_tgt);
        for (const auto & plane : planes_) {
            copies.write(plane, cells.data(), rows, block + skip*plane.row_bytes);
            block += block_rows*plane.row_bytes;
        }
        rows_ += rows;
        return parts_.states || hold(first + rows);
    }

    std::vector<char *> places(uint32_t first, uint32_t rows) override {
        if (planes_.empty() && !prepare(first)) {
            return {};
        }
        const auto cells = take_cells(slot_.ctx_tgt, *parts_.rows, slot_.id, first, rows, prompt_);
        if (cells.empty() || cells.back() - cells.front() + 1 != rows || !std::is_sorted(cells.begin(), cells.end())) {
            drop(first); // nothing was read into these; those before them may not be put yet
            return {};
        }
        placed_.push_back({ first, rows, cells.front() });
        std::vector<char *> found;
        for (const auto & plane : planes_) {
            found.push_back(host_row(plane, cells.front()));
        }
        return found;
    }

    void put(uint32_t first, uint32_t rows) override {
        placed_.pop_front();
        rows_ += rows;
        if (!parts_.states) {
            hold(first + rows);
        }
    }

    // Attention reads free cells, too, and multiplies what is in them by 0: by a NaN, if that is what a disk made of a row.
    void spoiled(uint32_t first) noexcept override {
        for (const auto & one : placed_) {
            for (const auto & plane : planes_) {
                std::memset(host_row(plane, one.cell), 0, one.first >= first ? one.rows*plane.row_bytes : 0);
            }
        }
        placed_.clear(); // they were asked for in order, and those before `first` are put
        try {
            drop(first);
        } catch (const std::exception &) { // whoever goes on clears the slot
        }
    }

    // Rows behind the state go, or the server would go on after them. Checkpoints behind the first tokens that the slot held
    // are those of another prompt.
    bool resume(uint32_t n_tokens, const std::vector<char> & state, const std::vector<window> & windows) override {
        settle();
        const uint32_t held = std::min(common_prefix(tokens_of(slot_.prompt.tokens), prompt_), n_tokens);
        drop(n_tokens);
        slot_.prompt.tokens.keep_first(held);
        auto & all = slot_.prompt.checkpoints;
        if (state.empty() ? put_windows(slot_.ctx_tgt, slot_.id, all, held, n_tokens, windows, prompt_)
                          : put_state(slot_.ctx_tgt, slot_.id, all, held, n_tokens, state, prompt_)) {
            return hold(n_tokens);
        }
        clear_slot(slot_);
        return false;
    }

private:
    bool prepare(uint32_t first) {
        std::string why;
        const uint32_t whole = resumable(prompt_, first);
        if ((!parts_.states && whole > slot_.prompt.tokens.size()) || (!goes_on_ && whole < first)) {
            return false; // somebody else has taken rows away
        }
        settle();
        planes_ = planes_of(*parts_.rows, slot_.id, parts_.has_v, why);
        if (!goes_on_) { // later there is nothing behind what has come, and of an image with M-RoPE all rows would go
            drop(first);
        }
        slot_.prompt.tokens.keep_first(std::min<size_t>(whole, slot_.prompt.tokens.size()));
        return !planes_.empty();
    }

    void drop(uint32_t from) { drop_rows(*parts_.rows, slot_.id, position_at(prompt_, from)); }

    bool hold(uint32_t count) { // the first tokens of the prompt
        add_tokens(slot_.prompt.tokens, slot_.task->tokens, prompt_, count);
        return true;
    }

    server_slot & slot_;
    const std::vector<int32_t> & prompt_;
    const bool goes_on_;
    memory_parts parts_;
    std::vector<plane> planes_;
    bool settled_ = false;
    struct placed {
        uint32_t first = 0;
        uint32_t rows = 0;
        uint32_t cell = 0;
    };
    std::deque<placed> placed_; // whose bytes are not checked yet
    uint32_t rows_ = 0;
};

} // namespace kvt
