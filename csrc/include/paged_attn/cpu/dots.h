// Products of decode: rows of K with the heads of a group, each widened once for all of them, in the chains of order.h; and
// what both kernels share to keep vectors in registers and rows on their way.
#pragma once
#include <cstdint>

#include "paged_attn/cpu/rows.h"
#include "paged_attn/order.h"

namespace paged_attn::cpu::PA_ISA {

// What the tile after this one reads, prefetched a few lines per step, in the order of memory: cell by cell, head by head.
class Ahead {
  public:
    Ahead() = default; // nothing to fetch
    // Of n rows, `offset` bytes on: `heads` pieces of `bytes` bytes, `stride` bytes apart.
    Ahead(const uint8_t *const *rows, int n, int64_t offset, int heads, int64_t stride, int64_t bytes)
        : row_(rows), left_(n * heads), heads_(heads), offset_(offset), stride_(stride), bytes_(bytes) {
        if (stride == bytes) { // they are one
            left_ = n;
            heads_ = 1;
            bytes_ *= heads;
        }
        if (left_ > 0) begin();
    }
    PA_INLINE void step(int lines) {
        if (left_ <= 0) return;
        for (int i = 0; i < lines; i++) {
            prefetch(at_);
            at_ += kLine;
            if (__builtin_expect(at_ >= end_, 0) && !next()) return;
        }
    }
    PA_INLINE void piece() {
        if (left_ <= 0) return;
        for (; at_ < end_; at_ += kLine) prefetch(at_);
        next();
    }
    static constexpr int lines(int64_t bytes) { return static_cast<int>((bytes + kLine - 1) / kLine); }

  private:
    static constexpr int64_t kLine = 64;

    PA_INLINE void begin() {
        const uint8_t *piece = *row_ + offset_ + head_ * stride_;
        if (piece != end_) at_ = piece - reinterpret_cast<uintptr_t>(piece) % kLine; // else it goes on where the last one ends
        end_ = piece + bytes_;
    }
    PA_INLINE bool next() {
        if (--left_ == 0) return false;
        if (++head_ == heads_) {
            head_ = 0;
            row_++;
        }
        begin();
        return true;
    }

