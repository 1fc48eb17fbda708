// Decode: few queries against many cells. One task = a chunk of the live list and a part of the K/V heads; it leaves one
// state (m, l, o) per query and head. A tile is taken for all heads of the part, so the cache is read in the order it lies;
// all G heads of a group share each widened row. Sums go as order.h says.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "paged_attn/attn_state.h"
#include "paged_attn/cpu/dots.h"
#include "paged_attn/cpu/work.h"

namespace paged_attn::cpu::PA_ISA {

// The sum of a tile's weights p [n], a multiple of 16, in kWeightChains. place: of each in the tile; null: it lies there.
inline float weight_sum(const float *p, int n, const uint8_t *place, int seen) {
    alignas(64) float lain[kTile];
    if (place != nullptr) {
        std::fill_n(lain, kTile, 0.0f);
        for (int k = 0; k < seen; k++) lain[place[k]] = p[k];
        p = lain;
        n = kTile;
    }
    constexpr int N = kWeightChains / W;
    Vec sum[N];
    PA_UNROLL
    for (int i = 0; i < N; i++) sum[i] = vload(p + i * W);
    for (int k = kWeightChains; k < n; k += kWeightChains)
        PA_UNROLL
        for (int i = 0; i < N; i++) sum[i] = vadd(sum[i], vload(p + k + i * W));
    PA_UNROLL
    for (int half = N / 2; half > 0; half /= 2)
        PA_UNROLL
        for (int i = 0; i < half; i++) sum[i] = vadd(sum[i], sum[i + half]);
    return vsum(sum[0]);
}

// Places that begin with those of the first chain and leave none out.
inline bool straight(const uint8_t *place, int n) { return place[0] % kWeightChains == 0 && place[n - 1] - place[0] == n - 1; }

// A tile of cells as the kernels take it.
struct DecodeTile {
    const uint8_t *k[kTile], *v[kTile]; // first head's rows; the last one repeated from n on
    int n;
    const uint8_t *place; // of each in the tile, or null: cell i has place i (mod kWeightChains)

