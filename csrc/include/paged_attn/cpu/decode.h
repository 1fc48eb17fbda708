// Decode: few queries against many cells. One task = a chunk of live cells and a part of the K/V heads; it leaves one
// state (m, l, o) per query and head. A tile is kDecodeTile cells of all heads of the part, so the cache is read in the
// order it lies; all G heads of a group share each widened row.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "paged_attn/attn_state.h"
#include "paged_attn/cpu/work.h"

namespace paged_attn::cpu::PA_ISA {

constexpr float kRise = 16.0f; // the reference moves only when a logit is above it by more than this (base 2)

// Rows of the tile after this one, prefetched a row per step. Steps run over (head, cell) in the order of the tile,
// rows are handed out in the order of memory: cell by cell, head by head.
class Ahead {
  public:
    Ahead() = default; // nothing to fetch
    Ahead(const uint8_t *const *rows, int n, int heads, int64_t head_stride, int64_t bytes)
        : row_(rows), left_(n * heads), heads_(heads), stride_(head_stride), bytes_(bytes) {}
    void step() {
        if (left_ <= 0) return;
        const uint8_t *p = *row_ + head_ * stride_;
        for (int64_t i = 0; i < bytes_; i += 64) prefetch(p + i);
        left_--;
        if (++head_ == heads_) {
            head_ = 0;
            row_++;
        }
    }

