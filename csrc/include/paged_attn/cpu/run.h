// The course of one run: find the live cells and the groups of queries, see what each query sees, do the tasks, merge.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

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
    constexpr int64_t most = int64_t{1} << 30; // rows and cells are counted in 32 bits
    if (s.max_q <= 0 || s.max_cells <= 0 || int64_t{s.max_q} * s.n_head > most || s.max_cells > most)
        return "more queries or cells than are counted here";
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
inline bool decode_is_cheaper(const pa_shape &s, const Batch &batch, const View *views) {
    const int group = s.n_head / s.n_kv_head, tiles = batch.live.n_tiles;
    int64_t seen = 0;
    for (int i = 0; i < batch.n_q * tiles; i++) seen += views[i].kind != View::none;
    return seen * (group + 1) * 4 <= int64_t{tiles} * ceil_div(batch.n_q * group, kPanel) * kPanel * 3;
}

// Parts 1 .. chunks of a row join part 0, in their order; close_chunk in prefill.h does the same. `first`: part 0 is empty.
inline void merge_row(const States &states, int chunks, int row, bool first) {
    float m = first ? kEmptyM : *states.m_of(0, row), l = first ? 0.0f : *states.l_of(0, row);
    float *o = states.o_of(0, row);
    if (first) std::fill_n(o, states.d_v, 0.0f);
    for (int i = 1; i <= chunks; i++) {
        const float here = *states.m_of(i, row), up = std::max(m, here);
        const float a = m == kEmptyM ? 0.0f : power_of_two(m - up), b = here == kEmptyM ? 0.0f : power_of_two(here - up);
        const float *its = states.o_of(i, row);
        m = up;
        l = __builtin_fmaf(b, *states.l_of(i, row), apart(a * l));
        for (int d = 0; d < states.d_v; d += W) vstore(o + d, vfma(vset(b), vload(its + d), vmul(vset(a), vload(o + d))));
    }
    *states.m_of(0, row) = m;
    *states.l_of(0, row) = l;
}

// A merged row: to the output, or to the caller's state.
inline void give_row(const pa_shape &s, const pa_args &a, const Batch &batch, const States &states, int row) {
    const int head = row % s.n_head, at = batch.queries[row / s.n_head] * s.n_head + head;
    const float m = *states.m_of(0, row);
    float l = *states.l_of(0, row), f = 1.0f;
    if (a.out != nullptr) {
        if (a.sinks != nullptr) merge_sink(f, l, m, a.sinks[head]);
        f *= inverse_or_zero(l);
    } else {
        a.state_m[at] = m;
        a.state_l[at] = l;
    }
    give(states.o_of(0, row), f, s.d_v, (a.out != nullptr ? a.out : a.state_o) + int64_t{at} * s.d_v);
}

// Chunks in waves of as many as states are kept for: `task` does one of `tasks_of(wave)`, then all rows are merged. A run's
// counter is at 0 before and after.
template <class TasksOf, class Task>
inline void run_waves(const pa_shape &s, const pa_args &a, const Shared &here, const Batch &batch, const Team &team,
                      TasksOf &&tasks_of, Task &&task) {
    const int rows = batch.n_q * s.n_head, n_chunks = batch.live.n_chunks;
    const int most = std::min(state_slots(s, rows) - 1, n_chunks);
    const States states = states_in(here.partial, most + 1, rows, s.d_v);
    const Share share(team, rows);
    int first = 0;
    do {
        Wave wave{first, std::min(most, n_chunks - first), 1};
        const int tasks = tasks_of(wave);
        for (int i; (i = team.take(team.self)) < tasks;) task(wave, i, states);
        team.barrier(team.self);
        for (int row = share.first; row < share.last; row++) {
            merge_row(states, wave.chunks, row, first == 0);
            if (first + wave.chunks >= n_chunks) give_row(s, a, batch, states, row);
        }
        if (team.index == 0) team.restart(team.self);
        team.barrier(team.self);
        first += wave.chunks;
    } while (first < n_chunks);
}

// The queries of a batch, scaled, one row after another; and what each sees of each tile.
inline void prepare_few(const pa_shape &s, const pa_args &a, const Shared &here, const Batch &batch, const Team &team) {
    const Mask mask(a);
    const Live &live = batch.live;
    const Share rows(team, batch.n_q * s.n_head), tiles(team, live.n_tiles);
    const float f = s.scale * kLog2e;
    for (int row = rows.first; row < rows.last; row++) {
        const auto *q = reinterpret_cast<const float *>(reinterpret_cast<const char *>(a.q) +
                                                        batch.queries[row / s.n_head] * a.q_stride +
                                                        row % s.n_head * a.q_head_stride);
        for (int d = 0; d < s.d_k; d++) here.q[int64_t{row} * s.d_k + d] = q[d] * f;
    }
    for (int q = 0; q < batch.n_q; q++)
        for (int t = tiles.first; t < tiles.last; t++)
            here.views[int64_t{q} * live.n_tiles + t] = mask.view(batch.queries + q, 1, live.cells + live.tiles[t], live.cells_of(t));
}

