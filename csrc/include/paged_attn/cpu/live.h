// Which cells a run works on, in the order of their places, and which queries go together (docs/attention/exact.md, "Places").
//
// A cell's place is its position where the caller gives positions, else its index. The queries of a group see no two cells
// of one place, so a group has one list of cells, ascending by place, whose borders of tiles and chunks are those of each
// of its rows. One sequence is one group; a query that itself sees two cells of one place, or a cell without a position,
// goes by cell index. Thread 0 alone works here; time and memory grow with the cells, never with the positions.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

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

// What finding the groups needs beside them.
struct LiveScratch {
    int32_t *fresh, *spare; // [max_cells]
    uint64_t *in;           // [max_cells / 64 + 1] bits: the cell is in the group
    int32_t *waiting;       // [max_q] queries without a group so far
    int32_t *by_index;      // [max_q] queries that go by cell index
    int32_t *first, *end;   // [max_q] a query sees nothing before and from there on
};

// Appends the cells first + i of the bits i that are set; the new count.
inline int append(uint64_t bits, int32_t first, int32_t *cells, int n) {
    if (~bits == 0) { // mostly
        for (int i = 0; i < 64; i++) cells[n + i] = first + i;
        return n + 64;
    }
    for (; bits != 0; bits &= bits - 1) cells[n++] = first + __builtin_ctzll(bits);
    return n;
}

// The cells whose flag, 0 or 1, is set, ascending; how many.
inline int flagged(const uint8_t *flags, int n_cells, int32_t *cells) {
    int n = 0;
    for (int32_t c = 0; c < n_cells;) {
        uint64_t eight;
        std::memcpy(&eight, flags + c, sizeof eight); // there is room after the last
        if (eight == 0x0101010101010101u && c + 8 <= n_cells) {
            for (int i = 0; i < 8; i++) cells[n + i] = c + i;
            n += 8;
            c += 8;
            continue;
        }
        for (const int32_t end = std::min(c + 8, n_cells); c < end; c++) { // without a branch
            cells[n] = c;
            n += flags[c];
        }
    }
    return n;
}

