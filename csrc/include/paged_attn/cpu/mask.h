// Which cells a query sees, asked for many cells at once.
#pragma once
#include <cstdint>

#include "paged_attn/attn_state.h"
#include "paged_attn/cpu/rows.h"

namespace paged_attn::cpu::PA_ISA {

// What a group of queries sees of a tile of cells.
struct View {
    enum Kind : uint8_t { none, some, all }; // some: needs the bias of each cell
    Kind kind;
    uint8_t first, last; // cells [first, last) of the tile's; the rest are hidden from all of the group
};

class Mask {
  public:
    explicit Mask(const pa_args &args) : a_(args), m_(args.mask) {}

    // Or-s "seen by a query" of cells [first, last) into seen[0 .. last-first).
    void seen_by_any(int first, int last, uint8_t *seen) const {
        const int n = last - first;
        if (m_.dense != nullptr) {
            for (int q = 0; q < a_.n_q; q++) {
                const uint16_t *row = dense_row(q) + first;
                for (int c = 0; c < n; c++) seen[c] = static_cast<uint8_t>(seen[c] | (row[c] < kHiddenHalf));
            }
        } else {
            for (int q = 0; q < a_.n_q; q++)
                for (int c = 0; c < n; c++) seen[c] = static_cast<uint8_t>(seen[c] | sees(q, first + c));
        }
    }

    // Which of the cells first .. first + 63 query q sees: bit i is cell first + i.
    uint64_t seen_of_64(int q, int first) const {
        const int n = a_.n_cells - first < 64 ? a_.n_cells - first : 64;
        if (m_.dense != nullptr && n == 64) return bits_below(dense_row(q) + first, kHiddenHalf);
        uint64_t bits = 0;
        for (int i = 0; i < n; i++) bits |= uint64_t{sees(q, first + i)} << i;
        return bits;
    }

    // What the queries [0, n_q) of a list see of the n <= 255 cells of another.
    View view(const int32_t *queries, int n_q, const int32_t *cells, int n) const {
        int first = n, last = 0;
        bool plain = true;
        for (int i = 0; i < n_q; i++) {
            const int q = queries[i];
            if (sees_all_plainly(q, cells, n)) {
                first = 0;
                last = n;
                continue;
            }
            plain = false;
            int lo = 0, hi = n;
            while (lo < first && !sees(q, cells[lo])) lo++;
            while (hi > last && hi > lo && !sees(q, cells[hi - 1])) hi--;
            if (lo < first && lo < hi) first = lo;
            if (hi > last && lo < hi) last = hi;
        }
        if (last <= first) return {View::none, 0, 0};
        return {plain ? View::all : View::some, static_cast<uint8_t>(first), static_cast<uint8_t>(last)};
    }

    // What the mask adds to query q's logit of a cell, in base 2; kHidden where it does not see it.
    float bias2(int q, int32_t cell) const {
        if (m_.dense != nullptr) {
            const uint16_t half = dense_row(q)[cell];
            return half < kHiddenHalf ? product(f16_to_f32(half), kLog2e) : kHidden;
        }
        return sees(q, cell) ? 0.0f : kHidden;
    }

  private:
    static constexpr uint16_t kHiddenHalf = 0xFBFF; // -65504 as f16; from here on -inf and NaNs with a sign

    const uint16_t *dense_row(int q) const {
        return reinterpret_cast<const uint16_t *>(reinterpret_cast<const char *>(m_.dense) + q * m_.dense_stride);
    }

    bool sees(int q, int32_t cell) const {
        if (m_.dense != nullptr) return dense_row(q)[cell] < kHiddenHalf;
        if (m_.cell_pos == nullptr) return true;
        const int32_t pos = m_.cell_pos[cell], at = m_.query_pos[q];
        const bool same = m_.cell_seq == nullptr || m_.cell_seq[cell] == m_.query_seq[q];
        return pos >= 0 && pos <= at && same && (m_.window == 0 || at - pos < m_.window);
    }

    // Query q sees all n cells and the mask adds nothing to them.
    bool sees_all_plainly(int q, const int32_t *cells, int n) const {
        if (m_.dense != nullptr) {
            unsigned any = 0; // the bits of 0.0 are 0
            unsigned apart = 0; // in the order of places, first and last say nothing of those between
            for (int i = 0; i < n; i++) apart |= static_cast<unsigned>(cells[i] - cells[0] - i);
            if (apart == 0) {
                const uint16_t *row = dense_row(q) + cells[0];
                for (int i = 0; i < n; i++) any |= row[i];
            } else {
                const uint16_t *row = dense_row(q);
                for (int i = 0; i < n; i++) any |= row[cells[i]];
            }
            return any == 0;
        }
        if (m_.cell_pos == nullptr) return true;
        bool all = true;
        for (int i = 0; i < n; i++) all = all && sees(q, cells[i]);
        return all;
    }

    const pa_args &a_;
    const pa_mask &m_;
};

} // namespace paged_attn::cpu::PA_ISA
