// K or V of a tile into a buffer of 16-bit values, for the kernels on tensor cores.
//
// All look-ups in the page table first, then all reads, so that none waits for another. 16-bit rows are copied
// asynchronously from sm_80 on; others pass through registers, where q8_0 and q4_0 become small integers.
#pragma once
#include "traits.h"
#include "visible.cuh"

namespace paged_attn::gpu {

constexpr int largest_divisor(int n, int most) {
    int d = most < n ? most : n;
    while (n % d != 0) d--;
    return d;
}

// A unit into a buffer; not valid: zeros.
template <bool KEYS, class Block>
PA_DEVICE void put_unit(Block &block, int buffer, int within, int unit, const Piece &read, bool valid) {
    constexpr RowType kType = KEYS ? Block::Of::kK : Block::Of::kV;
    const Piece piece = valid ? read : Piece{{0, 0, 0, 0}};
    if constexpr (!is_blocked(kType)) {
        store_shared(reinterpret_cast<Piece *>(block.cell_values(buffer, within, unit * 8)), piece);
    } else {
        float x[8];
        const float scale = unpack<kType, Block::Of::kAlign>(piece, unit, x);
        constexpr bool kBf16 = KEYS ? Block::kBf16K : Block::kBf16V;
        for (int half = 0; half < 2; half++) {
            auto *to = reinterpret_cast<unsigned *>(block.cell_values(buffer, within, unit_value<kType>(unit, half)));
            store_shared(to, pack_pair<kBf16>(x[4 * half], x[4 * half + 1]));
            store_shared(to + 1, pack_pair<kBf16>(x[4 * half + 2], x[4 * half + 3]));
        }
        if (unit % 4 == 0) store_shared(block.block_scale(buffer, unit / 4, within), valid ? scale : 0.0f);
    }
}

// Fills a buffer with the cells of `tile` .. ; V of empty cells and all cells past the end become zeros. Always one group
// of asynchronous copies.
template <bool KEYS, class Block> PA_DEVICE void fill_tile(Block &block, int buffer, int tile) {
    using T = typename Block::T;
    constexpr RowType kType = KEYS ? Block::Of::kK : Block::Of::kV;
    constexpr bool kCopies = KEYS ? T::kAsyncK : T::kAsyncV;
    constexpr int kUnits = (KEYS ? Block::Of::kDK : Block::Of::kDV) / 8, kAll = T::kTile * kUnits;
    constexpr int kEach = divide_up(kAll, T::kThreads), kTogether = largest_divisor(kEach, 8);
    constexpr bool kRagged = kAll % T::kThreads != 0;
    const Rows &from = KEYS ? block.p.k : block.p.v;
    if (tile < block.end) {
        const bool whole = whole_tiles(from);
        const char *tile_first = row_address(from, tile, block.kv_head);
#pragma unroll 1
        for (int first = 0; first < kEach; first += kTogether) {
            const char *rows[kTogether];
            bool valid[kTogether];
            Piece pieces[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; i++) {
                const int at = (first + i) * T::kThreads + thread_index(), cell = tile + at / kUnits;
                valid[i] = (!kRagged || at < kAll) && cell < block.end && (KEYS || holds_values(block.p.mask, cell));
                rows[i] = tile_row(from, block.kv_head, tile, tile_first, whole, valid[i] ? cell : tile);
            }
#pragma unroll
            for (int i = 0; i < kTogether; i++) {
                const int at = (first + i) * T::kThreads + thread_index(), unit = at % kUnits;
                if (kRagged && at >= kAll) continue;
                if constexpr (kCopies)
                    copy_async<16>(block.cell_values(buffer, at / kUnits, unit * 8), rows[i] + unit * 16, valid[i]);
                else pieces[i] = load_unit<kType, Block::Of::kAlign>(rows[i], unit);
            }
            if constexpr (!kCopies) {
#pragma unroll
                for (int i = 0; i < kTogether; i++) {
                    const int at = (first + i) * T::kThreads + thread_index();
                    if (kRagged && at >= kAll) continue;
                    put_unit<KEYS>(block, buffer, at / kUnits, at % kUnits, pieces[i], valid[i]);
                }
            }
        }
    }
    commit_async();
}

} // namespace paged_attn::gpu