// Cells that ascend as they lie have positions that ascend, too, none of them negative.
inline bool ascending(const int32_t *cells, int n, const int32_t *pos) {
    int32_t before = -1;
    for (int i = 0, end; i < n; i = end) {
        end = std::min(i + 64, n);
        unsigned bad = pos[cells[i]] <= before;
        if (cells[end - 1] - cells[i] == end - 1 - i) { // side by side
            const int32_t *at = pos + cells[i];
            for (int j = 1; j < end - i; j++) bad |= static_cast<unsigned>(at[j] <= at[j - 1]);
        } else {
            for (int j = i + 1; j < end; j++) bad |= static_cast<unsigned>(pos[cells[j]] <= pos[cells[j - 1]]);
        }
        if (bad != 0) return false;
        before = pos[cells[end - 1]];
    }
    return true;
}

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
        live.n_cells = flagged(seen, args.n_cells, live.cells);
        live.n_q = args.n_q;
        for (int q = 0; q < args.n_q; q++) live.queries[q] = q;
        live.last = live.pos == nullptr || ascending(live.cells, live.n_cells, live.pos) || sorted(live.cells, live.n_cells, true);
        single_ = live.last;
        if (single_) return;
        std::copy_n(live.queries, args.n_q, s_.waiting);
        n_waiting_ = args.n_q;
        for (int q = 0; q < args.n_q; q++) find_range(q);
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
    enum class Joining { done, waits, goes_by_index };

    // Sorts cells by position. False, and they may be in any order, when one has no position or two have the same.
    bool sorted(int32_t *cells, int n, bool doubtful) const {
        int32_t least = INT32_MAX, most = -1;
        for (int i = 0; i < n; i++) {
            least = std::min(least, live_.pos[cells[i]]);
            most = std::max(most, live_.pos[cells[i]]);
        }
        if (least < 0 || (doubtful && int64_t{most} - least + 1 < n)) return false; // of several sequences, mostly
        sort_by_position(cells, s_.spare, n, live_.pos);
        for (int i = 1; i < n; i++)
            if (live_.pos[cells[i]] == live_.pos[cells[i - 1]]) return false;
        return true;
    }

    // The first and the last cell that query q sees.
    void find_range(int q) {
        int first = 0, end = a_.n_cells;
        uint64_t bits = 0;
        for (; first < end && (bits = mask_.seen_of_64(q, first)) == 0;) first += 64;
        if (bits != 0) {
            first += __builtin_ctzll(bits);
            int block = (end - 1) / 64 * 64;
            while ((bits = mask_.seen_of_64(q, block)) == 0) block -= 64;
            end = block + 64 - __builtin_clzll(bits);
        }
        s_.first[q] = std::min(first, end);
        s_.end[q] = end;
    }

    // A cell of the group, not `cell`, has its place.
    bool taken(int32_t cell) const {
        const int32_t *cells = live_.cells, place = live_.pos[cell];
        int from = 0, to = live_.n_cells;
        while (from < to) {
            const int middle = (from + to) / 2;
            if (live_.pos[cells[middle]] < place) from = middle + 1;
            else to = middle;
        }
        return from < live_.n_cells && live_.pos[cells[from]] == place && cells[from] != cell;
    }

    // The group of the first waiting query: each that sees no cell whose place another cell of the group has joins it.
    void gather() {
        int left = 0;
        std::fill_n(s_.in, a_.n_cells / 64 + 1, uint64_t{0});
        for (int i = 0; i < n_waiting_; i++) {
            const int q = s_.waiting[i];
            const Joining how = join(q);
            if (how == Joining::done) live_.queries[live_.n_q++] = q;
            if (how == Joining::waits) s_.waiting[left++] = q;
            if (how == Joining::goes_by_index) s_.by_index[n_by_index_++] = q;
        }
        n_waiting_ = left;
        live_.last = n_waiting_ == 0 && n_by_index_ == 0;
    }

    // Takes what query q sees into the group, or nothing. The first query of a group never waits.
    Joining join(int q) {
        int n = 0;
        if (s_.first[q] < s_.end[q] && taken(s_.first[q])) return Joining::waits; // another sequence, mostly
        for (int c = s_.first[q] / 64 * 64; c < s_.end[q]; c += 64) {
            const int before = n;
            n = append(mask_.seen_of_64(q, c) & ~s_.in[c / 64], c, s_.fresh, n);
            if (before == 0 && n > 0 && taken(s_.fresh[0])) return Joining::waits; // after a common beginning
        }
        if (!ascending(s_.fresh, n, live_.pos) && !sorted(s_.fresh, n, false)) return Joining::goes_by_index;
        if (!merged(n)) return Joining::waits;
        for (int i = 0; i < n; i++) s_.in[s_.fresh[i] / 64] |= uint64_t{1} << s_.fresh[i] % 64;
        return Joining::done;
    }

    // The n fresh cells and those of the group, both ascending by place, become one list. False, and nothing happened, when
    // two have one place.
    bool merged(int n) {
        const int32_t *pos = live_.pos;
        if (n == 0) return true;
        if (live_.n_cells > 0 && pos[s_.fresh[0]] <= pos[live_.cells[live_.n_cells - 1]]) {
            int i = 0, j = 0;
            for (int to = 0; i < live_.n_cells || j < n; to++) {
                if (i < live_.n_cells && j < n && pos[live_.cells[i]] == pos[s_.fresh[j]]) return false;
                const bool old = j == n || (i < live_.n_cells && pos[live_.cells[i]] < pos[s_.fresh[j]]);
                s_.spare[to] = old ? live_.cells[i++] : s_.fresh[j++];
            }
            std::copy_n(s_.spare, i + j, live_.cells);
        } else {
            std::copy_n(s_.fresh, n, live_.cells + live_.n_cells);
        }
        live_.n_cells += n;
        return true;
    }

    // The queries that go by cell index, all in one group.
    void rest() {
        live_.pos = nullptr;
        live_.n_q = n_by_index_;
        std::copy_n(s_.by_index, n_by_index_, live_.queries);
        for (int c = 0; c < a_.n_cells; c += 64) {
            uint64_t bits = 0;
            for (int i = 0; i < n_by_index_; i++) bits |= mask_.seen_of_64(s_.by_index[i], c);
            live_.n_cells = append(bits, c, live_.cells, live_.n_cells);
        }
        live_.last = true;
    }

    const Mask mask_;
    const pa_args &a_;
    const LiveScratch s_;
    Live &live_;
    bool single_;
    int n_waiting_ = 0, n_by_index_ = 0;
};

} // namespace paged_attn::cpu::PA_ISA
