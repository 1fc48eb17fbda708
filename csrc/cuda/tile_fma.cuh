// Attention of a tile of rows in plain f32, for GPUs without tensor cores that serve the shape.
//
// Grid (splits, K/V heads, row tiles), 128 threads. K, then V of a tile of cells lie in shared memory as f32, scales
// multiplied in. Four barriers per tile: the room is free, K is there, scores are there, V and weights are there.
//   scores  8 x 16 threads, each a few cells x a few rows
//   weights a warp takes a quarter of the rows, a lane per cell
//   sums    a thread owns 4 + 4 values of V for a few rows
#pragma once
#include "traits.h"
#include "visible.cuh"

namespace paged_attn::gpu {

template <class I> struct FmaBlock {
    using T = FmaTile<I>;
    static constexpr int kWarpRows = T::kRows / 4;
    const Problem &p;
    char *shared;
    int kv_head, first_row, n_rows, end;

    PA_DEVICE float *query(int row, int value) {
        return reinterpret_cast<float *>(shared + T::kQuery) + row * T::kStrideQ + value;
    }
    PA_DEVICE float *cell_values(int cell, int value) {
        return reinterpret_cast<float *>(shared + T::kKeys) + cell * T::kStrideKV + value;
    }
    PA_DEVICE float *score(int row, int cell) {
        return reinterpret_cast<float *>(shared + T::kScores) + row * (T::kTile + 1) + cell;
    }
    PA_DEVICE float *rescale(int row) { return reinterpret_cast<float *>(shared + T::kRescale) + row; }
    // Value i of a thread's eight: four and four, so that neighbours read what lies side by side (no bank conflicts).
    PA_DEVICE int sum_value(int unit, int i) { return i / 4 * (I::kDV / 2) + unit * 4 + i % 4; }
    PA_DEVICE int state_of(int row) { return row_place(p, kv_head, first_row + row).state(p); }

    PA_DEVICE void read_query() {
        for (int i = thread_index(); i < T::kRows * I::kDK; i += T::kThreads) {
            const int row = i / I::kDK, value = i % I::kDK;
            const float x =
                row < n_rows ? load_global(query_address(p, row_place(p, kv_head, first_row + row)) + value) : 0.0f;
            store_shared(query(row, value), x * p.score_scale);
        }
    }

    template <bool KEYS> PA_DEVICE void fill(int tile) {
        constexpr RowType kType = KEYS ? I::kK : I::kV;
        constexpr int kUnits = (KEYS ? I::kDK : I::kDV) / 8;
        const Rows &from = KEYS ? p.k : p.v;
#pragma unroll 4 // without a branch around the read, so that the reads of several turns are under way together
        for (int i = thread_index(); i < T::kTile * kUnits; i += T::kThreads) {
            const int within = i / kUnits, unit = i % kUnits, cell = tile + within;
            const bool valid = cell < end && (KEYS || holds_values(p.mask, cell));
            const Piece read = load_unit<kType, I::kAlign>(row_address(from, valid ? cell : tile, kv_head), unit);
            float x[8];
            const float scale = unpack<kType, I::kAlign>(valid ? read : Piece{{0, 0, 0, 0}}, unit, x);
            for (int half = 0; half < 2; half++)
                store_shared(reinterpret_cast<Float4 *>(cell_values(within, unit_value<kType>(unit, half))),
                             Float4{x[4 * half] * scale, x[4 * half + 1] * scale, x[4 * half + 2] * scale,
                                    x[4 * half + 3] * scale});
        }
    }

    PA_DEVICE void scores(int tile, bool masked) {
        const int cell_thread = thread_index() % T::kCellThreads, row_thread = thread_index() / T::kCellThreads;
        float s[T::kRowSteps][T::kCellSteps];
        for (int i = 0; i < T::kRowSteps; i++)
            for (int j = 0; j < T::kCellSteps; j++) s[i][j] = 0.0f;
        if (row_thread >= T::kRows) return;
#pragma unroll 4
        for (int value = 0; value < I::kDK; value += 4) {
            Float4 q[T::kRowSteps];
#pragma unroll
            for (int i = 0; i < T::kRowSteps; i++)
                q[i] = load_shared(reinterpret_cast<const Float4 *>(query(row_thread + i * T::kRowThreads, value)));
#pragma unroll
            for (int j = 0; j < T::kCellSteps; j++) {
                const Float4 k = load_shared(
                    reinterpret_cast<const Float4 *>(cell_values(cell_thread + j * T::kCellThreads, value)));
#pragma unroll
                for (int i = 0; i < T::kRowSteps; i++) { // four fused multiply-adds, no sum of products beside them
                    s[i][j] += q[i].x * k.x;
                    s[i][j] += q[i].y * k.y;
                    s[i][j] += q[i].z * k.z;
                    s[i][j] += q[i].w * k.w;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < T::kRowSteps; i++) {
            const int row = row_thread + i * T::kRowThreads;
            const int query = row_place(p, kv_head, first_row + min_of(row, n_rows - 1)).query;
            const QueryPlace at = query_place(p.mask, query);
#pragma unroll
            for (int j = 0; j < T::kCellSteps; j++) {
                const int within = cell_thread + j * T::kCellThreads, cell = tile + within;
                float x = s[i][j];
                if (!masked) x = p.cap_log2 != 0.0f ? p.cap_log2 * tanhf(x) : x;
                else x = cell < end ? masked_score(p, x, query, at, cell) : kHidden;
                store_shared(score(row, within), x);
            }
        }
    }

    // m (the same in all lanes) and l (a part per lane) of this warp's rows.
    PA_DEVICE void weights(float (&m)[kWarpRows], float (&l)[kWarpRows]) {
        const int warp = thread_index() / 32, lane = thread_index() % 32;
#pragma unroll
        for (int i = 0; i < kWarpRows; i++) {
            const int row = warp * kWarpRows + i;
            const float s = lane < T::kTile ? load_shared(score(row, lane)) : kHidden;
            float m_new = s > m[i] ? s : m[i];
            for (int mask = 16; mask > 0; mask /= 2) {
                const float other = shuffle_xor(m_new, mask);
                m_new = other > m_new ? other : m_new;
            }
            const float reference = m_new == kHidden ? 0.0f : m_new; // nothing seen yet: never (-inf) - (-inf)
            const float shrink = exp2_fast(m[i] - reference), w = exp2_fast(s - reference);
            l[i] = l[i] * shrink + w;
            m[i] = m_new;
            if (lane < T::kTile) store_shared(score(row, lane), w);
            if (lane == 0) store_shared(rescale(row), shrink);
        }
    }

    PA_DEVICE void add_values(float (&o)[T::kSumRows][8]) {
        const int unit = thread_index() % T::kUnitsV, group = thread_index() / T::kUnitsV;
        if (group >= T::kSumGroups) return;
#pragma unroll
        for (int i = 0; i < T::kSumRows; i++) {
            const int row = group + i * T::kSumGroups;
            const float shrink = row < T::kRows ? load_shared(rescale(row)) : 0.0f;
            for (int d = 0; d < 8; d++) o[i][d] *= shrink;
        }
#pragma unroll 4
        for (int cell = 0; cell < T::kTile; cell++) {
            const Float4 a = load_shared(reinterpret_cast<const Float4 *>(cell_values(cell, sum_value(unit, 0))));
            const Float4 b = load_shared(reinterpret_cast<const Float4 *>(cell_values(cell, sum_value(unit, 4))));
#pragma unroll
            for (int i = 0; i < T::kSumRows; i++) {
                const int row = group + i * T::kSumGroups;
                const float w = row < T::kRows ? load_shared(score(row, cell)) : 0.0f;
                o[i][0] += w * a.x;
                o[i][1] += w * a.y;
                o[i][2] += w * a.z;
                o[i][3] += w * a.w;
                o[i][4] += w * b.x;
                o[i][5] += w * b.y;
                o[i][6] += w * b.z;
                o[i][7] += w * b.w;
            }
        }
    }

    // The slot's state in (before) or out (after).
    template <bool READ>
    PA_DEVICE void exchange(int slot, float (&m)[kWarpRows], float (&l)[kWarpRows], float (&o)[T::kSumRows][8]) {
        const SlotPointers at = slot_of<I::kDV>(p, slot);
        const int warp = thread_index() / 32, lane = thread_index() % 32;
#pragma unroll
        for (int i = 0; i < kWarpRows; i++) {
            const int row = warp * kWarpRows + i;
            if (row >= n_rows) continue;
            if constexpr (READ) {
                m[i] = load_global(at.m + state_of(row));
                l[i] = lane == 0 ? load_global(at.l + state_of(row)) : 0.0f;
            } else if (lane == 0) {
                store_global(at.m + state_of(row), m[i]);
                store_global(at.l + state_of(row), l[i]);
            }
        }
        const int unit = thread_index() % T::kUnitsV, group = thread_index() / T::kUnitsV;
        if (group >= T::kSumGroups) return;
#pragma unroll
        for (int i = 0; i < T::kSumRows; i++) {
            const int row = group + i * T::kSumGroups;
            if (row >= n_rows) continue;
            float *to = at.o + static_cast<long long>(state_of(row)) * I::kDV;
            for (int d = 0; d < 8; d++) {
                if constexpr (READ) o[i][d] = load_global(to + sum_value(unit, d));
                else store_global(to + sum_value(unit, d), o[i][d]);
            }
        }
    }
};

template <class I> PA_KERNEL void tile_fma(const Problem &p) {
    using T = FmaTile<I>;
    using Block = FmaBlock<I>;
    const int first_row = block_z() * T::kRows;
    const CellRange range = split_range(p, block_x());
    Block block = {p, shared_memory(), block_y(), first_row, min_of(T::kRows, p.n_q * p.group - first_row), range.end};
    const QueryBounds queries = query_bounds(p.mask, first_row / p.group, (first_row + block.n_rows - 1) / p.group);
    float m[Block::kWarpRows], l[Block::kWarpRows], o[T::kSumRows][8];
#pragma unroll
    for (int i = 0; i < Block::kWarpRows; i++) {
        m[i] = kHidden;
        l[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < T::kSumRows; i++)
        for (int d = 0; d < 8; d++) o[i][d] = 0.0f;
    if (p.accumulate) block.template exchange<true>(p.first_slot + block_x(), m, l, o);

    block.read_query();
    int tile = next_seen_tile<T::kTile>(p.mask, queries, range.begin, range.end);
    while (tile < range.end) {
        const bool masked = !all_seen<T::kTile>(p.mask, queries, tile, range.end);
        sync_block(At::fma_keys_free);
        block.template fill<true>(tile);
        sync_block(At::fma_keys_ready);
        block.scores(tile, masked);
        sync_block(At::fma_scores_ready);
        block.weights(m, l);
        block.template fill<false>(tile);
        sync_block(At::fma_values_ready);
        block.add_values(o);
        tile = next_seen_tile<T::kTile>(p.mask, queries, tile + T::kTile, range.end);
    }
#pragma unroll
    for (int i = 0; i < Block::kWarpRows; i++)
        for (int mask = 16; mask > 0; mask /= 2) l[i] += shuffle_xor(l[i], mask);
    block.template exchange<false>(p.first_slot + block_x(), m, l, o);
}

} // namespace paged_attn::gpu
