// Which cells a run works on, in the order of their places, and which queries go together (docs/exact.md, "Places").
//
// A cell's place is its position where the caller gives positions, else its index. The queries of a group see no two cells
// of one place, so a group has one list of cells, ascending by place, whose borders of tiles and chunks are those of each
// of its rows. One sequence is one group; a query that itself sees two cells of one place, or a cell without a position,
// goes by cell index. Thread 0 alone works here; time and memory grow with the cells, never with the positions.
#pragma once
#include <algorithm>
#include <cstdint>

#include "paged_attn/cpu/mask.h"
#include "paged_attn/order.h"

namespace paged_attn::cpu::PA_ISA {

// One group. Written by thread 0, read by all.
struct Live {
    int32_t *cells;   // [n_cells] ascending by place
    int32_t *tiles;   // [n_tiles + 1] where each tile's cells begin in `cells`
    int32_t *chunks;  // [n_chunks + 1] which tile each chunk begins with
    int32_t *queries; // [n_q]
    int n_cells, n_tiles, n_chunks, n_q;
    const int32_t *pos; // null: the place is the cell's index
    bool last;          // no group after this one

    int place(int32_t cell) const { return pos == nullptr ? cell : pos[cell]; }
    int cells_of(int tile) const { return tiles[tile + 1] - tiles[tile]; }
};

// What finding the groups needs beside them; each array is [max_cells].
struct LiveScratch {
    int32_t *order, *spare; // live cells, ascending by place
    int32_t *rank;          // of a cell in `order`
    uint8_t *in, *blocked;  // the cell is in the group; another of its place is
    int32_t *waiting;       // [max_q] queries without a group so far
    int32_t *by_index;      // [max_q] queries that go by cell index
};

// Borders of the tiles and chunks of live.cells.
inline void cut(Live &live) {
    int n_tiles = 0, n_chunks = 0, chunk = -1;
    for (int i = 0; i < live.n_cells; n_tiles++) {
        const int place = live.place(live.cells[i]), first = place / kTile * kTile;
        if (place / kChunk != chunk) live.chunks[n_chunks++] = n_tiles;
        chunk = place / kChunk;
        live.tiles[n_tiles] = i;
        const int full = i + kTile; // a tile without a hole is passed in one step: places ascend
        if (full <= live.n_cells && place == first && live.place(live.cells[full - 1]) - first == kTile - 1) {
            i = full;
        } else {
            while (i < live.n_cells && live.place(live.cells[i]) - first < kTile) i++;
        }
    }
    live.tiles[n_tiles] = live.n_cells;
    live.chunks[n_chunks] = n_tiles;
    live.n_tiles = n_tiles;
    live.n_chunks = n_chunks;
}

// Ascending by position, which is not negative: eleven bits at a time. Equal ones stay in the order they have.
inline void sort_by_position(int32_t *cells, int32_t *spare, int n, const int32_t *pos) {
    constexpr int kBits = 11;
    int32_t most = 0;
    for (int i = 0; i < n; i++) most = std::max(most, pos[cells[i]]);
    for (int shift = 0; shift < 31 && most >> shift != 0; shift += kBits) {
        int32_t next[(1 << kBits) + 1] = {};
        const auto digit = [&](int32_t cell) { return pos[cell] >> shift & ((1 << kBits) - 1); };
        for (int i = 0; i < n; i++) next[digit(cells[i]) + 1]++;
        for (int d = 0; d < 1 << kBits; d++) next[d + 1] += next[d];
        for (int i = 0; i < n; i++) spare[next[digit(cells[i])]++] = cells[i];
        std::copy_n(spare, n, cells);
    }
}

class Grouping {
  public:
    Grouping(const pa_args &args, const uint8_t *seen, const LiveScratch &scratch, Live &live)
        : mask_(args), a_(args), s_(scratch), live_(live) {
        live.pos = args.mask.cell_pos;
        live.n_cells = 0;
        for (int32_t c = 0; c < args.n_cells; c++) { // without a branch
            live.cells[live.n_cells] = c;
            live.n_cells += seen[c];
        }
        live.n_q = args.n_q;
        for (int q = 0; q < args.n_q; q++) live.queries[q] = q;
        live.last = live.pos == nullptr || ascending() || sorted();
        single_ = live.last;
        if (single_) return;
        std::copy_n(live.queries, args.n_q, s_.waiting);
        n_waiting_ = args.n_q;
    }

