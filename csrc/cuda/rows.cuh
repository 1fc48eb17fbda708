// Reading rows of K and V: every data type in units of 8 values, 16 bytes of registers or shared memory each.
//
// A unit is what one thread takes at once. f16, bf16, q8_0: values 8u .. 8u+7. q4_0: values i .. i+3 and i+16 .. i+19
// of a block, which share four bytes. Blocks are 34 or 18 bytes, so every second one starts in the middle of a 4-byte
// word; `odd` blocks do when rows are 4-byte aligned, and whole words are read around them (never past the row's end,
// as such rows have an even number of blocks). Rows that are only 2-byte aligned are read by halves of words.
#pragma once
#include "port.cuh"
#include "problem.h"

namespace paged_attn::gpu {

enum RowType : int { kF16 = 1, kBf16 = 2, kQ8 = 3, kQ4 = 4 }; // pa_dtype's values

constexpr bool is_blocked(RowType t) { return t == kQ8 || t == kQ4; }

struct alignas(16) Piece {
    unsigned w[4];
};
struct alignas(16) Float4 {
    float x, y, z, w;
};

PA_DEVICE unsigned divide(unsigned i, const Divisor &by) { return (multiply_high(i, by.multiplier) + i) >> by.shift; }

PA_DEVICE const char *row_address(const Rows &rows, int cell, int head) {
    const unsigned page = divide(static_cast<unsigned>(cell), rows.page_cells);
    const unsigned within = static_cast<unsigned>(cell) - page * rows.page_cells.n;
    return load_rows(rows.pages + page) + within * rows.cell_stride + head * rows.head_stride;
}

// The row of a cell of the tile that begins at `tile`, whose own row is `first`. Where `whole`, the tile lies in one page
// and nothing is looked up.
PA_DEVICE const char *tile_row(const Rows &rows, int head, int tile, const char *first, bool whole, int cell) {
    return whole ? first + (cell - tile) * rows.cell_stride : row_address(rows, cell, head);
}
// True: pages hold whole splits, and so whole tiles.
PA_DEVICE bool whole_tiles(const Rows &rows) { return rows.page_cells.n % kSplitCells == 0; }

// The first of the four values that half 0 or 1 of a unit holds.
template <RowType T> PA_DEVICE int unit_value(int unit, int half) {
    if constexpr (T == kQ4) return unit / 4 * 32 + unit % 4 * 4 + half * 16;
    return unit * 8 + half * 4;
}

// Where the words of a blocked unit lie, from the row's start: the word with the scale, then the word with the first
// value; `odd`: the scale in the upper half of its word, and the values on a word's border.
struct BlockedUnit {
    int scale, values;
    int odd;
};
template <RowType T> PA_DEVICE BlockedUnit blocked_unit(int unit) {
    constexpr int kBlock = T == kQ8 ? 34 : 18, kBytes = T == kQ8 ? 8 : 4;
    const int block = unit / 4, odd = block & 1;
    return {block * kBlock - 2 * odd, block * kBlock + 2 + unit % 4 * kBytes - 2 * (1 - odd), odd};
}

PA_DEVICE unsigned load_halves(const char *p) {
    const auto *h = reinterpret_cast<const unsigned short *>(p);
    return load_rows(h) | static_cast<unsigned>(load_rows(h + 1)) << 16;
}

// A unit's bytes into registers.
template <RowType T, int ALIGN> PA_DEVICE Piece load_unit(const char *row, int unit) {
    Piece p = {{0, 0, 0, 0}};
    if constexpr (!is_blocked(T)) {
        const auto x = load_rows(reinterpret_cast<const uint4 *>(row) + unit);
        return {{x.x, x.y, x.z, x.w}};
    } else {
        const BlockedUnit u = blocked_unit<T>(unit);
        if constexpr (ALIGN >= 4) {
            const auto *w = reinterpret_cast<const unsigned *>(row + u.values);
            p.w[0] = load_rows(reinterpret_cast<const unsigned *>(row + u.scale));
            p.w[1] = load_rows(w);
            p.w[2] = load_rows(T == kQ8 ? w + 1 : w + 1 - u.odd);
            if constexpr (T == kQ8) p.w[3] = load_rows(w + 2 - u.odd);
        } else { // as if the block were odd
            const char *values = row + u.values + 2 * (1 - u.odd);
            p.w[0] =
                static_cast<unsigned>(load_rows(reinterpret_cast<const unsigned short *>(row + u.scale + 2 * u.odd)))
                << 16;
            p.w[1] = load_halves(values);
            if constexpr (T == kQ8) p.w[2] = load_halves(values + 4);
        }
        return p;
    }
}

// The same into shared memory, to land later. Not valid: zeros land.
template <RowType T> PA_DEVICE void copy_unit(Piece *to, const char *row, int unit, bool valid) {
    if constexpr (!is_blocked(T)) {
        copy_async<16>(to, row + unit * 16, valid);
    } else {
        const BlockedUnit u = blocked_unit<T>(unit);
        copy_async<4>(&to->w[0], row + u.scale, valid);
        copy_async<4>(&to->w[1], row + u.values, valid);
        copy_async<4>(&to->w[2], row + u.values + (T == kQ8 ? 4 : 4 - 4 * u.odd), valid);
        if constexpr (T == kQ8) copy_async<4>(&to->w[3], row + u.values + 8 - 4 * u.odd, valid);
    }
}

PA_DEVICE unsigned shift_pair(unsigned low, unsigned high, int bits) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> bits);
}

