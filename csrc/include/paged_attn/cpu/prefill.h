// Prefill: many queries. One task = one K/V head, a few panels of rows, all tiles of the live list or those of one chunk.
//
// A row is query x head-of-the-group; rows run along the SIMD lanes everywhere: S^T = K Q^T, P^T = 2^(S^T - m),
// O^T += V^T P^T. So K and V are widened once per tile and never transposed, maximum, sum and rescaling are vertical, and
// both products are the same block of broadcasts against vectors. Sums go as order.h says: a chunk's state joins those
// before it in a second O^T.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "paged_attn/attn_state.h"
#include "paged_attn/cpu/prefill_tile.h"
#include "paged_attn/cpu/work.h"

namespace paged_attn::cpu::PA_ISA {

// The panel's own state is empty.
inline void begin_chunk(const pa_shape &s, Panel &panel) {
    std::fill_n(panel.ot, s.d_v * kPanel, 0.0f);
    std::fill_n(panel.m, kPanel, 0.0f);
    std::fill_n(panel.l, kPanel, 0.0f);
    std::fill_n(panel.shrink, kPanel, 1.0f);
    std::fill_n(panel.limit, kPanel, kHiddenLimit); // the first logit sets the reference, however low it is
    panel.shrunk = panel.touched = false;
}

// Q of the panel's rows, scaled by f, to qt; rows beyond the last are 0. rows8: room for 8 rows.
inline void load_panel(const pa_shape &s, const pa_args &a, const int32_t *queries, int kv_head, float f, float *rows8,
                       Panel &panel) {
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
            const auto *from = reinterpret_cast<const float *>(reinterpret_cast<const char *>(a.q) + queries[row / group] * a.q_stride +
                                                               (kv_head * group + row % group) * a.q_head_stride);
            for (size_t i = 0; i < d; i++) to[i] = from[i] * f;
        }
        for (size_t i = 0; i < d; i += kDotChains)
            transpose8(rows8 + i, d, panel.qt + i / kDotChains * kPanel + b, d / kDotChains * kPanel);
    }
    begin_chunk(s, panel);
    panel.begun = false;
}
// The state of the chunk joins those before it (merge_row in run.h does the same), and a new one begins.
inline void close_chunk(const pa_shape &s, Panel &panel) {
    if (!panel.touched) return;
    for (int c = 0; c < kPanel; c += W) {
        const Vec none = vset(kHiddenLimit);
        const Vec here = vselect_gt(vload(panel.limit + c), none, vload(panel.m + c), vset(kHidden));
        if (!panel.begun) {
            vstore(panel.sum_m + c, here);
            vstore(panel.sum_l + c, vload(panel.l + c));
            continue;
        }
        const Vec before = vload(panel.sum_m + c), up = vmax(before, here);
        const Vec a = vselect_gt(before, none, vpower_of_two(vsub(before, up)), vzero());
        const Vec b = vselect_gt(here, none, vpower_of_two(vsub(here, up)), vzero());
        vstore(panel.sum_m + c, up);
        vstore(panel.sum_l + c, vfma(b, vload(panel.l + c), vmul(a, vload(panel.sum_l + c))));
        for (int d = 0; d < s.d_v; d++) {
            float *sum = panel.sum_o + d * kPanel + c;
            vstore(sum, vfma(b, vload(panel.ot + d * kPanel + c), vmul(a, vload(sum))));
        }
    }
    if (!panel.begun) std::swap(panel.ot, panel.sum_o);
    panel.begun = true;
    begin_chunk(s, panel);
}

// What the mask adds for cells [first, last) of a tile and every row of the panel.
inline void load_bias(const Mask &mask, const int32_t *queries, const Panel &panel, int group, const int32_t *cells, int first, int last,
                      int padded, float *bias) {
    for (int j = first; j < padded; j++) {
        float *to = bias + (j - first) * kPanel;
        if (j >= last) {
            std::fill_n(to, kPanel, kHidden);
            continue;
        }
        for (int r = 0; r < kPanel;) {
            const int row = panel.first_row + std::min(r, panel.rows - 1), q = row / group;
            const float b = mask.bias2(queries[q], cells[j]);
            const int upto = r < panel.rows ? std::min((q + 1) * group - panel.first_row, kPanel) : kPanel;
            for (; r < upto; r++) to[r] = b;
        }
    }
}

