// Decode in plain f32, for every GPU: a few rows (queries x heads of a group) against a long run of cells.
//
// Grid (splits, K/V heads, row tiles), 128 threads. K and V are read once each; a value is converted by the one thread
// that uses it, so their bytes need no barrier: a thread copies its own units ahead (asynchronously from sm_80 on, into
// registers below) and reads back what it copied. Per tile of cells two barriers: scores ready, weights ready.
//   scores  kLanes threads share a cell, each multiplies its units with all rows; a transposing sum over the lanes
//   weights one warp per row: running maximum m, p = 2^(s - m), l
//   sums    a thread owns 8 values of V for a group of cells and all rows: o += p v; groups are added at the end
// Block scales of q8_0 and q4_0 multiply the finished dot product and the weight. Precision f32 throughout. A cell that
// no row of the block sees adds nothing even when V holds no number there.
#pragma once
#include "traits.h"
#include "visible.cuh"

namespace paged_attn::gpu {

// The units of K (or V) that this thread takes of one tile, on their way.
template <class I, int PIECES> struct InRegisters {
    Piece pieces[PIECES];
};

// Row, unit and cell of piece i of this thread; `valid` is false if there is no such piece.
struct PieceOf {
    int cell, unit;
    bool valid;
};
template <class T> PA_DEVICE PieceOf key_piece(int i, int tile, int end) {
    const int thread = thread_index();
    const int cell = tile + i / T::kRounds * T::kGroupsK + thread / T::kLanes;
    return {cell, thread % T::kLanes + i % T::kRounds * T::kLanes, cell < end};
}
template <class T> PA_DEVICE PieceOf value_piece(int i, int tile, int end) {
    const int thread = thread_index();
    const int group = thread / T::kUnitsV, within = i * T::kGroupsV + group;
    return {tile + within, thread % T::kUnitsV, group < T::kGroupsV && within < T::kTile && tile + within < end};
}

template <class I, bool KEYS> PA_DEVICE PieceOf piece_of(int i, int tile, int end) {
    if constexpr (KEYS) return key_piece<DecodeTile<I>>(i, tile, end);
    else return value_piece<DecodeTile<I>>(i, tile, end);
}

// The addresses of all pieces before any of them is read, so that the look-ups in the page table overlap. A piece that
// is not there has the address of the tile's first cell: read in vain, and never used.
template <class I, bool KEYS, int PIECES>
PA_DEVICE void find_rows(const Problem &p, int kv_head, int tile, int end, const char *(&rows)[PIECES]) {
    const Rows &from = KEYS ? p.k : p.v;
    const bool whole = whole_tiles(from);
    const char *first = row_address(from, tile, kv_head);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const PieceOf at = piece_of<I, KEYS>(i, tile, end);
        rows[i] = tile_row(from, kv_head, tile, first, whole, at.valid ? at.cell : tile);
    }
}

template <class I, bool KEYS, int PIECES>
PA_DEVICE void load_pieces(const Problem &p, int kv_head, int tile, int end, InRegisters<I, PIECES> &to) {
    constexpr RowType kType = KEYS ? I::kK : I::kV;
    if (tile >= end) { // no cell to read
        for (int i = 0; i < PIECES; i++) to.pieces[i] = {{0, 0, 0, 0}};
        return;
    }
    const char *rows[PIECES];
    find_rows<I, KEYS, PIECES>(p, kv_head, tile, end, rows);
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        to.pieces[i] = load_unit<kType, I::kAlign>(rows[i], piece_of<I, KEYS>(i, tile, end).unit);
}

template <class I> PA_DEVICE Piece *staged_piece(char *shared, int stage, int i) {
    using T = DecodeTile<I>;
    return reinterpret_cast<Piece *>(shared + T::kPieces + stage * T::kStageBytes) + i * T::kThreads + thread_index();
}

template <class I, bool KEYS, int PIECES>
PA_DEVICE void stage_pieces(const Problem &p, int kv_head, int tile, int end, char *shared, int stage) {
    constexpr RowType kType = KEYS ? I::kK : I::kV;
    if (tile < end) {
        const char *rows[PIECES];
        find_rows<I, KEYS, PIECES>(p, kv_head, tile, end, rows);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const PieceOf at = piece_of<I, KEYS>(i, tile, end);
            copy_unit<kType>(staged_piece<I>(shared, stage, i), rows[i], at.unit, at.valid);
        }
    }
    commit_async();
}

