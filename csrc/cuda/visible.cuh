// Which cells a query sees, and which runs of cells no query of a block sees, so that they are not read at all.
#pragma once
#include "rows.cuh"

namespace paged_attn::gpu {

constexpr float kHidden = -INFINITY;
constexpr float kLog2E = 1.4426950408889634f;

// What is asked of a cell before its score counts; the queries' side is the same for every cell.
struct QueryPlace {
    int pos, seq;
};

PA_DEVICE QueryPlace query_place(const Mask &mask, int query) {
    QueryPlace at = {0, 0};
    if (mask.cell_pos) at.pos = load_global(mask.query_pos + query);
    if (mask.cell_pos && mask.cell_seq) at.seq = load_global(mask.query_seq + query);
    return at;
}

// A score (already in base 2) after soft-cap and mask.
PA_DEVICE float masked_score(const Problem &p, float score, int query, QueryPlace at, int cell) {
    const Mask &mask = p.mask;
    if (p.cap_log2 != 0.0f) score = p.cap_log2 * tanhf(score);
    if (mask.dense) {
        const char *row = reinterpret_cast<const char *>(mask.dense) + query * mask.dense_stride;
        const float bias = f16_to_f32(load_global(reinterpret_cast<const unsigned short *>(row) + cell));
        return bias <= -65504.0f ? kHidden : score + bias * kLog2E;
    }
    if (mask.cell_pos) {
        const int pos = load_global(mask.cell_pos + cell);
        bool seen = pos >= 0 && pos <= at.pos && (mask.window == 0 || at.pos - pos < mask.window);
        if (mask.cell_seq) seen = seen && load_global(mask.cell_seq + cell) == at.seq;
        return seen ? score : kHidden;
    }
    return score;
}

// False: the cell is empty. Its V may be anything, and 0 x NaN is NaN, so it is not to enter a product.
PA_DEVICE bool holds_values(const Mask &mask, int cell) {
    return !mask.cell_pos || load_global(mask.cell_pos + cell) >= 0;
}

// The range of a block's queries.
struct QueryBounds {
    int low_pos, high_pos, low_seq, high_seq;
};

PA_DEVICE QueryBounds query_bounds(const Mask &mask, int first, int last) {
    QueryPlace at = query_place(mask, first);
    QueryBounds b = {at.pos, at.pos, at.seq, at.seq};
    for (int query = first + 1; query <= last; query++) {
        at = query_place(mask, query);
        b.low_pos = at.pos < b.low_pos ? at.pos : b.low_pos;
        b.high_pos = at.pos > b.high_pos ? at.pos : b.high_pos;
        b.low_seq = at.seq < b.low_seq ? at.seq : b.low_seq;
        b.high_seq = at.seq > b.high_seq ? at.seq : b.high_seq;
    }
    return b;
}

// False: no query of the block sees any of the cells of `first`'s 32.
PA_DEVICE bool any_seen_of_32(const Mask &mask, const QueryBounds &q, int first) {
    const CellBounds c = load_global(mask.bounds + first / kBoundsCells);
    if (c.low_pos > c.high_pos || c.low_pos > q.high_pos) return false;
    if (mask.window != 0 && q.low_pos - c.high_pos >= mask.window) return false;
    return c.low_seq <= q.high_seq && q.low_seq <= c.high_seq;
}

// The first tile at or after `cell` of which something may be seen; `end` or more: none. All threads agree.
template <int TILE> PA_DEVICE int next_seen_tile(const Mask &mask, const QueryBounds &q, int cell, int end) {
    if (!mask.cell_pos) return cell;
    for (; cell < end; cell += TILE)
        for (int first = cell; first < cell + TILE && first < end; first += kBoundsCells)
            if (any_seen_of_32(mask, q, first)) return cell;
    return cell;
}

// True: every query of the block sees all TILE cells, so that nothing is asked cell by cell.
template <int TILE> PA_DEVICE bool all_seen(const Mask &mask, const QueryBounds &q, int cell, int end) {
    if (cell + TILE > end || mask.dense) return false;
    if (!mask.cell_pos) return true;
    for (int first = cell; first < cell + TILE; first += kBoundsCells) {
        const CellBounds c = load_global(mask.bounds + first / kBoundsCells);
        if (c.n_empty > 0 || c.high_pos > q.low_pos) return false;
        if (mask.window != 0 && q.high_pos - c.low_pos >= mask.window) return false;
        if (c.low_seq != c.high_seq || q.low_seq != q.high_seq || c.low_seq != q.low_seq) return false;
    }
    return true;
}

// One thread per 32 cells. Grid: enough blocks for all.
PA_KERNEL void find_bounds(const Mask &mask, int n_cells, int n_threads, CellBounds *bounds) {
    const int index = block_x() * n_threads + thread_index();
    const int first = index * kBoundsCells;
    if (first >= n_cells) return;
    CellBounds b = {0x7FFFFFFF, -1, 0x7FFFFFFF, -0x7FFFFFFF, 0};
    for (int cell = first; cell < first + kBoundsCells; cell++) {
        const int pos = cell < n_cells ? load_global(mask.cell_pos + cell) : -1;
        if (pos < 0) {
            b.n_empty++;
            continue;
        }
        const int seq = mask.cell_seq ? load_global(mask.cell_seq + cell) : 0;
        b.low_pos = pos < b.low_pos ? pos : b.low_pos;
        b.high_pos = pos > b.high_pos ? pos : b.high_pos;
        b.low_seq = seq < b.low_seq ? seq : b.low_seq;
        b.high_seq = seq > b.high_seq ? seq : b.high_seq;
    }
    store_global(bounds + index, b);
}

// The cells of one split: [begin, end), at multiples of 64 but for the last.
struct CellRange {
    int begin, end;
};

PA_DEVICE CellRange split_range(const Problem &p, int split) {
    const int n_units = (p.n_cells + kSplitCells - 1) / kSplitCells;
    const int each = n_units / p.n_splits, more = n_units % p.n_splits; // the first `more` splits take one unit more
    const int begin = split * each + (split < more ? split : more);
    const int end = begin + each + (split < more ? 1 : 0);
    return {begin * kSplitCells, end * kSplitCells < p.n_cells ? end * kSplitCells : p.n_cells};
}

// Row i of a K/V head's packed rows: query i / group, head of the group i % group.
struct RowPlace {
    int query, head;
    PA_DEVICE int state(const Problem &p) const { return query * p.n_head + head; } // index into a slot
};
PA_DEVICE RowPlace row_place(const Problem &p, int kv_head, int row) {
    return {row / p.group, kv_head * p.group + row % p.group};
}
PA_DEVICE const float *query_address(const Problem &p, RowPlace at) {
    return reinterpret_cast<const float *>(reinterpret_cast<const char *>(p.q) + at.query * p.q_stride +
                                           at.head * p.q_head_stride);
}

struct SlotPointers {
    float *o, *m, *l;
};
template <int D_V> PA_DEVICE SlotPointers slot_of(const Problem &p, int slot) {
    float *base = p.slots.base + slot * p.slots.stride;
    const long long n_rows = static_cast<long long>(p.n_q) * p.n_head;
    return {base, base + n_rows * D_V, base + n_rows * (D_V + 1)};
}

} // namespace paged_attn::gpu
