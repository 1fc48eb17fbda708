// Attention of a tile of rows on tensor cores, sm_75 and later: 16 rows (decode of wide groups) or up to 64 (prefill).
//
// Grid (splits, K/V heads, row tiles). Rows are queries x heads of a group, packed. Each row warp owns 16 rows; cell
// warps share a tile's cells, each with a state of its own, and meet at the end. K and V tiles of 16-bit values pass
// through a ring of buffers in shared memory, one barrier per buffer: it says that the buffer has been filled and that
// the one before has been read. The next ones are filled while this one is used (asynchronously from sm_80 on).
//
// Precision: products of 16-bit values, sums in f32, those of a tile on the tensor cores and across tiles rounded to
// nearest. Query and weights are split into 16-bit parts with a product each: two parts of f16 leave a relative error of
// 2^-22 instead of 2^-12. bf16 K takes three parts of the query (logits of several hundred turn a relative error into
// one of the weight), the weights of bf16 and blocked V two, which leave 2^-17. K and V are exact: q8_0 and q4_0 enter
// as small integers, their block scales multiply the finished dot product of a block and, for V, the weight. V of
// cells that a row of the tile does not see must be finite, unless they are empty (0 x NaN is NaN). Weights are 2^(s - m)
// with m kHeadroom below the largest s, so that f16 has room below: a part of less than 2^-24 is lost, and with m = the
// largest s that is the whole tail of a row whose one large logit (a sink) is 17 nats above the others.
#pragma once
#include "paged_attn/attn_state.h"
#include "tile_fill.cuh"

