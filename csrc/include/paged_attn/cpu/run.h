// The course of one run: find the live cells, see what each group of queries sees, do the tasks, merge.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "paged_attn/attn_state.h"
#include "paged_attn/cpu/decode.h"
#include "paged_attn/cpu/prefill.h"
#include "paged_attn/cpu/team.h"
#include "paged_attn/cpu/work.h"

namespace paged_attn::cpu::PA_ISA {

inline const char *unsupported(const pa_shape &s) {
    const auto known = [](pa_dtype t) { return t >= PA_F32 && t <= PA_Q4_0; };
    const auto step = [](pa_dtype t) { return t == PA_Q8_0 || t == PA_Q4_0 ? kQuantBlock : 16; };
    if (s.n_head <= 0 || s.n_kv_head <= 0 || s.n_head % s.n_kv_head != 0)
        return "the query heads are not a multiple of the K/V heads";
    if (!known(s.k_type) || !known(s.v_type)) return "a data type of K or V that no kernel here reads";
    if (s.d_k <= 0 || s.d_v <= 0 || s.d_k > 1024 || s.d_v > 1024) return "a head size outside 1 to 1024";
    if (s.d_k % step(s.k_type) != 0 || s.d_v % step(s.v_type) != 0)
        return "a head size that is no multiple of 16 (of 32 for q8_0 and q4_0)";
    return nullptr;
}

inline size_t scratch_bytes(const pa_shape &s, int n_threads) {
    Shared shared;
    return carve(s, n_threads, nullptr, shared);
}

// This thread's share of n items: [first, last).
struct Share {
    int first, last;
    Share(const Team &t, int n)
        : first(static_cast<int>(int64_t{n} * t.index / t.size)), last(static_cast<int>(int64_t{n} * (t.index + 1) / t.size)) {}
};

// A decode costs a query's own cells times (G + 1: the group's products and the widening) per K/V head; a prefill costs
// kPanel rows for every live cell, whoever sees it. Speculative batches and several slots fall on either side.
inline bool decode_is_cheaper(const pa_shape &s, const pa_args &a, const Shared &shared) {
    const int group = s.n_head / s.n_kv_head, tiles = ceil_div(shared.n_live, kDecodeTile);
    if (a.n_q > kDecodeQueries) return false;
    int64_t seen = 0;
    for (int i = 0; i < a.n_q * tiles; i++) seen += shared.views[i].kind != View::none;
    return seen * (group + 1) * 4 <= int64_t{tiles} * ceil_div(a.n_q * group, kPanel) * kPanel * 3;
}

// Rows [first, last) of the merged parts, in the order of the parts: to the output, or to the caller's state.
inline void merge_rows(const pa_shape &s, const pa_args &a, const States &states, int parts, int first, int last) {
    for (int row = first; row < last; row++) {
        float m = kEmptyM, l = 0.0f;
        for (int i = 0; i < parts; i++) m = std::max(m, *states.m_of(i, row));
        float *out = a.out != nullptr ? a.out + int64_t{row} * s.d_v : a.state_o + int64_t{row} * s.d_v;
        std::fill_n(out, s.d_v, 0.0f);
        for (int i = 0; i < parts && m != kEmptyM; i++) {
            const float w = exp2f(*states.m_of(i, row) - m);
            l += w * *states.l_of(i, row);
            const float *o = states.o_of(i, row);
            for (int d = 0; d < s.d_v; d += W) vstore(out + d, vfma(vset(w), vload(o + d), vload(out + d)));
        }
        if (a.out == nullptr) {
            a.state_m[row] = m;
            a.state_l[row] = l;
            continue;
        }
        float f = 1.0f;
        if (a.sinks != nullptr) merge_sink(f, l, m, a.sinks[row % s.n_head]);
        f *= inverse_or_zero(l);
        for (int d = 0; d < s.d_v; d += W) vstore(out + d, vmul(vset(f), vload(out + d)));
    }
}

inline void find_live(const pa_args &a, Shared &shared) {
    int n = 0;
    for (int32_t c = 0; c < a.n_cells; c++) {
        shared.live[n] = c;
        n += shared.seen[c];
    }
    shared.n_live = n;
}

inline void run(const pa_shape &s, const pa_args &a, void *scratch, const Team &team) {
    const FlushDenormals flush;
    Shared here; // the same in every thread but for n_live and decode, which thread 0 leaves in `all`
    carve(s, team.size, scratch, here);
    Shared &all = *static_cast<Shared *>(scratch);
    const Mask mask(a);

    const Share cells(team, a.n_cells);
    std::fill(here.seen + cells.first, here.seen + cells.last, uint8_t{0});
    mask.seen_by_any(cells.first, cells.last, here.seen + cells.first);
    team.barrier(team.self);

    if (team.index == 0) {
        find_live(a, here);
        all.n_live = here.n_live;
        team.restart(team.self);
    }
    team.barrier(team.self);
    here.n_live = all.n_live;

    const bool few = a.n_q <= kDecodeQueries;
    if (few) {
        const int tiles = ceil_div(here.n_live, kDecodeTile);
        const Share share(team, tiles);
        for (int q = 0; q < a.n_q; q++)
            for (int t = share.first; t < share.last; t++)
                here.views[q * tiles + t] = mask.view(q, q + 1, here.live + t * kDecodeTile,
                                                      std::min(kDecodeTile, here.n_live - t * kDecodeTile));
        team.barrier(team.self);
        if (team.index == 0) all.decode = decode_is_cheaper(s, a, here);
        team.barrier(team.self);
    }
    here.decode = few && all.decode;

    const int rows = a.n_q * s.n_head;
    const States own{a.state_m, a.state_l, a.state_o, rows, s.d_v};
    if (here.decode) {
        const Share share(team, rows);
        for (int row = share.first; row < share.last; row++) {
            const auto *q = reinterpret_cast<const float *>(reinterpret_cast<const char *>(a.q) + row / s.n_head * a.q_stride +
                                                            row % s.n_head * a.q_head_stride);
            for (int d = 0; d < s.d_k; d++) here.q[int64_t{row} * s.d_k + d] = q[d] * (s.scale * kLog2e);
        }
        team.barrier(team.self);
        const DecodeCut cut(s, a.n_q, here.n_live);
        const States states = states_in(here.partial, cut.chunks, rows, s.d_v);
        for (int i; (i = team.take(team.self)) < cut.chunks * cut.parts;) decode_task(s, a, here, cut, i, states);
        team.barrier(team.self);
        merge_rows(s, a, states, cut.chunks, share.first, share.last);
    } else {
        const PrefillCut cut(s, a.n_q, here.n_live, team.size);
        const int tile = tile_cells(s), tiles = ceil_div(here.n_live, tile), group = s.n_head / s.n_kv_head;
        const Share share(team, cut.panels);
        for (int p = share.first; p < share.last; p++) {
            const int q0 = p * kPanel / group, q1 = std::min(((p + 1) * kPanel - 1) / group + 1, a.n_q);
            for (int t = 0; t < tiles; t++)
                here.views[p * tiles + t] = mask.view(q0, q1, here.live + t * tile, std::min(tile, here.n_live - t * tile));
        }
        team.barrier(team.self);
        Carver carver(here.thread + here.thread_bytes * static_cast<size_t>(team.index));
        PrefillScratch mine(s, carver);
        const States parts = states_in(here.partial, cut.splits, rows, s.d_v);
        const States *states = cut.splits > 1 ? &parts : a.out == nullptr ? &own : nullptr;
        for (int i; (i = team.take(team.self)) < s.n_kv_head * cut.groups * cut.splits;)
            prefill_task(s, a, here, cut, i, mine, states);
        if (cut.splits > 1) {
            team.barrier(team.self);
            const Share merged(team, rows);
            merge_rows(s, a, parts, cut.splits, merged.first, merged.last);
        }
    }
    team.barrier(team.self);
}

} // namespace paged_attn::cpu::PA_ISA