inline void run_prefill(const pa_shape &s, const pa_args &a, const Shared &here, const Batch &batch, const Team &team) {
    const Mask mask(a);
    const Live &live = batch.live;
    const PrefillCut cut(s, batch, team.size);
    const int group = s.n_head / s.n_kv_head;
    const Share share(team, live.n_tiles);
    for (int p = 0; p < cut.panels; p++) {
        const int q0 = p * kPanel / group, q1 = std::min(((p + 1) * kPanel - 1) / group + 1, batch.n_q);
        for (int t = share.first; t < share.last; t++)
            here.views[int64_t{p} * live.n_tiles + t] =
                mask.view(batch.queries + q0, q1 - q0, live.cells + live.tiles[t], live.cells_of(t));
    }
    team.barrier(team.self);
    Carver carver(here.thread + here.thread_bytes * static_cast<size_t>(team.index));
    PrefillScratch mine(s, carver);
    const int tasks = s.n_kv_head * cut.groups;
    if (cut.split) {
        run_waves(s, a, here, batch, team, [&](const Wave &wave) { return tasks * wave.chunks; },
                  [&](const Wave &wave, int i, const States &to) { prefill_task(s, a, here, batch, cut, wave, i, mine, &to); });
        return;
    }
    for (int i; (i = team.take(team.self)) < tasks;) prefill_task(s, a, here, batch, cut, Wave{0, 0, 1}, i, mine, nullptr);
    team.barrier(team.self);
    if (team.index == 0) team.restart(team.self);
    team.barrier(team.self);
}

// Some queries of one group. Which kernel runs, and how it is cut, changes no bit.
inline void run_batch(const pa_shape &s, const pa_args &a, const Shared &here, const Batch &batch, const Team &team) {
    if (batch.n_q <= kFewQueries) {
        prepare_few(s, a, here, batch, team);
        team.barrier(team.self);
        const bool decode = decode_is_cheaper(s, batch, here.views);
        if (decode) {
            run_waves(s, a, here, batch, team,
                      [&](Wave &wave) {
                          wave.parts = std::clamp(4 * team.size / std::max(wave.chunks, 1), 1, s.n_kv_head);
                          return wave.chunks * wave.parts;
                      },
                      [&](const Wave &wave, int i, const States &to) { decode_task(s, a, here, batch, wave, i, to); });
            return;
        }
        team.barrier(team.self); // the views are written anew
    }
    run_prefill(s, a, here, batch, team);
}

// The queries of a batch of a group with `tiles` tiles: as many as there is room for what they see of each.
inline int batch_queries(const pa_shape &s, size_t n_views, int n_q, int tiles) {
    const auto rows = static_cast<int64_t>(n_views) / std::max(tiles, 1);
    if (rows >= std::max<int64_t>(ceil_div(n_q * (s.n_head / s.n_kv_head), kPanel), std::min(n_q, kFewQueries))) return n_q;
    return static_cast<int>(std::max<int64_t>(std::min<int64_t>(rows, rows * kPanel / (s.n_head / s.n_kv_head)), 1));
}

inline void run(const pa_shape &s, const pa_args &a, void *scratch, const Team &team) {
    const FlushDenormals flush;
    Shared here; // the same in every thread but for `live`, which thread 0 leaves in `all`
    carve(s, team.size, scratch, here);
    Shared &all = *static_cast<Shared *>(scratch);
    const Mask mask(a);

    const Share cells(team, a.n_cells);
    std::fill(here.seen + cells.first, here.seen + cells.last, uint8_t{0});
    mask.seen_by_any(cells.first, cells.last, here.seen + cells.first);
    team.barrier(team.self);
    std::optional<Grouping> grouping;
    if (team.index == 0) grouping.emplace(a, here.seen, here.finding, here.live);
    do {
        if (team.index == 0) {
            grouping->next();
            all.live = here.live;
            team.restart(team.self);
        }
        team.barrier(team.self);
        here.live = all.live;
        const Live &live = here.live;
        const int most = batch_queries(s, here.n_views, live.n_q, live.n_tiles);
        for (int q = 0; q < live.n_q; q += most) run_batch(s, a, here, {live, live.queries + q, std::min(most, live.n_q - q)}, team);
    } while (!here.live.last);
}

} // namespace paged_attn::cpu::PA_ISA