  private:
    const uint8_t *const *row_ = nullptr;
    int left_ = 0, heads_ = 0, head_ = 0;
    int64_t stride_ = 0, bytes_ = 0;
};

// Heads of a group that are done together, so that each row is widened once for all of them.
constexpr int kHeads = 5;
// Rows of K, and vectors of a row of V, that G heads take at a time: their accumulators, one factor per head and one
// widened vector fit the registers.
template <int G> constexpr int kRowsOfK = kRegisters == 32 || G <= 3 ? 4 : 2;
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

// W values of a row, times their block's scale.
template <pa_dtype T> PA_INLINE Vec widened(const uint8_t *row, int d, Vec scale) {
    if constexpr (Row<T>::quantised) return vmul(scale, Row<T>::value(row, d));
    return Row<T>::value(row, d);
}

// a[k][g] = q[g] . row[k], still to be summed over the lanes.
template <pa_dtype T, int G, int K> PA_INLINE void dots(const float *q, int d, const uint8_t *const *row, Vec (*a)[G]) {
    constexpr int step = Row<T>::quantised ? kQuantBlock : W; // values that share a scale, or one vector
    PA_UNROLL
    for (int k = 0; k < K; k++)
        PA_UNROLL
        for (int g = 0; g < G; g++) a[k][g] = vzero();
    for (int i = 0; i < d; i += step) {
        Vec scale[K];
        PA_UNROLL
        for (int k = 0; k < K; k++) scale[k] = vset(Row<T>::scale(row[k], i));
        PA_UNROLL
        for (int j = i; j < i + step; j += W) {
            multiply_add<K, G>(
                a, [&](int k) { return widened<T>(row[k], j, scale[k]); }, [&](int g) { return vload(q + g * d + j); });
        }
    }
}

// s[g][k] = q[g] . K[k] for all kDecodeTile rows. q: [G][d] floats; rows: addresses of the first head's rows.
template <pa_dtype T, int G>
inline void scores(const float *q, int d, const uint8_t *const *rows, int64_t at, float (*s)[kDecodeTile], Ahead &next) {
    constexpr int K = kRowsOfK<G>;
    Ahead ahead = next; // a copy stays in registers
    for (int k0 = 0; k0 < kDecodeTile; k0 += W) {
        Vec folded[G][W / 4];
        for (int k1 = 0; k1 < W; k1 += 4) {
            Vec a[4][G];
            PA_UNROLL
            for (int k2 = 0; k2 < 4; k2 += K) {
                const uint8_t *row[K];
                PA_UNROLL
                for (int k = 0; k < K; k++) {
                    row[k] = rows[k0 + k1 + k2 + k] + at;
                    ahead.step();
                }
                dots<T, G, K>(q, d, row, a + k2);
            }
            PA_UNROLL
            for (int g = 0; g < G; g++) folded[g][k1 / 4] = vfold4(a[0][g], a[1][g], a[2][g], a[3][g]);
        }
        for (int g = 0; g < G; g++) vstore(s[g] + k0, vjoin(folded[g]));
    }
    next = ahead;
}

// cap * tanh(x / cap) with x and cap in base 2: cap * (1 - 2 / (1 + e^(2 x / cap))).
inline Vec soft_capped(Vec x, float cap2) {
    const Vec y = vmul(vset(2.0f * kLog2e / cap2), x);
    const Vec e = vexp2(vselect_gt(y, vset(60.0f), vset(60.0f), y)); // tanh is 1 long before 2^60
    return vmul(vset(cap2), vsub(vset(1.0f), vdiv(vset(2.0f), vadd(vset(1.0f), e))));
}

// G rows of logits: softcap, bias (null: none), reference, 2^(s - m) in place. shrink[g]: what the state so far is to be
// multiplied by. The rows go side by side: each alone is one long chain of dependent steps.
template <int G>
inline void soften(float (*s)[kDecodeTile], const float *bias, float cap2, float *m, float *l, float *shrink) {
    float highest[G];
    PA_UNROLL
    for (int g = 0; g < G; g++) {
        Vec top = vset(kHidden);
        for (int k = 0; k < kDecodeTile; k += W) {
            Vec x = vload(s[g] + k);
            if (cap2 != 0.0f) x = soft_capped(x, cap2);
            if (bias != nullptr) {
                const Vec b = vload(bias + k);
                x = vselect_gt(b, vset(kHiddenLimit), vadd(x, b), vset(kHidden));
            }
            if (cap2 != 0.0f || bias != nullptr) vstore(s[g] + k, x);
            top = vmax(x, top);
        }
        highest[g] = vmax_lane(top);
    }
    float reference[G];
    PA_UNROLL
    for (int g = 0; g < G; g++) {
        shrink[g] = 1.0f;
        if (__builtin_expect(highest[g] > kHiddenLimit && (m[g] == kEmptyM || highest[g] > m[g] + kRise), 0)) {
            shrink[g] = m[g] == kEmptyM ? 0.0f : exp2f(m[g] - highest[g]);
            m[g] = highest[g];
        }
        reference[g] = m[g] == kEmptyM ? 0.0f : m[g];
    }
    PA_UNROLL
    for (int g = 0; g < G; g++) {
        const Vec r = vset(reference[g]);
        Vec sum = vzero();
        for (int k = 0; k < kDecodeTile; k += W) {
            const Vec p = vexp2(vsub(vload(s[g] + k), r));
            sum = vadd(sum, p);
            vstore(s[g] + k, p);
        }
        l[g] = l[g] * shrink[g] + vsum(sum);
    }
}

// Scales of the rows of V, block by block: [d / 32][kDecodeTile]. Converted many at a time.
constexpr int kMaxBlocks = 1024 / kQuantBlock;
struct NoScales {
    static constexpr bool any = false;
    NoScales() = default;
    NoScales(const uint8_t *const *, int64_t, int) {}
};
template <pa_dtype T> struct Scales : NoScales {
    using NoScales::NoScales;
};
template <int BlockBytes> struct BlockScales {
    static constexpr bool any = true;
    alignas(64) float f[kMaxBlocks][kDecodeTile];
    BlockScales(const uint8_t *const *rows, int64_t at, int d) {
        alignas(64) uint16_t half[kDecodeTile];
        for (int b = 0; b < d / kQuantBlock; b++) {
            for (int k = 0; k < kDecodeTile; k++) std::memcpy(&half[k], rows[k] + at + b * BlockBytes, 2);
            for (int k = 0; k < kDecodeTile; k += W) vstore(f[b] + k, from_f16(half + k));
        }
    }
};
template <> struct Scales<PA_Q8_0> : BlockScales<34> {
    using BlockScales::BlockScales;
};
template <> struct Scales<PA_Q4_0> : BlockScales<18> {
    using BlockScales::BlockScales;
};

// o[g][d..d+C*W) = o * shrink[g] + sum over k < n of p[g][k] V[k].
template <pa_dtype T, int G, int C, class S>
inline void value_columns(const uint8_t *const *rows, int64_t at, int n, int d, const S &scales,
                          const float (*p)[kDecodeTile], const float *shrink, float *o, int d_v, Ahead &next) {
    // Whole rows are fetched at the pace at which they are used up, one per cell. Quantised ones, of a few lines, sooner:
    // the scales of all of a tile's rows are wanted first.
    const bool fetches = Row<T>::quantised || d == 0;
    Ahead ahead = fetches ? next : Ahead();
    Vec a[C][G];
    PA_UNROLL
    for (int c = 0; c < C; c++)
        PA_UNROLL
        for (int g = 0; g < G; g++) a[c][g] = vzero();
    for (int k = 0; k < n; k++) {
        multiply_add<C, G>(
            a,
            [&](int c) {
                const int at_d = d + c * W;
                const Vec v = Row<T>::value(rows[k] + at, at_d);
                if constexpr (S::any) return vmul(vset(scales.f[at_d / kQuantBlock][k]), v);
                return v;
            },
            [&](int g) { return vset(p[g][k]); });
        ahead.step();
    }
    PA_UNROLL
    for (int g = 0; g < G; g++) {
        const Vec f = vset(shrink[g]);
        PA_UNROLL
        for (int c = 0; c < C; c++) {
            float *to = o + g * d_v + d + c * W;
            vstore(to, vfma(f, vload(to), a[c][g]));
        }
    }
    if (fetches) next = ahead;
}

// Columns from `first` to `last` with C vectors at a time, then fewer.
template <pa_dtype T, int G, int C, class S>
inline void value_range(const uint8_t *const *rows, int64_t at, int n, int first, int last, const S &scales,
                        const float (*p)[kDecodeTile], const float *shrink, float *o, int d_v, Ahead &ahead) {
    int d = first;
    for (; d + C * W <= last; d += C * W) value_columns<T, G, C>(rows, at, n, d, scales, p, shrink, o, d_v, ahead);
    if constexpr (C > 1) {
        if (d < last) value_range<T, G, C / 2>(rows, at, n, d, last, scales, p, shrink, o, d_v, ahead);
    }
}

// A block's scale goes into p, G products for a block of 32 columns instead of one for each of its vectors, where the
// columns of one block make sums enough to keep the multiply-adds busy.
template <pa_dtype T, int G>
inline void values(const uint8_t *const *rows, int64_t at, int n, float (*p)[kDecodeTile], const float *shrink, float *o,
                   int d_v, Ahead &ahead) {
    constexpr int of_block = kQuantBlock / W;
    const Scales<T> scales(rows, at, d_v);
    if constexpr (Scales<T>::any && G * of_block >= 8) {
        for (int d = 0; d < d_v; d += kQuantBlock) {
            alignas(64) float scaled[G][kDecodeTile];
            PA_UNROLL
            for (int g = 0; g < G; g++)
                for (int k = 0; k < kDecodeTile; k += W)
                    vstore(scaled[g] + k, vmul(vload(p[g] + k), vload(scales.f[d / kQuantBlock] + k)));
            value_range<T, G, std::min(kVecsOfV<G>, of_block)>(rows, at, n, d, d + kQuantBlock, NoScales(), scaled, shrink,
                                                               o, d_v, ahead);
        }
    } else {
        value_range<T, G, kVecsOfV<G>>(rows, at, n, 0, d_v, scales, p, shrink, o, d_v, ahead);
    }
}

// A tile of cells as the kernels take it.
struct DecodeTile {
    const uint8_t *k[kDecodeTile], *v[kDecodeTile]; // first head's rows; the last one repeated when n < kDecodeTile
    int n;