namespace paged_attn::gpu {

// Two f32 as a pair of 16-bit numbers; what is left of them stays in a and b.
template <bool BF16> PA_DEVICE unsigned split_off(float &a, float &b) {
    const unsigned pair = pack_pair<BF16>(a, b);
    a -= BF16 ? as_float(pair << 16) : f16_to_f32(static_cast<unsigned short>(pair & 0xFFFFu));
    b -= BF16 ? as_float(pair & 0xFFFF0000u) : f16_to_f32(static_cast<unsigned short>(pair >> 16));
    return pair;
}

template <class I, bool WIDE> struct MmaBlock {
    using Of = I;
    using T = MmaTile<I, WIDE>;
    static constexpr bool kBf16K = I::kBf16Mma && I::kK == kBf16, kBf16V = I::kBf16Mma && I::kV != kF16;
    static constexpr int kScoreTiles = T::kCells / 8, kSumTiles = I::kDV / 8;
    // bf16 has f32's exponents. Block scales of V multiply the weights: with less headroom they may be up to 255.
    static constexpr float kHeadroom = kBf16V ? 0.0f : is_blocked(I::kV) ? 8.0f : 15.0f;

    const Problem &p;
    char *shared;
    int kv_head, first_row, n_rows, end;
    int row_warp, cell_warp, lane;

    PA_DEVICE unsigned short *query(int part, int row, int value) {
        return reinterpret_cast<unsigned short *>(shared + T::kQuery) + (part * T::kRows + row) * (I::kDK + 8) + value;
    }
    PA_DEVICE unsigned short *cell_values(int buffer, int cell, int value) {
        return reinterpret_cast<unsigned short *>(shared + T::kBuffer + buffer * T::kBufferBytes) + cell * T::kStride +
               value;
    }
    PA_DEVICE float *block_scale(int buffer, int block, int cell) {
        return reinterpret_cast<float *>(shared + T::kScales + buffer * T::kScaleBytes) + block * T::kTile + cell;
    }
    PA_DEVICE RowPlace place(int row) { return row_place(p, kv_head, first_row + min_of(row, n_rows - 1)); }

    PA_DEVICE void read_query() {
        constexpr int kPairs = I::kDK / 2;
        for (int i = thread_index(); i < T::kRows * kPairs; i += T::kThreads) {
            const int row = i / kPairs, value = i % kPairs * 2;
            float a = 0.0f, b = 0.0f;
            if (row < n_rows) {
                const float *q = query_address(p, place(row)) + value;
                a = load_global(q) * p.score_scale;
                b = load_global(q + 1) * p.score_scale;
            }
            for (int part = 0; part < T::kParts; part++)
                store_shared(reinterpret_cast<unsigned *>(query(part, row, value)), split_off<kBf16K>(a, b));
        }
    }

    // s[n]: rows g and g+8 of this warp, cells 8n + 2t and the next.
    PA_DEVICE void scores(int buffer, float (&s)[kScoreTiles][4]) {
        const int first_cell = cell_warp * T::kCells;
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        constexpr int kStepsTogether = is_blocked(I::kK) ? 2 : 1; // a block of 32 values is two steps
        static_assert(I::kDK / 16 % kStepsTogether == 0, "whole blocks");
#pragma unroll 1 // unrolled, its addresses take the registers that the sums need
        for (int step = 0; step < I::kDK / 16; step += kStepsTogether) {
            float sum[kScoreTiles][4];
#pragma unroll
            for (int n = 0; n < kScoreTiles; n++)
                for (int i = 0; i < 4; i++) sum[n][i] = is_blocked(I::kK) ? 0.0f : s[n][i];
#pragma unroll
            for (int k = step; k < step + kStepsTogether; k++) {
                unsigned parts[T::kParts][4], keys[4];
#pragma unroll
                for (int part = 0; part < T::kParts; part++)
                    load_matrices<false>(parts[part], query(part, row_warp * 16 + lane % 16, k * 16 + lane / 16 * 8));
#pragma unroll
                for (int n = 0; n < kScoreTiles; n += 2) {
                    const int cell = first_cell + n * 8 + lane / 16 * 8 + lane % 8;
                    load_matrices<false>(keys, cell_values(buffer, cell, k * 16 + lane / 8 % 2 * 8));
#pragma unroll
                    for (int part = T::kParts - 1; part >= 0; part--) {
                        multiply<kBf16K>(sum[n], parts[part], keys[0], keys[1]);
                        multiply<kBf16K>(sum[n + 1], parts[part], keys[2], keys[3]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < kScoreTiles; n++)
                for (int i = 0; i < 4; i++) {
                    if constexpr (is_blocked(I::kK)) {
                        const int cell = first_cell + n * 8 + lane % 4 * 2 + i % 2;
                        s[n][i] += sum[n][i] * load_shared(block_scale(buffer, step / 2, cell));
                    } else {
                        s[n][i] = sum[n][i];
                    }
                }
        }
    }

    PA_DEVICE void mask_scores(int tile, bool masked, const RowPlace (&rows)[2], const QueryPlace (&places)[2],
                               float (&s)[kScoreTiles][4]) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++)
            for (int i = 0; i < 4; i++) {
                const int cell = tile + cell_warp * T::kCells + n * 8 + lane % 4 * 2 + i % 2;
                if (!masked) s[n][i] = p.cap_log2 != 0.0f ? p.cap_log2 * tanhf(s[n][i]) : s[n][i];
                else if (cell < end) s[n][i] = masked_score(p, s[n][i], rows[i / 2].query, places[i / 2], cell);
                else s[n][i] = kHidden;
            }
    }

    // Scores become weights; m (kHeadroom below the largest score) and l (of this thread's cells) follow the new maximum,
    // and o is to shrink with them.
    PA_DEVICE void weights(float (&s)[kScoreTiles][4], float (&m)[2], float (&l)[2], float (&shrink)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m_new = kHidden;
            for (int n = 0; n < kScoreTiles; n++)
                for (int i = 2 * half; i < 2 * half + 2; i++) m_new = s[n][i] > m_new ? s[n][i] : m_new;
            for (int mask = 1; mask <= 2; mask *= 2) { // the four lanes of a row
                const float other = shuffle_xor(m_new, mask);
                m_new = other > m_new ? other : m_new;
            }
            m_new -= kHeadroom;
            m_new = m[half] > m_new ? m[half] : m_new;
            const float reference = m_new == kHidden ? 0.0f : m_new; // nothing seen yet: never (-inf) - (-inf)
            shrink[half] = exp2_fast(m[half] - reference);
            m[half] = m_new;
            l[half] *= shrink[half];
            for (int n = 0; n < kScoreTiles; n++)
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[n][i] = exp2_fast(s[n][i] - reference);
                    l[half] += s[n][i];
                }
        }
    }