template <class I, RowType TYPE, int PIECES>
PA_DEVICE void read_staged(char *shared, int stage, InRegisters<I, PIECES> &to) {
    for (int i = 0; i < PIECES; i++) {
        const Piece *from = staged_piece<I>(shared, stage, i);
        if constexpr (TYPE != kQ4) to.pieces[i] = load_shared(from);
        else // three words
            for (int w = 0; w < 3; w++) to.pieces[i].w[w] = load_shared(&from->w[w]);
    }
}

// Adds over the lanes that share a cell. Starts with CELLS cells in every lane, ends with one in each pair of lanes
// or fewer: each step sends half of the cells to the lane across and keeps the other half. Returns the cell kept.
template <class I, int CELLS, int MASK> PA_DEVICE int sum_over_lanes(float (&s)[I::kRows][DecodeTile<I>::kCells]) {
    if constexpr (MASK == 0) {
        return 0;
    } else if constexpr (CELLS > 1) {
        const bool upper = (thread_index() & MASK) != 0;
        for (int r = 0; r < I::kRows; r++)
            for (int i = 0; i < CELLS / 2; i++) {
                const float keep = upper ? s[r][i + CELLS / 2] : s[r][i], send = upper ? s[r][i] : s[r][i + CELLS / 2];
                s[r][i] = keep + shuffle_xor(send, MASK);
            }
        return (upper ? CELLS / 2 : 0) + sum_over_lanes<I, CELLS / 2, MASK / 2>(s);
    } else {
        for (int r = 0; r < I::kRows; r++) s[r][0] += shuffle_xor(s[r][0], MASK);
        return sum_over_lanes<I, 1, MASK / 2>(s);
    }
}

// A row that a warp turns into weights, and what is asked of cells for it.
struct WarpRow {
    int query;
    QueryPlace place;
};