// V of some cell is infinite or NaN (a model whose activations left f16 does that). In such a column rows that see the cell
// get NaN, as they must; but 0 times infinity is NaN too, so it is set to 0 lest it reach rows that do not see it: another
// conversation's, or earlier tokens.
inline __attribute__((noinline)) void contain_poison(const pa_shape &s, const Mask &mask, const int32_t *queries,
                                                     const int32_t *cells, int n, PrefillScratch &scratch, int n_panels) {
    const int group = s.n_head / s.n_kv_head;
    for (int j = 0; j < n; j++) {
        float *v = scratch.v + j * scratch.v_stride;
        for (int d = 0; d < s.d_v; d++) {
            if (v[d] * 0.0f == 0.0f) continue;
            for (int i = 0; i < n_panels; i++)
                for (int r = 0; r < scratch.panel[i].rows; r++)
                    if (mask.bias2(queries[(scratch.panel[i].first_row + r) / group], cells[j]) > kHiddenLimit)
                        scratch.panel[i].ot[d * kPanel + r] = kNotANumber;
            v[d] = 0.0f;
        }
    }
}

// Writes the panel's rows: the output, or states of `part` where states is given.
inline void store_panel(const pa_shape &s, const pa_args &a, const Batch &batch, int kv_head, Panel &panel, float *rows8,
                        const States *states, int part) {
    const int group = s.n_head / s.n_kv_head;
    const auto d = static_cast<size_t>(s.d_v);
    const bool whole = states == nullptr; // not to be merged any more
    alignas(64) float f[kPanel];
    for (int r = 0; r < kPanel; r++) {
        const int row = panel.first_row + r, head = kv_head * group + row % group;
        const float m = panel.begun && panel.sum_m[r] > kHiddenLimit ? panel.sum_m[r] : kEmptyM;
        float l = panel.begun ? panel.sum_l[r] : 0.0f;
        f[r] = 1.0f;
        if (whole && a.out != nullptr) {
            if (a.sinks != nullptr) merge_sink(f[r], l, m, a.sinks[head]);
            f[r] *= inverse_or_zero(l);
        } else if (r < panel.rows) {
            const int at = (whole ? batch.queries[row / group] : row / group) * s.n_head + head;
            (whole ? a.state_m[at] : *states->m_of(part, at)) = m;
            (whole ? a.state_l[at] : *states->l_of(part, at)) = l;
        }
    }
    const float *o = panel.begun ? panel.sum_o : panel.ot;
    for (int b = 0; b < panel.rows; b += 8) {
        for (size_t i = 0; i < d; i += 8) transpose8(o + i * kPanel + b, kPanel, rows8 + i, d);
        for (int r = 0; r < 8 && b + r < panel.rows; r++) {
            const int row = panel.first_row + b + r, head = kv_head * group + row % group;
            const float *from = rows8 + static_cast<size_t>(r) * d;
            if (whole) {
                const int64_t at = int64_t{batch.queries[row / group]} * s.n_head + head;
                give(from, f[b + r], s.d_v, (a.out != nullptr ? a.out : a.state_o) + at * s.d_v);
            } else {
                std::copy_n(from, d, states->o_of(part, row / group * s.n_head + head));
            }
        }
    }
}