    PA_DEVICE void split_weights(const float (&w)[2][4], unsigned (&high)[4], unsigned (&low)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) { // rows g, g+8 of cells 2t, 2t+1, then of cells 8+2t, 8+2t+1
            float a = w[i / 2][i % 2 * 2], b = w[i / 2][i % 2 * 2 + 1];
            high[i] = split_off<kBf16V>(a, b);
            low[i] = split_off<kBf16V>(a, b);
        }
    }

    // o = o * shrink + weights * V. The tensor cores round sums towards zero, which adds up over thousands of tiles; so
    // they sum one tile only, and it joins o with an addition that rounds to nearest. Large heads have no registers for
    // that: they sum in o, and a split of theirs has a limit (ImageInfo::most_cells).
    PA_DEVICE void add_values(int buffer, const float (&s)[kScoreTiles][4], const float (&shrink)[2],
                              float (&o)[kSumTiles][4]) {
        constexpr int kSteps = T::kCells / 16;
        const int first = cell_warp * T::kCells;
        unsigned high[kSteps][4], low[kSteps][4];
        if constexpr (!T::kSumsApart) {
#pragma unroll
            for (int n = 0; n < kSumTiles; n++)
                for (int i = 0; i < 4; i++) o[n][i] *= shrink[i / 2];
        }
#pragma unroll
        for (int n = 0; n < kSumTiles; n += 2) {
            if (n == 0 || (is_blocked(I::kV) && n % 4 == 0)) {
#pragma unroll
                for (int step = 0; step < kSteps; step++) {
                    float w[2][4];
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        for (int i = 0; i < 4; i++) {
                            w[j][i] = s[2 * step + j][i];
                            if constexpr (is_blocked(I::kV))
                                w[j][i] *= load_shared(
                                    block_scale(buffer, n / 4, first + step * 16 + j * 8 + lane % 4 * 2 + i % 2));
                        }
                    split_weights(w, high[step], low[step]);
                }
            }
            if constexpr (T::kSumsApart) {
                float a[4] = {0.0f, 0.0f, 0.0f, 0.0f}, b[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int step = 0; step < kSteps; step++)
                    multiply_values(buffer, first + step * 16, n, high[step], low[step], a, b);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    o[n][i] = o[n][i] * shrink[i / 2] + a[i];
                    o[n + 1][i] = o[n + 1][i] * shrink[i / 2] + b[i];
                }
            } else {
#pragma unroll
                for (int step = 0; step < kSteps; step++)
                    multiply_values(buffer, first + step * 16, n, high[step], low[step], o[n], o[n + 1]);
            }
        }
    }

    // a, b += weights * V of 16 cells from `first`, values 8n .. 8n+7 and the next eight.
    PA_DEVICE void multiply_values(int buffer, int first, int n, const unsigned (&high)[4], const unsigned (&low)[4],
                                   float (&a)[4], float (&b)[4]) {
        unsigned values[4];
        const int cell = first + lane / 8 % 2 * 8 + lane % 8;
        load_matrices<true>(values, cell_values(buffer, cell, n * 8 + lane / 16 * 8));
        multiply<kBf16V>(a, low, values[0], values[1]);
        multiply<kBf16V>(a, high, values[0], values[1]);
        multiply<kBf16V>(b, low, values[2], values[3]);
        multiply<kBf16V>(b, high, values[2], values[3]);
    }

    PA_DEVICE float *merge_row(int cell_warp_from, int row) { // o [d_v], m, l
        return reinterpret_cast<float *>(shared) +
               ((row_warp * (T::kCellWarps - 1) + cell_warp_from - 1) * 16 + row) * (I::kDV + 2);
    }

    PA_DEVICE void merge_cell_warps(float (&m)[2], float (&l)[2], float (&o)[kSumTiles][4]) {
        const int g = lane / 4, t = lane % 4;
        sync_block(At::mma_ring_drained);
        if (cell_warp > 0)
            for (int half = 0; half < 2; half++) {
                float *to = merge_row(cell_warp, g + 8 * half);
#pragma unroll
                for (int n = 0; n < kSumTiles; n++)
                    for (int i = 0; i < 2; i++) store_shared(to + n * 8 + 2 * t + i, o[n][2 * half + i]);
                if (t == 0) {
                    store_shared(to + I::kDV, m[half]);
                    store_shared(to + I::kDV + 1, l[half]);
                }
            }
        sync_block(At::mma_states_ready);
        if (cell_warp > 0) return;
        for (int from = 1; from < T::kCellWarps; from++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float *other = merge_row(from, g + 8 * half);
                const MergeWeights by = merge_weights(m[half], load_shared(other + I::kDV));
                m[half] = by.m;
                l[half] = l[half] * by.a + load_shared(other + I::kDV + 1) * by.b;
#pragma unroll
                for (int n = 0; n < kSumTiles; n++)
                    for (int i = 0; i < 2; i++)
                        o[n][2 * half + i] = o[n][2 * half + i] * by.a + load_shared(other + n * 8 + 2 * t + i) * by.b;
            }
    }

    // The first cell warp's state into the slot, joining what is there when asked to.
    PA_DEVICE void write_state(int slot, const float (&m)[2], const float (&l)[2], const float (&o)[kSumTiles][4]) {
        const SlotPointers at = slot_of<I::kDV>(p, slot);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_warp * 16 + lane / 4 + 8 * half;
            const int state = place(row).state(p);
            float *to = at.o + static_cast<long long>(state) * I::kDV + lane % 4 * 2;
            // one of a row's four lanes reads and writes m and l; the others are told
            const bool reads = p.accumulate && row < n_rows && lane % 4 == 0;
            const float l_before = reads ? load_global(at.l + state) : 0.0f;
            float m_before = reads ? load_global(at.m + state) : kEmptyM;
            for (int mask = 1; mask <= 2; mask *= 2) {
                const float other = shuffle_xor(m_before, mask);
                m_before = other > m_before ? other : m_before;
            }
            if (row >= n_rows) continue;
            const MergeWeights by = merge_weights(m[half], m_before);
#pragma unroll
            for (int n = 0; n < kSumTiles; n++)
                for (int i = 0; i < 2; i++) {
                    const float before = p.accumulate ? load_global(to + n * 8 + i) : 0.0f;
                    store_global(to + n * 8 + i, o[n][2 * half + i] * by.a + before * by.b);
                }
            if (lane % 4 == 0) {
                store_global(at.m + state, by.m);
                store_global(at.l + state, l[half] * by.a + l_before * by.b);
            }
        }
    }
};