template <class I> struct DecodeBlock {
    using T = DecodeTile<I>;
    static constexpr int kWarpRows = divide_up(I::kRows, 4);
    const Problem &p;
    char *shared;
    int kv_head, first_row, n_rows; // n_rows: of this block, 1 .. kRows
    int end;                        // of the split's cells
    bool masked;                    // of the tile at hand: each cell is to be asked

    PA_DEVICE Float4 *query(int row, int half, int unit) {
        return reinterpret_cast<Float4 *>(shared + T::kQuery) + (row * 2 + half) * T::kUnitsK + unit;
    }
    PA_DEVICE float *score(int row, int cell) {
        return reinterpret_cast<float *>(shared + T::kScores) + row * T::kTile + cell;
    }
    PA_DEVICE float *weight(int cell, int row) {
        return reinterpret_cast<float *>(shared + T::kWeights) + cell * T::kRowsPadded + row;
    }
    PA_DEVICE float *rescale(int row) { return reinterpret_cast<float *>(shared + T::kRescale) + row; }
    PA_DEVICE float *sum(int group, int value) {
        return reinterpret_cast<float *>(shared + T::kSums) + group * I::kDV + value;
    }

    PA_DEVICE void read_query() {
        for (int i = thread_index(); i < I::kRows * 2 * T::kUnitsK; i += T::kThreads) {
            const int unit = i % T::kUnitsK, half = i / T::kUnitsK % 2, row = i / T::kUnitsK / 2;
            Float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (row < n_rows) {
                const float *q =
                    query_address(p, row_place(p, kv_head, first_row + row)) + unit_value<I::kK>(unit, half);
                x = {load_global(q) * p.score_scale, load_global(q + 1) * p.score_scale,
                     load_global(q + 2) * p.score_scale, load_global(q + 3) * p.score_scale};
            }
            store_shared(query(row, half, unit), x);
        }
    }

    PA_DEVICE void scores(const InRegisters<I, T::kPiecesK> &keys) {
        const int lane = thread_index() % T::kLanes;
        float s[I::kRows][T::kCells];
        for (int r = 0; r < I::kRows; r++)
            for (int c = 0; c < T::kCells; c++) s[r][c] = 0.0f;
#pragma unroll
        for (int round = 0; round < T::kRounds; round++) {
            const int unit = lane + round * T::kLanes;
            float x[T::kCells][8], scale[T::kCells];
#pragma unroll
            for (int c = 0; c < T::kCells; c++)
                scale[c] = unpack<I::kK, I::kAlign>(keys.pieces[c * T::kRounds + round], unit, x[c]);
#pragma unroll
            for (int r = 0; r < I::kRows; r++) {
                const Float4 a = load_shared(query(r, 0, unit)), b = load_shared(query(r, 1, unit));
#pragma unroll
                for (int c = 0; c < T::kCells; c++) {
                    float dot = is_blocked(I::kK) ? 0.0f : s[r][c];
                    dot += a.x * x[c][0];
                    dot += a.y * x[c][1];
                    dot += a.z * x[c][2];
                    dot += a.w * x[c][3];
                    dot += b.x * x[c][4];
                    dot += b.y * x[c][5];
                    dot += b.z * x[c][6];
                    dot += b.w * x[c][7];
                    s[r][c] = is_blocked(I::kK) ? s[r][c] + scale[c] * dot : dot;
                }
            }
        }
        const int kept = sum_over_lanes<I, T::kCells, T::kLanes / 2>(s);
        constexpr int kSame = T::kLanes / T::kCells > 1 ? T::kLanes / T::kCells : 1; // lanes that hold the same sums
        if (lane % kSame != 0) return;
        const int within = kept * T::kGroupsK + thread_index() / T::kLanes;
        for (int r = 0; r < I::kRows; r++) store_shared(score(r, within), s[r][0]);
    }

    // The score of a row of this warp after soft-cap and mask: a lane per cell, so that what is asked of cells lies side by
    // side. Here and not where scores are summed: there the mask's code would stand once for each row.
    PA_DEVICE float masked_of(int row, const WarpRow &of, int tile, int within) {
        if (within >= T::kTile || tile + within >= end || row >= n_rows) return kHidden;
        const float s = load_shared(score(row, within));
        if (masked) return masked_score(p, s, of.query, of.place, tile + within);
        return p.cap_log2 != 0.0f ? p.cap_log2 * tanhf(s) : s;
    }

    // m (the same in all lanes) and l (a part per lane) of the rows of this warp: warp, warp + 4.
    PA_DEVICE void weights(int tile, const WarpRow (&rows)[kWarpRows], float (&m)[2], float (&l)[2]) {
        constexpr int kLaneCells = divide_up(T::kTile, 32);
        const int warp = thread_index() / 32, lane = thread_index() % 32;
#pragma unroll
        for (int i = 0; i < kWarpRows; i++) {
            const int row = warp + 4 * i;
            if (row >= I::kRows) continue; // the same for the whole warp
            float s[kLaneCells], m_new = m[i];
#pragma unroll
            for (int j = 0; j < kLaneCells; j++) {
                s[j] = masked_of(row, rows[i], tile, lane + 32 * j);
                m_new = s[j] > m_new ? s[j] : m_new;
            }
            for (int mask = 16; mask > 0; mask /= 2) {
                const float other = shuffle_xor(m_new, mask);
                m_new = other > m_new ? other : m_new;
            }
            const float reference = m_new == kHidden ? 0.0f : m_new; // nothing seen yet: never (-inf) - (-inf)
            const float shrink = exp2_fast(m[i] - reference);
            l[i] *= shrink;
#pragma unroll
            for (int j = 0; j < kLaneCells; j++) {
                const float w = exp2_fast(s[j] - reference);
                l[i] += w;
                if (lane + 32 * j < T::kTile) store_shared(weight(lane + 32 * j, row), w);
            }
            if (lane == 0) store_shared(rescale(row), shrink);
            m[i] = m_new;
        }
    }

    PA_DEVICE void add_values(const InRegisters<I, T::kPiecesV> &values, float (&o)[I::kRows][8]) {
        const int group = thread_index() / T::kUnitsV, unit = thread_index() % T::kUnitsV;
        if (group >= T::kGroupsV) return;
#pragma unroll
        for (int r = 0; r < I::kRows; r++) {
            const float shrink = load_shared(rescale(r));
            for (int d = 0; d < 8; d++) o[r][d] *= shrink;
        }
#pragma unroll
        for (int i = 0; i < T::kCellsV; i++) {
            const int cell = i * T::kGroupsV + group;
            if (cell >= T::kTile) continue;
            float w[I::kRows], any = 0.0f;
            for (int r = 0; r < I::kRows; r++) {
                w[r] = load_shared(weight(cell, r));
                any += w[r];
            }
            if (masked && any == 0.0f) continue; // a cell that nobody sees: its V may be anything
            float x[8];
            const float scale = unpack<I::kV, I::kAlign>(values.pieces[i], unit, x);
#pragma unroll
            for (int r = 0; r < I::kRows; r++) {
                const float by = is_blocked(I::kV) ? w[r] * scale : w[r];
                for (int d = 0; d < 8; d++) o[r][d] += by * x[d];
            }
        }
    }

    // The groups' sums added, row after row, and the state written.
    PA_DEVICE void write_state(int slot, const float (&m)[2], const float (&l)[2], const float (&o)[I::kRows][8]) {
        const SlotPointers out = slot_of<I::kDV>(p, slot);
        const int warp = thread_index() / 32, lane = thread_index() % 32;
        const int group = thread_index() / T::kUnitsV, unit = thread_index() % T::kUnitsV;
        for (int i = 0; i < kWarpRows; i++) {
            float total = l[i];
            for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
            const int row = warp + 4 * i;
            if (row < n_rows && lane == 0) {
                const int state = row_place(p, kv_head, first_row + row).state(p);
                store_global(out.m + state, m[i]);
                store_global(out.l + state, total);
            }
        }
#pragma unroll
        for (int r = 0; r < I::kRows; r++) {
            // for the first row, too: the sums lie where pieces were, which other threads may still be reading
            sync_block(At::decode_sums_free);
            if (group < T::kGroupsV)
                for (int half = 0; half < 2; half++)
                    store_shared(reinterpret_cast<Float4 *>(sum(group, unit_value<I::kV>(unit, half))),
                                 Float4{o[r][4 * half], o[r][4 * half + 1], o[r][4 * half + 2], o[r][4 * half + 3]});
            sync_block(At::decode_sums_ready);
            for (int d = thread_index(); d < I::kDV; d += T::kThreads) {
                float total = 0.0f;
                for (int g = 0; g < T::kGroupsV; g++) total += load_shared(sum(g, d));
                if (r < n_rows)
                    store_global(out.o +
                                     static_cast<long long>(row_place(p, kv_head, first_row + r).state(p)) * I::kDV + d,
                                 total);
            }
        }
    }
};

