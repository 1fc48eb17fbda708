// Prefill: many queries. One task = one K/V head, a few panels of rows, a run of tiles of live cells.
//
// A row is query x head-of-the-group; rows run along the SIMD lanes everywhere: S^T = K Q^T, P^T = 2^(S^T - m),
// O^T += V^T P^T. So K and V are widened once per tile and never transposed, maximum, sum and rescaling are vertical, and
// both products are the same kTileRows x kTileVecs block of broadcasts against vectors. The reference m moves
// only when a logit rises above it by kRise: then O, l and the P of this tile are scaled (exact: the last division
// cancels any reference). Sums run over one tile at a time before they join the total: less rounding over 10^5 cells.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "paged_attn/attn_state.h"
#include "paged_attn/cpu/decode.h"
#include "paged_attn/cpu/work.h"

namespace paged_attn::cpu::PA_ISA {

// Q of the panel's rows, scaled by f, to qt; rows beyond the last are 0. rows8: room for 8 rows.
inline void load_panel(const pa_shape &s, const pa_args &a, int kv_head, float f, float *rows8, Panel &panel) {
    const int group = s.n_head / s.n_kv_head;
    const auto d = static_cast<size_t>(s.d_k);
    for (int b = 0; b < kPanel; b += 8) {
        for (int r = 0; r < 8; r++) {
            float *to = rows8 + static_cast<size_t>(r) * d;
            if (b + r >= panel.rows) {
                std::fill_n(to, d, 0.0f);
                continue;
            }
            const int row = panel.first_row + b + r;
            const auto *from = reinterpret_cast<const float *>(reinterpret_cast<const char *>(a.q) + row / group * a.q_stride +
                                                               (kv_head * group + row % group) * a.q_head_stride);
            for (size_t i = 0; i < d; i++) to[i] = from[i] * f;
        }
        for (size_t i = 0; i < d; i += 8) transpose8(rows8 + i, d, panel.qt + i * kPanel + b, kPanel);
    }
    std::fill_n(panel.ot, s.d_v * kPanel, 0.0f);
    std::fill_n(panel.neg_m, kPanel, 0.0f);
    std::fill_n(panel.l, kPanel, 0.0f);
    std::fill_n(panel.shrink, kPanel, 1.0f);
    std::fill_n(panel.limit, kPanel, kHiddenLimit); // the first logit sets the reference, however low it is
    panel.shrunk = false;
}

// The rare case: the block of logits at p[block ..] holds S - m, and some rise above the limit. Moves m, scales O, l and
// the P of this tile that lie before the block, and shifts the block.
inline __attribute__((noinline)) void raise_reference(Panel &panel, float *p, int block, float *l_tile) {
    for (int n = 0; n < kPanel; n += W) {
        Vec top = vload(p + block * kPanel + n);
        for (int r = 1; r < kTileRows; r++) top = vmax(vload(p + (block + r) * kPanel + n), top);
        const Vec limit = vload(panel.limit + n);
        const Vec rise = vselect_gt(top, limit, top, vzero());
        const Vec f = vselect_gt(rise, vzero(), vexp2(vsub(vzero(), rise)), vset(1.0f)); // 1: rows that stay keep their bits
        vstore(panel.neg_m + n, vsub(vload(panel.neg_m + n), rise));
        vstore(panel.limit + n, vselect_gt(top, limit, vset(kRise), limit));
        vstore(panel.l + n, vmul(vload(panel.l + n), f));
        vstore(panel.shrink + n, vmul(vload(panel.shrink + n), f));
        vstore(l_tile + n, vmul(vload(l_tile + n), f));
        for (int j = 0; j < block; j++) vstore(p + j * kPanel + n, vmul(vload(p + j * kPanel + n), f));
        for (int r = 0; r < kTileRows; r++) {
            float *at = p + (block + r) * kPanel + n;
            vstore(at, vsub(vload(at), rise));
        }
    }
    panel.shrunk = true;
}

// Values of d that a dot product sums before they join the rest. Logits of a thousand (peaked heads) are only as good as
// the sums they pass through: parts of 32 halve the error of one chain of 128, for 2 % of the time.
constexpr int kDotPart = 32;

// P^T of one panel over n keys (rounded up to kTileRows): p[j][kPanel] = 2^(K[j] . Q - m), l += their sum.
// bias: [keys][kPanel] in base 2, or null where every row sees every key.
template <int Stride, bool Softcap>
inline void score_tile(const float *k, int d, Panel &panel, float *p, int n, const float *bias, float cap2, Ahead &next_k,
                       Ahead &next_v, int ahead) {
    alignas(64) float l_tile[kPanel] = {};
    for (int block = 0; block < n; block += kTileRows) {
        for (int i = 0; i < ahead; i++) {
            next_k.step();
            next_v.step();
        }
        Vec a[kTileRows][kTileVecs];
        const float *key = k + block * Stride, *q = panel.qt;
        int i = 0;
        do {
            PA_UNROLL
            for (int c = 0; c < kTileVecs; c++)
                PA_UNROLL
                for (int r = 0; r < kTileRows; r++) a[r][c] = vzero();
            const bool first = i == 0;
            for (const int upto = std::min(i + kDotPart, d); i < upto; i++, key++, q += kPanel) {
                Vec qv[kTileVecs];
                PA_UNROLL
                for (int c = 0; c < kTileVecs; c++) qv[c] = vload(q + c * W);
                PA_UNROLL
                for (int r = 0; r < kTileRows; r++) {
                    const Vec kv = vset(key[r * Stride]);
                    PA_UNROLL
                    for (int c = 0; c < kTileVecs; c++) a[r][c] = vfma(kv, qv[c], a[r][c]);
                }
            }
            PA_UNROLL
            for (int r = 0; r < kTileRows; r++)
                PA_UNROLL
                for (int c = 0; c < kTileVecs; c++) {
                    float *sum = p + (block + r) * kPanel + c * W; // of the parts so far
                    if (!first) a[r][c] = vadd(vload(sum), a[r][c]);
                    if (i < d) vstore(sum, a[r][c]);
                }
        } while (i < d);
        PA_UNROLL
        for (int c = 0; c < kTileVecs; c++) {
            const Vec neg_m = vload(panel.neg_m + c * W);
            PA_UNROLL
            for (int r = 0; r < kTileRows; r++) {
                if constexpr (Softcap) a[r][c] = soft_capped(a[r][c], cap2);
                a[r][c] = vadd(a[r][c], neg_m); // last: sums that begin at -m lose the digits that a large m takes
            }
        }
        if (bias != nullptr) {
            PA_UNROLL
            for (int r = 0; r < kTileRows; r++)
                PA_UNROLL
                for (int c = 0; c < kTileVecs; c++) {
                    const Vec b = vload(bias + (block + r) * kPanel + c * W);
                    a[r][c] = vselect_gt(b, vset(kHiddenLimit), vadd(a[r][c], b), vset(kHidden));
                }
        }
        Vec above = vset(kHidden); // by how much the limit is passed, over all lanes
        PA_UNROLL
        for (int c = 0; c < kTileVecs; c++) {
            Vec top = a[0][c];
            PA_UNROLL
            for (int r = 1; r < kTileRows; r++) top = vmax(a[r][c], top);
            above = vmax(vsub(top, vload(panel.limit + c * W)), above);
        }
        if (__builtin_expect(vany_gt(above, vzero()), 0)) {
            PA_UNROLL
            for (int r = 0; r < kTileRows; r++)
                PA_UNROLL
                for (int c = 0; c < kTileVecs; c++) vstore(p + (block + r) * kPanel + c * W, a[r][c]);
            raise_reference(panel, p, block, l_tile);
            PA_UNROLL
            for (int r = 0; r < kTileRows; r++)
                PA_UNROLL
                for (int c = 0; c < kTileVecs; c++) a[r][c] = vload(p + (block + r) * kPanel + c * W);
        }
        PA_UNROLL
        for (int c = 0; c < kTileVecs; c++) {
            Vec l = vload(l_tile + c * W);
            PA_UNROLL
            for (int r = 0; r < kTileRows; r++) {
                const Vec e = vexp2(a[r][c]);
                l = vadd(l, e);
                vstore(p + (block + r) * kPanel + c * W, e);
            }
            vstore(l_tile + c * W, l);
        }
    }
    for (int c = 0; c < kPanel; c += W) vstore(panel.l + c, vadd(vload(panel.l + c), vload(l_tile + c)));
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

// What the mask adds for cells [first, last) of a tile and every row of the panel.
inline void load_bias(const Mask &mask, const Panel &panel, int group, const int32_t *cells, int first, int last,
                      int padded, float *bias) {
    for (int j = first; j < padded; j++) {
        float *to = bias + (j - first) * kPanel;
        if (j >= last) {
            std::fill_n(to, kPanel, kHidden);
            continue;
        }
        for (int r = 0; r < kPanel;) {
            const int row = panel.first_row + std::min(r, panel.rows - 1), q = row / group;
            const float b = mask.bias2(q, cells[j]);
            const int upto = r < panel.rows ? std::min((q + 1) * group - panel.first_row, kPanel) : kPanel;
            for (; r < upto; r++) to[r] = b;
        }
    }
}

// V of some cell is infinite or NaN (a model whose activations left f16 does that). Rows that see it get NaN, as they must;
// but 0 times infinity is NaN too, so its V is set to 0 lest it reach rows that do not see it: another conversation's, or
// earlier tokens.
inline __attribute__((noinline)) void contain_poison(const pa_shape &s, const Mask &mask, const int32_t *cells, int n,
                                                     PrefillScratch &scratch, Panel &panel, bool last) {
    const int group = s.n_head / s.n_kv_head;
    for (int j = 0; j < n; j++) {
        float *v = scratch.v + j * scratch.v_stride, sum = 0.0f;
        for (int d = 0; d < s.d_v; d++) sum += v[d] * 0.0f;
        if (sum == 0.0f) continue;
        for (int r = 0; r < panel.rows; r++)
            if (mask.bias2((panel.first_row + r) / group, cells[j]) > kHiddenLimit) panel.l[r] = NAN;
        if (last) std::fill_n(v, s.d_v, 0.0f);
    }
}

// Writes the panel's rows: the output, or states of `part` where states is given.
inline void store_panel(const pa_shape &s, const pa_args &a, int kv_head, Panel &panel, float *rows8, const States *states,
                        int part) {
    const int group = s.n_head / s.n_kv_head;
    const auto d = static_cast<size_t>(s.d_v);
    alignas(64) float f[kPanel];
    for (int r = 0; r < kPanel; r++) {
        const int row = panel.first_row + r, head = kv_head * group + row % group;
        const bool empty = panel.limit[r] == kHiddenLimit;
        const float m = empty ? kEmptyM : -panel.neg_m[r];
        float l = panel.l[r];
        f[r] = 1.0f;
        if (states == nullptr) {
            if (a.sinks != nullptr) merge_sink(f[r], l, m, a.sinks[head]);
            f[r] *= inverse_or_zero(l);
        } else if (r < panel.rows) {
            const int at = row / group * s.n_head + head;
            *states->m_of(part, at) = m;
            *states->l_of(part, at) = empty ? 0.0f : l;
        }
        if (empty) f[r] = 0.0f; // what hidden cells left behind
    }
    for (int n = 0; n < kPanel; n += W) {
        const Vec factor = vload(f + n);
        for (size_t i = 0; i < d; i++) {
            float *at = panel.ot + i * kPanel + n;
            vstore(at, vmul(factor, vload(at)));
        }
    }
    for (int b = 0; b < panel.rows; b += 8) {
        for (size_t i = 0; i < d; i += 8) transpose8(panel.ot + i * kPanel + b, kPanel, rows8 + i, d);
        for (int r = 0; r < 8 && b + r < panel.rows; r++) {
            const int row = panel.first_row + b + r, at = row / group * s.n_head + kv_head * group + row % group;
            float *to = states == nullptr ? a.out + static_cast<size_t>(at) * d : states->o_of(part, at);
            std::copy_n(rows8 + static_cast<size_t>(r) * d, d, to);
        }
    }
}

// Task `index` of n_kv_head * groups * splits. states: null when there is one split and the output is wanted.
inline void prefill_task(const pa_shape &s, const pa_args &a, const Shared &shared, const PrefillCut &cut, int index,
                         PrefillScratch &scratch, const States *states) {
    const int tile = tile_cells(s), tiles = ceil_div(shared.n_live, tile);
    const int kv_head = index % s.n_kv_head, split = index / s.n_kv_head % cut.splits;
    const int group_index = cut.groups - 1 - index / s.n_kv_head / cut.splits; // the last rows see most: they go first
    const int group = s.n_head / s.n_kv_head, rows = a.n_q * group;
    const int panel0 = group_index * cut.group_panels, n_panels = std::min(cut.group_panels, cut.panels - panel0);
    const Mask mask(a);
    const ScoreTile score = score_tile_of(scratch.k_stride, s.softcap != 0.0f);
    for (int i = 0; i < n_panels; i++) {
        Panel &panel = scratch.panel[i];
        panel.first_row = (panel0 + i) * kPanel;
        panel.rows = std::min(kPanel, rows - panel.first_row);
        load_panel(s, a, kv_head, s.scale * kLog2e, scratch.rows8, panel);
    }
    const int64_t k_at = kv_head * a.k.head_stride, v_at = kv_head * a.v.head_stride;
    const int64_t k_bytes = row_bytes(s.k_type, s.d_k), v_bytes = row_bytes(s.v_type, s.d_v);
    const int tile_end = std::min((split + 1) * cut.split_tiles, tiles);
    const auto sees = [&](int t) { // a panel of this task sees something of tile t
        for (int i = 0; i < n_panels; i++)
            if (shared.views[(panel0 + i) * tiles + t].kind != View::none) return true;
        return false;
    };
    const uint8_t *next_k[96], *next_v[96]; // tile_cells at most
    for (int t = split * cut.split_tiles; t < tile_end; t++) {
        if (!sees(t)) continue;
        const int32_t *cells = shared.live + t * tile;
        const int n = std::min(tile, shared.n_live - t * tile), padded = ceil_div(n, kTileRows) * kTileRows;
        Vec poison = vzero();
        with_type(s.k_type, [&](auto type) {
            for (int j = 0; j < n; j++)
                widen<type()>(cell_row(a.k, cells[j]) + k_at, s.d_k, scratch.k + j * scratch.k_stride, poison);
        });
        std::fill_n(scratch.k + n * scratch.k_stride, (padded - n) * scratch.k_stride, 0.0f);
        poison = vzero(); // a K that is not finite spoils only the logits of rows that see it
        with_type(s.v_type, [&](auto type) {
            for (int j = 0; j < n; j++)
                widen<type()>(cell_row(a.v, cells[j]) + v_at, s.d_v, scratch.v + j * scratch.v_stride, poison);
        });
        if (__builtin_expect(poisoned(poison), 0))
            for (int i = 0; i < n_panels; i++) contain_poison(s, mask, cells, n, scratch, scratch.panel[i], i + 1 == n_panels);
        const int n_next = t + 1 < tile_end && sees(t + 1) ? std::min(tile, shared.n_live - (t + 1) * tile) : 0;
        for (int j = 0; j < n_next; j++) {
            next_k[j] = cell_row(a.k, cells[tile + j]) + k_at;
            next_v[j] = cell_row(a.v, cells[tile + j]) + v_at;
        }
        Ahead k_ahead(next_k, n_next, 1, 0, k_bytes), v_ahead(next_v, n_next, 1, 0, v_bytes);
        const int steps = ceil_div(kTileRows, n_panels); // rows fetched per block, so that the panels share them out
        for (int i = 0; i < n_panels; i++) {
            Panel &panel = scratch.panel[i];
            const View view = shared.views[(panel0 + i) * tiles + t];
            if (view.kind == View::none) continue;
            const int first = view.first, keys = view.last - first, blocks = ceil_div(keys, kTileRows) * kTileRows;
            const bool biased = view.kind == View::some || blocks != keys;
            if (biased) load_bias(mask, panel, group, cells, first, view.last, first + blocks, scratch.bias);
            const float *k = scratch.k + first * scratch.k_stride, *v = scratch.v + first * scratch.v_stride;
            const float *bias = biased ? scratch.bias : nullptr;
            score(k, s.d_k, panel, scratch.p, keys, bias, s.softcap * kLog2e, k_ahead, v_ahead, steps);
            value_tile(v, scratch.v_stride, scratch.p, panel, s.d_v, keys);
        }
    }
    for (int i = 0; i < n_panels; i++) store_panel(s, a, kv_head, scratch.panel[i], scratch.rows8, states, split);
}

} // namespace paged_attn::cpu::PA_ISA