    DecodeTile() = default;
    DecodeTile(const pa_args &a, const int32_t *cells, int count) : n(count) {
        for (int i = 0; i < kDecodeTile; i++) {
            const int32_t cell = cells[std::min(i, count - 1)];
            k[i] = cell_row(a.k, cell);
            v[i] = cell_row(a.v, cell);
        }
    }
};

// The cells of a tile that query q sees, with what the mask adds. Hidden ones are left out, not weighed with 0: what lies
// in them may be infinite.
struct SeenTile {
    DecodeTile tile;
    alignas(64) float bias[kDecodeTile];

    void select(const DecodeTile &all, const Mask &mask, int q, const int32_t *cells) {
        int n = 0;
        for (int i = 0; i < all.n; i++) {
            bias[n] = mask.bias2(q, cells[i]);
            tile.k[n] = all.k[i];
            tile.v[n] = all.v[i];
            n += bias[n] > kHiddenLimit;
        }
        tile.n = n;
        for (int i = n; i < kDecodeTile; i++) {
            bias[i] = kHidden;
            tile.k[i] = tile.k[n - 1];
            tile.v[i] = tile.v[n - 1];
        }
    }
};

// One group of G heads over one tile: (m, l, o) move on. q: [G][d_k], m, l: [G], o: [G][d_v].
template <int G>
inline void decode_group(const pa_shape &s, const pa_args &a, const DecodeTile &tile, int kv_head, const float *q,
                         const float *bias, float *m, float *l, float *o, Ahead &next_k, Ahead &next_v) {
    alignas(64) float p[G][kDecodeTile];
    float shrink[G];
    with_type(s.k_type, [&](auto t) { scores<t(), G>(q, s.d_k, tile.k, kv_head * a.k.head_stride, p, next_k); });
    const float cap2 = s.softcap * kLog2e;
    soften<G>(p, bias, cap2, m, l, shrink);
    with_type(s.v_type, [&](auto t) {
        values<t(), G>(tile.v, kv_head * a.v.head_stride, tile.n, p, shrink, o, s.d_v, next_v);
    });
}

using DecodeGroup = void (*)(const pa_shape &, const pa_args &, const DecodeTile &, int, const float *, const float *,
                             float *, float *, float *, Ahead &, Ahead &);

inline DecodeGroup decode_group_of(int heads) {
    static constexpr DecodeGroup of[kHeads] = {decode_group<1>, decode_group<2>, decode_group<3>, decode_group<4>,
                                               decode_group<5>};
    return of[heads - 1];
}

// Task `index` of cut.chunks * cut.parts: writes states of its chunk and heads for every query.
inline void decode_task(const pa_shape &s, const pa_args &a, const Shared &shared, const DecodeCut &cut, int index,
                        const States &states) {
    const int chunk = index / cut.parts, part = index % cut.parts;
    const int head0 = s.n_kv_head * part / cut.parts, head1 = s.n_kv_head * (part + 1) / cut.parts;
    const int group = s.n_head / s.n_kv_head, tiles = ceil_div(shared.n_live, kDecodeTile);
    const int begin = chunk * cut.chunk_cells, end = std::min(begin + cut.chunk_cells, shared.n_live);
    const Mask mask(a);
    for (int q = 0; q < a.n_q; q++)
        for (int h = head0 * group; h < head1 * group; h++) {
            const int row = q * s.n_head + h;
            *states.m_of(chunk, row) = kEmptyM;
            *states.l_of(chunk, row) = 0.0f;
            std::fill_n(states.o_of(chunk, row), s.d_v, 0.0f);
        }
    const int64_t k_bytes = row_bytes(s.k_type, s.d_k), v_bytes = row_bytes(s.v_type, s.d_v);
    DecodeTile tile(a, shared.live + begin, std::min(kDecodeTile, end - begin));
    for (int c = begin; c < end; c += kDecodeTile) {
        const int after = std::min(c + kDecodeTile, end);
        // The last tile of a chunk fetches the beginning of the next chunk; another thread may have it by then.
        const DecodeTile next(a, shared.live + std::min(after, shared.n_live - 1),
                              std::clamp(shared.n_live - after, 1, kDecodeTile));
        const int ahead = after < shared.n_live ? next.n : 0;
        const uint8_t *next_k[kDecodeTile], *next_v[kDecodeTile];
        for (int i = 0; i < kDecodeTile; i++) {
            next_k[i] = next.k[i] + head0 * a.k.head_stride;
            next_v[i] = next.v[i] + head0 * a.v.head_stride;
        }
        Ahead k_ahead(next_k, ahead, head1 - head0, a.k.head_stride, k_bytes);
        Ahead v_ahead(next_v, ahead, head1 - head0, a.v.head_stride, v_bytes);
        for (int q = 0; q < a.n_q; q++) {
            const View view = shared.views[q * tiles + c / kDecodeTile];
            if (view.kind == View::none) continue; // so at least one cell is seen
            const bool plain = view.kind == View::all && tile.n == kDecodeTile;
            SeenTile seen;
            if (!plain) seen.select(tile, mask, q, shared.live + c);
            const DecodeTile &these = plain ? tile : seen.tile;
            for (int kv = head0; kv < head1; kv++)
                for (int g = 0, wide; g < group; g += wide) { // in parts as equal as may be
                    wide = ceil_div(group - g, ceil_div(group - g, kHeads));
                    const int row = q * s.n_head + kv * group + g;
                    decode_group_of(wide)(s, a, these, kv, shared.q + int64_t{row} * s.d_k, plain ? nullptr : seen.bias, states.m_of(chunk, row),
                                          states.l_of(chunk, row), states.o_of(chunk, row), k_ahead, v_ahead);
                }
        }
        tile = next;
    }
}

} // namespace paged_attn::cpu::PA_ISA