template <class I> PA_KERNEL void decode(const Problem &p) {
    using T = DecodeTile<I>;
    char *shared = shared_memory();
    const int first_row = block_z() * I::kRows, all_rows = p.n_q * p.group;
    const CellRange range = split_range(p, block_x());
    DecodeBlock<I> block = {p, shared, block_y(), first_row, min_of(I::kRows, all_rows - first_row), range.end, true};
    const QueryBounds queries = query_bounds(p.mask, first_row / p.group, (first_row + block.n_rows - 1) / p.group);

    WarpRow rows[DecodeBlock<I>::kWarpRows];
#pragma unroll
    for (int i = 0; i < DecodeBlock<I>::kWarpRows; i++) {
        const int row = min_of(thread_index() / 32 + 4 * i, block.n_rows - 1);
        rows[i].query = row_place(p, block.kv_head, first_row + row).query;
        rows[i].place = query_place(p.mask, rows[i].query);
    }

    float m[2] = {kHidden, kHidden}, l[2] = {0.0f, 0.0f}, o[I::kRows][8];
    for (int r = 0; r < I::kRows; r++)
        for (int d = 0; d < 8; d++) o[r][d] = 0.0f;
    InRegisters<I, T::kPiecesK> keys;
    InRegisters<I, T::kPiecesV> values;

    int tile = next_seen_tile<T::kTile>(p.mask, queries, range.begin, range.end), stage = 0;
    if constexpr (T::kStaged) {
        stage_pieces<I, true, T::kPiecesK>(p, block.kv_head, tile, range.end, shared, 0);
        stage_pieces<I, false, T::kPiecesV>(p, block.kv_head, tile, range.end, shared, 1);
    } else {
        load_pieces<I, true, T::kPiecesK>(p, block.kv_head, tile, range.end, keys);
    }
    block.read_query();
    sync_block(At::decode_query_ready);
    while (tile < range.end) {
        const int next = next_seen_tile<T::kTile>(p.mask, queries, tile + T::kTile, range.end);
        block.masked = !all_seen<T::kTile>(p.mask, queries, tile, range.end);
        if constexpr (T::kStaged) {
            stage_pieces<I, true, T::kPiecesK>(p, block.kv_head, next, range.end, shared, (stage + 2) % T::kStages);
            wait_async<2>(At::decode_pieces_landed);
            read_staged<I, I::kK>(shared, stage, keys);
        } else {
            load_pieces<I, false, T::kPiecesV>(p, block.kv_head, tile, range.end, values);
        }
        block.scores(keys);
        sync_block(At::decode_scores_ready);
        block.weights(tile, rows, m, l);
        sync_block(At::decode_weights_ready);
        if constexpr (T::kStaged) {
            stage_pieces<I, false, T::kPiecesV>(p, block.kv_head, next, range.end, shared, stage);
            wait_async<2>(At::decode_pieces_landed);
            read_staged<I, I::kV>(shared, (stage + 1) % T::kStages, values);
        } else {
            load_pieces<I, true, T::kPiecesK>(p, block.kv_head, next, range.end, keys);
        }
        block.add_values(values, o);
        stage = (stage + 2) % T::kStages;
        tile = next;
    }
    block.write_state(p.first_slot + block_x(), m, l, o);
}

} // namespace paged_attn::gpu