    int padded() const { return ceil_div(n, kWeightChains) * kWeightChains; }
};

// G rows of logits: softcap, bias (null: none), reference, 2^(s - m) in place. shrink[g]: what the state so far is to be
// multiplied by. n: of logits, a multiple of 16. The rows go side by side: each alone is one long chain of dependent steps.
template <int G, class Count>
inline void soften(float (*s)[kTile], const DecodeTile &tile, Count n, const float *bias, float cap2, float *m, float *l,
                   float *shrink) {
    float highest[G];
    PA_UNROLL
    for (int g = 0; g < G; g++) {
        Vec top = vset(kHidden);
        for (int k = 0; k < n; k += W) {
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
            const float up = __builtin_ceilf(highest[g]);
            shrink[g] = m[g] == kEmptyM ? 0.0f : power_of_two(m[g] - up);
            m[g] = up;
        }
        reference[g] = m[g] == kEmptyM ? 0.0f : m[g];
    }
    PA_UNROLL
    for (int g = 0; g < G; g++) {
        const Vec r = vset(reference[g]);
        for (int k = 0; k < n; k += W) vstore(s[g] + k, vexp2_over(vload(s[g] + k), r));
        l[g] = __builtin_fmaf(l[g], shrink[g], weight_sum(s[g], n, tile.place, tile.n));
    }
}

// Scales of the rows of V, block by block: [d / 32][kTile]. Converted many at a time.
constexpr int kMaxBlocks = 1024 / kQuantBlock;
struct NoScales {
    static constexpr bool any = false;
    NoScales(const uint8_t *const *, int, int64_t, int) {}
};
template <pa_dtype T> struct Scales : NoScales {
    using NoScales::NoScales;
};
template <int BlockBytes> struct BlockScales {
    static constexpr bool any = true;
    alignas(64) float f[kMaxBlocks][kTile];
    BlockScales(const uint8_t *const *rows, int n, int64_t at, int d) {
        alignas(64) uint16_t half[kTile] = {};
        for (int b = 0; b < d / kQuantBlock; b++) {
            for (int k = 0; k < n; k++) std::memcpy(&half[k], rows[k] + at + b * BlockBytes, 2);
            for (int k = 0; k < n; k += W) vstore(f[b] + k, from_f16(half + k));
        }
    }
};
template <> struct Scales<PA_Q8_0> : BlockScales<34> {
    using BlockScales::BlockScales;
};
template <> struct Scales<PA_Q4_0> : BlockScales<18> {
    using BlockScales::BlockScales;
};

// o[g][d..d+C*W) = o * shrink[g] + sum over k < n of p[g][k] V[k]. The next tile's rows are fetched at the pace at which these
// are used up.
template <pa_dtype T, int G, int C, class S>
inline void value_columns(const uint8_t *const *rows, int64_t at, int n, int d, const S &scales,
                          const float (*p)[kTile], const float *shrink, float *o, int d_v, Ahead &ahead) {
    constexpr int columns = C * W, blocks = columns < kQuantBlock ? 1 : columns / kQuantBlock;
    const int in_block = Row<T>::quantised && columns < kQuantBlock ? d % kQuantBlock : 0;
    const int first_block = d / kQuantBlock;
    const int64_t from = at + Row<T>::bytes(d - in_block);
    Vec a[C][G];
    PA_UNROLL
    for (int c = 0; c < C; c++)
        PA_UNROLL
        for (int g = 0; g < G; g++) a[c][g] = vzero();
    for (int k = 0; k < n; k++) {
        const uint8_t *row = rows[k] + from;
        Vec scale[blocks]; // read once for the vectors of a block
        if constexpr (S::any) {
            PA_UNROLL
            for (int b = 0; b < blocks; b++) scale[b] = vset(scales.f[first_block + b][k]);
        }
        multiply_add<C, G>(
            a,
            [&](int c) {
                const Vec v = Row<T>::value(row, in_block + c * W);
                if constexpr (S::any) return vmul(scale[c * W / kQuantBlock], v);
                return v;
            },
            [&](int g) { return vset(p[g][k]); });
        ahead.step(Ahead::lines(std::max(Row<T>::bytes(columns), int64_t{1}))); // a block may be wider
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
}

// Columns from `first` to `last` with C vectors at a time, then fewer.
template <pa_dtype T, int G, int C, class S>
inline void value_range(const uint8_t *const *rows, int64_t at, int n, int first, int last, const S &scales,
                        const float (*p)[kTile], const float *shrink, float *o, int d_v, Ahead &ahead) {
    int d = first;
    for (; d + C * W <= last; d += C * W) value_columns<T, G, C>(rows, at, n, d, scales, p, shrink, o, d_v, ahead);
    if constexpr (C > 1) {
        if (d < last) value_range<T, G, C / 2>(rows, at, n, d, last, scales, p, shrink, o, d_v, ahead);
    }
}

// The cells of a tile that query q sees, with what the mask adds. Hidden ones are left out, not weighed with 0: what lies
// in them may be infinite. `place` follows them.
struct SeenTile {
    DecodeTile tile;
    alignas(64) float bias[kTile];
    uint8_t place[kTile];

    void select(const DecodeTile &all, const Mask &mask, int q, const int32_t *cells, const uint8_t *places) {
        int n = 0;
        for (int i = 0; i < all.n; i++) {
            bias[n] = mask.bias2(q, cells[i]);
            tile.k[n] = all.k[i];
            tile.v[n] = all.v[i];
            place[n] = places[i];
            n += bias[n] > kHiddenLimit;
        }
        tile.n = n;
        for (int i = n; i < tile.padded(); i++) {
            bias[i] = kHidden;
            tile.k[i] = tile.k[n - 1];
            tile.v[i] = tile.v[n - 1];
        }
        tile.place = straight(place, n) ? nullptr : place;
    }
};

// One group of G heads over one tile: (m, l, o) move on. q: [G][d_k], m, l: [G], o: [G][d_v].
template <int G>
inline void decode_group(const pa_shape &s, const pa_args &a, const DecodeTile &tile, int kv_head, const float *q,
                         const float *bias, float *m, float *l, float *o, Ahead &next_k, Ahead &next_v) {
    alignas(64) float p[G][kTile];
    float shrink[G];
    with_type(s.k_type, [&](auto t) {
        scores<t(), G>(q, s.d_k, tile.k, tile.padded(), kv_head * a.k.head_stride, p, next_k);
    });
    const float cap2 = s.softcap * kLog2e;
    if (tile.n == kTile) soften<G>(p, tile, std::integral_constant<int, kTile>(), bias, cap2, m, l, shrink); // mostly
    else soften<G>(p, tile, tile.padded(), bias, cap2, m, l, shrink);
    with_type(s.v_type, [&](auto t) {
        const int64_t at = kv_head * a.v.head_stride;
        const Scales<t()> scales(tile.v, tile.n, at, s.d_v);
        value_range<t(), G, kVecsOfV<G>>(tile.v, at, tile.n, 0, s.d_v, scales, p, shrink, o, s.d_v, next_v);
    });
}

using DecodeGroup = void (*)(const pa_shape &, const pa_args &, const DecodeTile &, int, const float *, const float *,
                             float *, float *, float *, Ahead &, Ahead &);

inline DecodeGroup decode_group_of(int heads) {
    static constexpr DecodeGroup of[kHeads] = {decode_group<1>, decode_group<2>, decode_group<3>, decode_group<4>,
                                               decode_group<5>};
    return of[heads - 1];
}

// The cells of tile t of the list, and their places in it.
inline void load_tile(const pa_args &a, const Live &live, int t, DecodeTile &tile, uint8_t *place) {
    const int32_t *cells = live.cells + live.tiles[t];
    const int n = tile.n = live.cells_of(t), first = live.place(cells[0]);
    if (live.place(cells[n - 1]) - first == n - 1) { // none is left out: places ascend
        for (int i = 0; i < n; i++) place[i] = static_cast<uint8_t>(first % kTile + i);
    } else {
        for (int i = 0; i < n; i++) place[i] = static_cast<uint8_t>(live.place(cells[i]) % kTile);
    }
    cell_rows(a.k, cells, n, tile.k);
    cell_rows(a.v, cells, n, tile.v);
    for (int i = n; i < tile.padded(); i++) {
        tile.k[i] = tile.k[n - 1];
        tile.v[i] = tile.v[n - 1];
    }
    tile.place = straight(place, n) ? nullptr : place;
}

// Task `index` of wave.chunks * wave.parts: writes states of its chunk and heads for every query.
inline void decode_task(const pa_shape &s, const pa_args &a, const Shared &shared, const Batch &batch, const Wave &wave,
                        int index, const States &states) {
    const Live &live = batch.live;
    const int chunk = index / wave.parts, part = index % wave.parts, to = chunk + 1;
    const int head0 = s.n_kv_head * part / wave.parts, head1 = s.n_kv_head * (part + 1) / wave.parts;
    const int group = s.n_head / s.n_kv_head;
    const int begin = live.chunks[wave.first + chunk], end = live.chunks[wave.first + chunk + 1];
    const Mask mask(a);
    for (int q = 0; q < batch.n_q; q++)
        for (int h = head0 * group; h < head1 * group; h++) {
            const int row = q * s.n_head + h;
            *states.m_of(to, row) = kEmptyM;
            *states.l_of(to, row) = 0.0f;
            std::fill_n(states.o_of(to, row), s.d_v, 0.0f);
        }
    const int64_t k_bytes = row_bytes(s.k_type, s.d_k), v_bytes = row_bytes(s.v_type, s.d_v);
    DecodeTile tiles[2];
    uint8_t places[2][kTile];
    load_tile(a, live, begin, tiles[begin % 2], places[begin % 2]);
    for (int t = begin; t < end; t++) {
        const DecodeTile &tile = tiles[t % 2];
        DecodeTile &next = tiles[(t + 1) % 2];
        const uint8_t *place = places[t % 2];
        int n_ahead = 0;
        if (t + 1 < live.n_tiles) { // the last of a chunk fetches the next one's first; another thread may have it by then
            load_tile(a, live, t + 1, next, places[(t + 1) % 2]);
            n_ahead = next.n;
        }
        Ahead k_ahead(next.k, n_ahead, head0 * a.k.head_stride, head1 - head0, a.k.head_stride, k_bytes);
        Ahead v_ahead(next.v, n_ahead, head0 * a.v.head_stride, head1 - head0, a.v.head_stride, v_bytes);
        for (int q = 0; q < batch.n_q; q++) {
            const View view = shared.views[q * live.n_tiles + t];
            if (view.kind == View::none) continue; // so at least one cell is seen
            const bool plain = view.kind == View::all && tile.n == tile.padded();
            SeenTile seen;
            if (!plain) seen.select(tile, mask, batch.queries[q], live.cells + live.tiles[t], place);
            const DecodeTile &these = plain ? tile : seen.tile;
            for (int kv = head0; kv < head1; kv++)
                for (int g = 0, wide; g < group; g += wide) { // in parts as equal as may be
                    wide = ceil_div(group - g, ceil_div(group - g, kHeads));
                    const int row = q * s.n_head + kv * group + g;
                    decode_group_of(wide)(s, a, these, kv, shared.q + int64_t{row} * s.d_k, plain ? nullptr : seen.bias,
                                          states.m_of(to, row), states.l_of(to, row), states.o_of(to, row), k_ahead, v_ahead);
                }
        }
    }
}

} // namespace paged_attn::cpu::PA_ISA