// Task `index` of n_kv_head * groups, or of as many for each chunk of the wave. states: null when the result is whole.
inline void prefill_task(const pa_shape &s, const pa_args &a, const Shared &shared, const Batch &batch, const PrefillCut &cut,
                         const Wave &wave, int index, PrefillScratch &scratch, const States *states) {
    const Live &live = batch.live;
    const int kv_head = index % s.n_kv_head, of_chunk = s.n_kv_head * cut.groups;
    const int chunk = states == nullptr ? 0 : index / of_chunk; // of the wave
    const int group_index = cut.groups - 1 - index % of_chunk / s.n_kv_head; // the last rows see most: they go first
    const int group = s.n_head / s.n_kv_head, rows = batch.n_q * group;
    const int panel0 = group_index * cut.group_panels, n_panels = std::min(cut.group_panels, cut.panels - panel0);
    const Mask mask(a);
    const ScoreTile score = score_tile_of(scratch.k_stride, s.softcap != 0.0f);
    for (int i = 0; i < n_panels; i++) {
        Panel &panel = scratch.panel[i];
        panel.first_row = (panel0 + i) * kPanel;
        panel.rows = std::min(kPanel, rows - panel.first_row);
        load_panel(s, a, batch.queries, kv_head, s.scale * kLog2e, scratch.rows8, panel);
    }
    const int64_t k_at = kv_head * a.k.head_stride, v_at = kv_head * a.v.head_stride;
    const int64_t k_bytes = row_bytes(s.k_type, s.d_k), v_bytes = row_bytes(s.v_type, s.d_v);
    const auto sees = [&](int t) { // a panel of this task sees something of tile t
        for (int i = 0; i < n_panels; i++)
            if (shared.views[(panel0 + i) * live.n_tiles + t].kind != View::none) return true;
        return false;
    };
    const uint8_t *next_k[kTile], *next_v[kTile];
    uint8_t place[kTile];
    const int end = states == nullptr ? live.n_tiles : live.chunks[wave.first + chunk + 1];
    for (int c = wave.first + chunk, t = live.chunks[c]; t < end; t++) {
        if (t == live.chunks[c + 1]) {
            for (int i = 0; i < n_panels; i++) close_chunk(s, scratch.panel[i]);
            c++;
        }
        if (!sees(t)) continue;
        const int32_t *cells = live.cells + live.tiles[t];
        const int n = live.cells_of(t), padded = ceil_div(n, kTileRows) * kTileRows;
        for (int j = 0; j < n; j++) place[j] = static_cast<uint8_t>(live.place(cells[j]) % kTile);
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
        if (__builtin_expect(poisoned(poison), 0)) contain_poison(s, mask, batch.queries, cells, n, scratch, n_panels);
        const int n_next = t + 1 < end && sees(t + 1) ? live.cells_of(t + 1) : 0;
        for (int j = 0; j < n_next; j++) {
            next_k[j] = cell_row(a.k, cells[n + j]) + k_at;
            next_v[j] = cell_row(a.v, cells[n + j]) + v_at;
        }
        Ahead k_ahead(next_k, n_next, 0, 1, 0, k_bytes), v_ahead(next_v, n_next, 0, 1, 0, v_bytes);
        const int steps = ceil_div(kTileRows, n_panels); // rows fetched per block, so that the panels share them out
        for (int i = 0; i < n_panels; i++) {
            Panel &panel = scratch.panel[i];
            const View view = shared.views[(panel0 + i) * live.n_tiles + t];
            if (view.kind == View::none) continue;
            const int first = view.first, keys = view.last - first, blocks = ceil_div(keys, kTileRows) * kTileRows;
            const bool biased = view.kind == View::some || blocks != keys;
            if (biased) load_bias(mask, batch.queries, panel, group, cells, first, view.last, first + blocks, scratch.bias);
            const float *k = scratch.k + first * scratch.k_stride, *v = scratch.v + first * scratch.v_stride;
            const float *bias = biased ? scratch.bias : nullptr;
            panel.touched = true;
            score(k, s.d_k, panel, scratch.p, keys, bias, s.softcap * kLog2e, k_ahead, v_ahead, steps);
            soften_tile(panel, scratch.p, keys, place + first);
            value_tile(v, scratch.v_stride, scratch.p, panel, s.d_v, keys);
        }
    }
    for (int i = 0; i < n_panels; i++) {
        close_chunk(s, scratch.panel[i]);
        store_panel(s, a, batch, kv_head, scratch.panel[i], scratch.rows8, states, chunk + 1);
    }
}

} // namespace paged_attn::cpu::PA_ISA