template <class I, bool WIDE> PA_KERNEL void tile_mma(const Problem &p) {
    using T = MmaTile<I, WIDE>;
    using Block = MmaBlock<I, WIDE>;
    constexpr int kBuffers = T::kUsedBuffers, kAhead = kBuffers - 1;
    const int first_row = block_z() * T::kRows, warp = thread_index() / 32;
    const CellRange range = split_range(p, block_x());
    Block block = {p,
                   shared_memory(),
                   block_y(),
                   first_row,
                   min_of(T::kRows, p.n_q * p.group - first_row),
                   range.end,
                   warp / T::kCellWarps,
                   warp % T::kCellWarps,
                   thread_index() % 32};
    const QueryBounds queries = query_bounds(p.mask, first_row / p.group, (first_row + block.n_rows - 1) / p.group);
    const int row = block.row_warp * 16 + block.lane / 4;
    const RowPlace rows[2] = {block.place(row), block.place(row + 8)};
    const QueryPlace places[2] = {query_place(p.mask, rows[0].query), query_place(p.mask, rows[1].query)};

    float m[2] = {kHidden, kHidden}, l[2] = {0.0f, 0.0f}, o[Block::kSumTiles][4];
#pragma unroll
    for (int n = 0; n < Block::kSumTiles; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;

    // K of a tile is filled kAhead buffers before it is used, and so is V: with three buffers while the tile before is
    // at its K, or its V; with two while the step before is.
    int tile = next_seen_tile<T::kTile>(p.mask, queries, range.begin, range.end), buffer = 0;
    fill_tile<true>(block, 0, tile);
    if (kAhead == 2) fill_tile<false>(block, 1, tile);
    block.read_query();
    while (tile < range.end) {
        const int next = next_seen_tile<T::kTile>(p.mask, queries, tile + T::kTile, range.end);
        const bool masked = !all_seen<T::kTile>(p.mask, queries, tile, range.end);
        float s[Block::kScoreTiles][4], shrink[2];
        wait_async<kAhead - 1>(At::mma_tile_landed);
        sync_block(At::mma_tile_ready);
        if (kAhead == 2) fill_tile<true>(block, (buffer + 2) % kBuffers, next);
        else fill_tile<false>(block, (buffer + 1) % kBuffers, tile);
        block.scores(buffer, s);
        block.mask_scores(tile, masked, rows, places, s);
        block.weights(s, m, l, shrink);
        buffer = (buffer + 1) % kBuffers;

        wait_async<kAhead - 1>(At::mma_tile_landed);
        sync_block(At::mma_tile_ready);
        if (kAhead == 2) fill_tile<false>(block, (buffer + 2) % kBuffers, next);
        else fill_tile<true>(block, (buffer + 1) % kBuffers, next);
        block.add_values(buffer, s, shrink, o);
        buffer = (buffer + 1) % kBuffers;
        tile = next;
    }
    for (int half = 0; half < 2; half++)
        for (int mask = 1; mask <= 2; mask *= 2) l[half] += shuffle_xor(l[half], mask);
    if constexpr (T::kCellWarps > 1) {
        block.merge_cell_warps(m, l, o);
        if (block.cell_warp > 0) return;
    }
    block.write_state(p.first_slot + block_x(), m, l, o);
}

} // namespace paged_attn::gpu
