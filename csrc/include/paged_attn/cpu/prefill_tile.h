// One panel of prefill over one tile: logits, weights, values. Rows run along the SIMD lanes: S^T = K Q^T, P^T = 2^(S^T - m),
// O^T += V^T P^T; both products are the same kTileRows x kTileVecs block of broadcasts against vectors. Order: order.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "paged_attn/cpu/dots.h"
#include "paged_attn/cpu/work.h"

namespace paged_attn::cpu::PA_ISA {

constexpr int kJoinOrder[kDotChains] = {0, 4, 1, 5, 2, 6, 3, 7};

// S^T of one panel over n keys (rounded up to a block) to p[j][kPanel] in base 2, and each row's largest to panel.top. Chains
// c and c + 4 of R keys go side by side (L = 2) or one after the other (L = 1) and join as order.h says.
// bias: [keys][kPanel] in base 2, or null where every row sees every key.
template <int Stride, bool Softcap>
inline void score_tile(const float *k, int d, Panel &panel, float *p, int n, const float *bias, float cap2, Ahead &next_k,
                       Ahead &next_v, int ahead) {
    constexpr int L = kTileChains, R = kTileRows / L, C = kTileVecs;
    const int steps = d / kDotChains;
    Vec top[C];
    for (int c = 0; c < C; c++) top[c] = vset(kHidden);
    for (int block = 0; block < n; block += R) {
        if (block % kTileRows == 0)
            for (int i = 0; i < ahead; i++) {
                next_k.piece();
                next_v.piece();
            }
        Vec joined[3][R][C]; // two chains; four; the first four of all
        PA_UNROLL
        for (int pass = 0; pass < kDotChains / L; pass++) {
            Vec a[L][R][C];
            PA_UNROLL
            for (int h = 0; h < L; h++)
                PA_UNROLL
                for (int r = 0; r < R; r++)
                    PA_UNROLL
                    for (int c = 0; c < C; c++) a[h][r][c] = vzero();
            const float *key = k + block * Stride, *q = panel.qt;
            for (int i = 0; i < steps; i++, key += kDotChains, q += kPanel) {
                PA_UNROLL
                for (int h = 0; h < L; h++) {
                    const int chain = kJoinOrder[pass * L + h];
                    Vec qv[C];
                    PA_UNROLL
                    for (int c = 0; c < C; c++) qv[c] = vload(q + chain * steps * kPanel + c * W);
                    PA_UNROLL
                    for (int r = 0; r < R; r++) {
                        const Vec kv = vset(key[r * Stride + chain]);
                        PA_UNROLL
                        for (int c = 0; c < C; c++) a[h][r][c] = vfma(kv, qv[c], a[h][r][c]);
                    }
                }
            }
            PA_UNROLL
            for (int r = 0; r < R; r++)
                PA_UNROLL
                for (int c = 0; c < C; c++)
                    PA_UNROLL
                    for (int h = 0; h < L; h++) {
                        const int nth = pass * L + h;
                        Vec x = a[h][r][c];
                        if (nth % 2 == 1) x = vadd(joined[0][r][c], x);
                        if (nth % 4 == 3) x = vadd(joined[1][r][c], x);
                        if (nth < kDotChains - 1) {
                            joined[nth % 2 == 0 ? 0 : nth % 4 == 1 ? 1 : 2][r][c] = x;
                            continue;
                        }
                        x = vadd(joined[2][r][c], x);
                        if constexpr (Softcap) x = soft_capped(x, cap2);
                        if (bias != nullptr) {
                            const Vec b = vload(bias + (block + r) * kPanel + c * W);
                            x = vselect_gt(b, vset(kHiddenLimit), vadd(x, b), vset(kHidden));
                        }
                        vstore(p + (block + r) * kPanel + c * W, x);
                        top[c] = vmax(x, top[c]);
                    }
        }
    }
    for (int c = 0; c < C; c++) vstore(panel.top + c * W, top[c]);
}

// Moves the references of the lanes whose largest logit is above their limit: what was summed is scaled by a power of two.
inline __attribute__((noinline)) void raise_reference(Panel &panel, int lane) {
    const Vec top = vload(panel.top + lane), limit = vload(panel.limit + lane), m = vload(panel.m + lane);
    const Vec up = vceil(top);
    Vec f = vselect_gt(limit, vset(kHiddenLimit), vpower_of_two(vsub(m, up)), vzero()); // there was none: nothing yet
    f = vselect_gt(top, limit, f, vset(1.0f));
    vstore(panel.m + lane, vselect_gt(top, limit, up, m));
    vstore(panel.limit + lane, vselect_gt(top, limit, vadd(up, vset(kRise)), limit));
    vstore(panel.l + lane, vmul(vload(panel.l + lane), f));
    vstore(panel.shrink + lane, vmul(vload(panel.shrink + lane), f));
    panel.shrunk = true;
}

// Logits of n keys in p -> 2^(s - m), and the sums of a tile's weights to l. place: of each key in the tile.
inline void soften_tile(Panel &panel, float *p, int n, const uint8_t *place) {
    for (int c = 0; c < kPanel; c += W)
        if (__builtin_expect(vany_gt(vload(panel.top + c), vload(panel.limit + c)), 0)) raise_reference(panel, c);
    alignas(64) float chains[kWeightChains][kPanel];
    Vec m[kTileVecs];
    PA_UNROLL
    for (int c = 0; c < kTileVecs; c++) m[c] = vload(panel.m + c * W);
    if (n == kTile) { // key j has place j
        for (int i = 0; i < kWeightChains; i++)
            PA_UNROLL
            for (int c = 0; c < kTileVecs; c++) {
                Vec sum = vzero();
                PA_UNROLL
                for (int j = 0; j < kTile; j += kWeightChains) {
                    float *at = p + (i + j) * kPanel + c * W;
                    const Vec e = vexp2_over(vload(at), m[c]);
                    vstore(at, e);
                    sum = vadd(sum, e);
                }
                vstore(chains[i] + c * W, sum);
            }
    } else {
        std::fill_n(chains[0], kWeightChains * kPanel, 0.0f);
        for (int j = 0; j < n; j++, p += kPanel) {
            float *sum = chains[place[j] % kWeightChains];
            PA_UNROLL
            for (int c = 0; c < kTileVecs; c++) {
                const Vec e = vexp2_over(vload(p + c * W), m[c]);
                vstore(p + c * W, e);
                vstore(sum + c * W, vadd(vload(sum + c * W), e));
            }
        }
    }
    for (int c = 0; c < kPanel; c += W) {
        Vec sum[kWeightChains];
        PA_UNROLL
        for (int i = 0; i < kWeightChains; i++) sum[i] = vload(chains[i] + c);
        PA_UNROLL
        for (int half = kWeightChains / 2; half > 0; half /= 2)
            PA_UNROLL
            for (int i = 0; i < half; i++) sum[i] = vadd(sum[i], sum[i + half]);
        vstore(panel.l + c, vadd(vload(panel.l + c), sum[0]));
    }
}

using ScoreTile = void (*)(const float *, int, Panel &, float *, int, const float *, float, Ahead &, Ahead &, int);

// The stride is a constant in the code: with one in a register the block's twelve addresses cost more than its products.
inline ScoreTile score_tile_of(int stride, bool softcap) {
    switch (stride) {
    case kStrides[0]: return softcap ? score_tile<kStrides[0], true> : score_tile<kStrides[0], false>;
    case kStrides[1]: return softcap ? score_tile<kStrides[1], true> : score_tile<kStrides[1], false>;
    case kStrides[2]: return softcap ? score_tile<kStrides[2], true> : score_tile<kStrides[2], false>;
    case kStrides[3]: return softcap ? score_tile<kStrides[3], true> : score_tile<kStrides[3], false>;
    case kStrides[4]: return softcap ? score_tile<kStrides[4], true> : score_tile<kStrides[4], false>;
    default: return softcap ? score_tile<kStrides[5], true> : score_tile<kStrides[5], false>;
    }
}

// O^T[d .. d+R) = O^T * shrink + V^T P^T over n keys.
template <int R> inline void value_rows(const float *v, int v_stride, const float *p, Panel &panel, int d, int n) {
    Vec a[R][kTileVecs];
    PA_UNROLL
    for (int r = 0; r < R; r++)
        PA_UNROLL
        for (int c = 0; c < kTileVecs; c++) a[r][c] = vzero();
    const float *value = v + d;
    for (int j = 0; j < n; j++, p += kPanel, value += v_stride) {
        Vec pv[kTileVecs];
        PA_UNROLL
        for (int c = 0; c < kTileVecs; c++) pv[c] = vload(p + c * W);
        PA_UNROLL
        for (int r = 0; r < R; r++) {
            const Vec vv = vset(value[r]);
            PA_UNROLL
            for (int c = 0; c < kTileVecs; c++) a[r][c] = vfma(vv, pv[c], a[r][c]);
        }
    }
    float *o = panel.ot + d * kPanel;
    if (panel.shrunk) {
        PA_UNROLL
        for (int c = 0; c < kTileVecs; c++) {
            const Vec f = vload(panel.shrink + c * W);
            PA_UNROLL
            for (int r = 0; r < R; r++) {
                float *to = o + r * kPanel + c * W;
                vstore(to, vfma(f, vload(to), a[r][c]));
            }
        }
    } else {
        PA_UNROLL
        for (int r = 0; r < R; r++)
            PA_UNROLL
            for (int c = 0; c < kTileVecs; c++) {
                float *to = o + r * kPanel + c * W;
                vstore(to, vadd(vload(to), a[r][c]));
            }
    }
}

// O^T += V^T P^T for all of d_v, a multiple of 16: blocks of kTileRows rows of O^T, and what is left in two smaller ones
// or one, so that no block is so small that its additions wait for one another.
inline void value_tile(const float *v, int v_stride, const float *p, Panel &panel, int d_v, int n) {
    constexpr int R = kTileRows;
    static_assert(R == 6 || R == 12, "the rest below is that of a multiple of 16 divided by 6 or 12");
    constexpr int third = R / 3, small = R - third; // rest 2 or 4 of 6 (4 or 8 of 12): 6 + 2 = 4 + 4, 6 + 4 = 5 + 5
    const int rest = d_v % R;
    const bool lone = R == 12 && rest == 2 * third;
    const int whole = rest == 0 || lone ? d_v / R : d_v / R - 1;
    int d = 0;
    for (int i = 0; i < whole; i++, d += R) value_rows<R>(v, v_stride, p, panel, d, n);
    if (lone) {
        value_rows<small>(v, v_stride, p, panel, d, n);
    } else if (rest == third) {
        value_rows<small>(v, v_stride, p, panel, d, n);
        value_rows<small>(v, v_stride, p, panel, d + small, n);
    } else if (rest != 0) {
        value_rows<R - third / 2>(v, v_stride, p, panel, d, n);
        value_rows<R - third / 2>(v, v_stride, p, panel, d + R - third / 2, n);
    }
    if (panel.shrunk) std::fill_n(panel.shrink, kPanel, 1.0f);
    panel.shrunk = false;
}

} // namespace paged_attn::cpu::PA_ISA