    const uint8_t *at_ = nullptr, *end_ = nullptr; // of the piece that is being fetched
    const uint8_t *const *row_ = nullptr;
    int left_ = 0, heads_ = 0, head_ = 0; // pieces; of a row; the one at hand
    int64_t offset_ = 0, stride_ = 0, bytes_ = 0;
};

// Heads of a group that are done together, so that each row is widened once for all of them.
constexpr int kHeads = 5;
// The rows of K are taken in units of two vectors of chains: four cells of 8 chains with 16 lanes, two with 8 lanes, and one
// with 4. Unit i of a block of W cells holds cells i, i + 4, ..., so that joining the chains leaves the cells in order.
constexpr int kUnitCells = W / 4, kUnits = 4;
// Units of K, and vectors of a row of V, that G heads take at a time: their accumulators, one factor per head and one
// widened vector fit the registers, and there are enough of them that none waits for another.
template <int G> constexpr int kUnitsOfK = G == 1 ? 4 : kRegisters == 32 || G <= 3 ? 2 : 1;
template <int G> constexpr int kVecsOfV = kRegisters == 32 ? (G <= 2 ? 8 : 4) : G == 1 ? 8 : G <= 3 ? 4 : 2;

// sums[n][g] += widened(n) * factor(g). The widened vectors are kept in registers if they fit there beside the sums, a
// factor and one that is on its way; else the factors.
template <int N, int G, class Widened, class Factor>
PA_INLINE void multiply_add(Vec (*sums)[G], Widened &&widened, Factor &&factor) {
    if constexpr (N * G + N + 2 <= kRegisters) {
        Vec kept[N];
        PA_UNROLL
        for (int n = 0; n < N; n++) kept[n] = widened(n);
        PA_UNROLL
        for (int g = 0; g < G; g++) {
            Vec f = factor(g);
            hold(f);
            PA_UNROLL
            for (int n = 0; n < N; n++) sums[n][g] = vfma(kept[n], f, sums[n][g]);
        }
    } else {
        Vec kept[G];
        PA_UNROLL
        for (int g = 0; g < G; g++) {
            kept[g] = factor(g);
            hold(kept[g]);
        }
        PA_UNROLL
        for (int n = 0; n < N; n++) {
            const Vec w = widened(n);
            PA_UNROLL
            for (int g = 0; g < G; g++) sums[n][g] = vfma(w, kept[g], sums[n][g]);
        }
    }
}

// Vector `part` of a unit at value d of its rows, `at` bytes on: 8 chains of one row or of two, or half of the chains of one.
// With it the scale of its block, and what it is multiplied by.
#if defined(PA_TWO_ROWS)
template <pa_dtype T> PA_INLINE Vec chains_of(const uint8_t *const *unit, int part, int64_t at, int d) {
    return Row<T>::both(unit[2 * part] + at, unit[2 * part + 1] + at, d);
}
template <pa_dtype T> PA_INLINE Vec scale_of(const uint8_t *const *unit, int part, int64_t at) {
    return two_set(Row<T>::scale(unit[2 * part] + at, 0), Row<T>::scale(unit[2 * part + 1] + at, 0));
}
PA_INLINE Vec factor_of(const float *q, int) { return two_same(q); }
#else
constexpr int kRowOfPart = W == 8 ? 1 : 0, kValueOfPart = W == 8 ? 0 : W;
template <pa_dtype T> PA_INLINE Vec chains_of(const uint8_t *const *unit, int part, int64_t at, int d) {
    return Row<T>::value(unit[kRowOfPart * part] + at, d + kValueOfPart * part);
}
template <pa_dtype T> PA_INLINE Vec scale_of(const uint8_t *const *unit, int part, int64_t at) {
    return vset(Row<T>::scale(unit[kRowOfPart * part] + at, 0));
}
PA_INLINE Vec factor_of(const float *q, int part) { return vload(q + kValueOfPart * part); }
#endif

// a[part * U + u][g]: the chains of q[g] . K for the rows of U units.
template <pa_dtype T, int G, int U>
PA_INLINE void dots(const float *q, int d, const uint8_t *const (*unit)[kUnitCells], Vec (*a)[G]) {
    constexpr int step = Row<T>::quantised ? kQuantBlock : W == 16 ? 2 * kDotChains : kDotChains; // values that share a scale, or unrolled
    constexpr int parts = W == 4 ? 2 : 1, n = 2 * U / parts;               // vectors that share a factor
    PA_UNROLL
    for (int v = 0; v < 2 * U; v++)
        PA_UNROLL
        for (int g = 0; g < G; g++) a[v][g] = vzero();
    int64_t at = 0;
    for (int i = 0; i < d; i += step, at += Row<T>::bytes(step)) {
        Vec scale[2 * U];
        if constexpr (Row<T>::quantised) {
            PA_UNROLL
            for (int v = 0; v < 2 * U; v++) scale[v] = scale_of<T>(unit[v % U], v / U, at);
        }
        PA_UNROLL
        for (int j = 0; j < step; j += kDotChains) // a constant: else each vector looks for its block
            PA_UNROLL
            for (int part = 0; part < parts; part++)
                multiply_add<n, G>(
                    a + part * n,
                    [&](int k) {
                        const int v = part * n + k;
                        const Vec value = chains_of<T>(unit[v % U], v / U, at, j);
                        if constexpr (Row<T>::quantised) return vmul(scale[v], value);
                        return value;
                    },
                    [&](int g) { return factor_of(q + g * d + i + j, part); });
    }
}

// s[g][k] = q[g] . K[k] for n rows, a multiple of W. q: [G][d] floats; rows: addresses of the first head's rows.
template <pa_dtype T, int G>
inline void scores(const float *q, int d, const uint8_t *const *rows, int n, int64_t at, float (*s)[kTile], Ahead &ahead) {
    constexpr int U = kUnitsOfK<G>;
    const int lines = Ahead::lines(U * kUnitCells * Row<T>::bytes(d));
    for (int k = 0; k < n; k += W) {
        Vec joined[G][kUnits];
        const auto units = [&](int first) PA_INLINE_LAMBDA {
            const uint8_t *unit[U][kUnitCells];
            PA_UNROLL
            for (int u = 0; u < U; u++)
                PA_UNROLL
                for (int c = 0; c < kUnitCells; c++) unit[u][c] = rows[k + first + u + kUnits * c] + at;
            ahead.step(lines);
            Vec a[2 * U][G];
            dots<T, G, U>(q, d, unit, a);
            PA_UNROLL
            for (int u = 0; u < U; u++)
                PA_UNROLL
                for (int g = 0; g < G; g++) joined[g][first + u] = vjoin_halves(a[u][g], a[U + u][g]);
        };
        if constexpr (kRegisters == 32) {
            PA_UNROLL
            for (int first = 0; first < kUnits; first += U) units(first);
        } else { // unrolled, too much of it leaves the registers
            for (int first = 0; first < kUnits; first += U) units(first);
        }
        PA_UNROLL
        for (int g = 0; g < G; g++) {
            const Vec *j = joined[g];
            vstore(s[g] + k, vjoin_neighbours(vjoin_neighbours(j[0], j[1]), vjoin_neighbours(j[2], j[3])));
        }
    }
}

// cap * tanh(x / cap) with x and cap in base 2: cap - 2 cap / (1 + 2^y), y = 2 x log2 e / cap.
inline Vec soft_capped(Vec x, float cap2) {
    Vec y = vmul(vset(2.0f * kLog2e / cap2), x);
    y = vselect_gt(y, vset(60.0f), vset(60.0f), y); // tanh is 1 long before 2^60
    hold(y);
    return vsub(vset(cap2), vdiv(vset(2.0f * cap2), vadd(vset(1.0f), vexp2_over(y, vzero()))));
}

} // namespace paged_attn::cpu::PA_ISA