// A byte 0..255 as a float without the slow conversion: 2^23 + byte is a float whose last bits are the byte.
PA_DEVICE float byte_plus_magic(unsigned word, int i) { return as_float(0x4B000000u | ((word >> (8 * i)) & 0xFFu)); }
constexpr float kMagic = 8388608.0f;

// The unit's values, to be multiplied by what is returned (1 where the type has no scale).
template <RowType T, int ALIGN> PA_DEVICE float unpack(const Piece &p, int unit, float (&x)[8]) {
    if constexpr (T == kF16) {
        for (int i = 0; i < 4; i++) {
            x[2 * i] = f16_to_f32(static_cast<unsigned short>(p.w[i] & 0xFFFFu));
            x[2 * i + 1] = f16_to_f32(static_cast<unsigned short>(p.w[i] >> 16));
        }
        return 1.0f;
    } else if constexpr (T == kBf16) {
        for (int i = 0; i < 4; i++) {
            x[2 * i] = as_float(p.w[i] << 16);
            x[2 * i + 1] = as_float(p.w[i] & 0xFFFF0000u);
        }
        return 1.0f;
    } else {
        const int odd = ALIGN >= 4 ? blocked_unit<T>(unit).odd : 1;
        const float scale = f16_to_f32(static_cast<unsigned short>(p.w[0] >> (16 * odd)));
        const int misaligned = 16 * (1 - odd);
        if constexpr (T == kQ8) {
            const unsigned low = shift_pair(p.w[1], p.w[2], misaligned) ^ 0x80808080u;
            const unsigned high = (odd ? p.w[2] : shift_pair(p.w[2], p.w[3], 16)) ^ 0x80808080u;
            for (int i = 0; i < 4; i++) {
                x[i] = byte_plus_magic(low, i) - (kMagic + 128.0f);
                x[4 + i] = byte_plus_magic(high, i) - (kMagic + 128.0f);
            }
        } else {
            const unsigned nibbles = odd ? p.w[1] : shift_pair(p.w[1], p.w[2], 16);
            for (int i = 0; i < 4; i++) {
                x[i] = byte_plus_magic(nibbles & 0x0F0F0F0Fu, i) - (kMagic + 8.0f);
                x[4 + i] = byte_plus_magic(nibbles >> 4 & 0x0F0F0F0Fu, i) - (kMagic + 8.0f);
            }
        }
        return scale;
    }
}

} // namespace paged_attn::gpu