    // Makes `live` the next group; not to be called after the last.
    void next() {
        if (!single_) {
            live_.n_q = live_.n_cells = 0;
            if (n_waiting_ > 0) gather();
            if (live_.n_q == 0) rest();
        }
        cut(live_);
    }

  private:
    // Every live cell has a position, and they ascend as they lie.
    bool ascending() const {
        int32_t before = -1;
        bool good = true;
        for (int i = 0; i < live_.n_cells; i++) {
            const int32_t at = live_.pos[live_.cells[i]];
            good &= at > before;
            before = at;
        }
        return good;
    }

    // The same once they are sorted. Leaves the sorted order, of those with a position, and the cells' ranks.
    bool sorted() {
        n_order_ = 0;
        for (int i = 0; i < live_.n_cells; i++) {
            s_.rank[live_.cells[i]] = -1;
            if (live_.pos[live_.cells[i]] >= 0) s_.order[n_order_++] = live_.cells[i];
        }
        sort_by_position(s_.order, s_.spare, n_order_, live_.pos);
        bool distinct = n_order_ == live_.n_cells;
        for (int i = 0; i < n_order_; i++) {
            s_.rank[s_.order[i]] = i;
            distinct &= i == 0 || live_.pos[s_.order[i]] != live_.pos[s_.order[i - 1]];
        }
        if (distinct) std::copy_n(s_.order, n_order_, live_.cells);
        return distinct;
    }

    // f(c) for every other live cell of the place of `cell`.
    template <class F> void others(int32_t cell, F &&f) const {
        const int at = s_.rank[cell];
        const int32_t place = live_.pos[cell];
        for (int i = at - 1; i >= 0 && live_.pos[s_.order[i]] == place; i--) f(s_.order[i]);
        for (int i = at + 1; i < n_order_ && live_.pos[s_.order[i]] == place; i++) f(s_.order[i]);
    }

    // The group of the first waiting query: each that sees no cell whose place another cell of the group has joins it.
    void gather() {
        int left = 0;
        std::fill_n(s_.in, a_.n_cells, uint8_t{0});
        std::fill_n(s_.blocked, a_.n_cells, uint8_t{0});
        for (int i = 0; i < n_waiting_; i++) {
            const int q = s_.waiting[i];
            if (mask_.meets(q, s_.blocked)) s_.waiting[left++] = q;
            else if (join(q)) live_.queries[live_.n_q++] = q;
            else s_.by_index[n_by_index_++] = q;
        }
        n_waiting_ = left;
        if (!ascending()) sort_by_position(live_.cells, s_.spare, live_.n_cells, live_.pos);
        live_.last = n_waiting_ == 0 && n_by_index_ == 0;
    }

    // Takes what query q sees into the group. False, and nothing taken, when two of it have one place or one has none.
    bool join(int q) {
        const int before = live_.n_cells;
        const bool good = mask_.each_new(q, s_.in, [&](int32_t c) {
            if (s_.rank[c] < 0 || s_.blocked[c] != 0) return false;
            s_.in[c] = 1;
            others(c, [&](int32_t other) { s_.blocked[other] = 1; });
            live_.cells[live_.n_cells++] = c;
            return true;
        });
        while (!good && live_.n_cells > before) {
            const int32_t c = live_.cells[--live_.n_cells];
            s_.in[c] = 0;
            others(c, [&](int32_t other) { s_.blocked[other] = 0; });
        }
        return good;
    }

    // The queries that go by cell index, all in one group.
    void rest() {
        live_.pos = nullptr;
        live_.n_q = n_by_index_;
        std::fill_n(s_.in, a_.n_cells, uint8_t{0});
        std::copy_n(s_.by_index, n_by_index_, live_.queries);
        for (int i = 0; i < n_by_index_; i++)
            mask_.each_new(s_.by_index[i], s_.in, [&](int32_t c) { return s_.in[c] = 1, true; });
        for (int32_t c = 0; c < a_.n_cells; c++) {
            live_.cells[live_.n_cells] = c;
            live_.n_cells += s_.in[c];
        }
        live_.last = true;
    }

    const Mask mask_;
    const pa_args &a_;
    const LiveScratch s_;
    Live &live_;
    bool single_;
    int n_order_ = 0, n_waiting_ = 0, n_by_index_ = 0;
};

} // namespace paged_attn::cpu::PA_ISA
