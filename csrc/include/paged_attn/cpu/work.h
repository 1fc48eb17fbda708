// How one run is cut into tasks, and the scratch memory the tasks share. None of it changes a bit: borders of tiles and
// chunks are those of order.h, and each chunk has a state of its own whoever computes it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "paged_attn/cpu/live.h"
#include "paged_attn/cpu/mask.h"
#include "paged_attn/cpu/rows.h"

namespace paged_attn::cpu::PA_ISA {

constexpr int kPanel = kTileVecs * W;   // rows (query x head of the group) of a prefill panel, along the SIMD lanes
constexpr int kFewQueries = 16;         // most queries the decode kernel is asked for
constexpr int kFewStates = 80;          // states that are kept for each head of one query: chunks, and what they join
constexpr int kSplitStates = 2048;      // states that are kept for a prefill of few panels
constexpr int kMaxPanels = 16;          // of one prefill task: they share a widened K/V tile

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Floats from one widened row of K to the next: the smallest of these that holds d_k. The large ones are odd multiples of
// a line, so that rows do not fall into the same cache sets.
constexpr int kStrides[] = {64, 128, 208, 272, 592, 1040};
inline int key_stride(int d_k) {
    for (const int stride : kStrides)
        if (d_k <= stride) return stride;
    return 0; // unsupported() has refused it
}

// The queries of one group that are worked on together: queries[i] of the call, over all cells of `live`.
struct Batch {
    const Live &live;
    const int32_t *queries;
    int n_q;
};

// States kept at a time for `rows` rows.
inline int state_slots(const pa_shape &s, int rows) {
    return static_cast<int>(std::max(int64_t{kFewStates} * s.n_head, int64_t{kSplitStates}) / rows);
}

// Partial states, one per part and row; row = query of the batch * n_head + head.
struct States {
    float *m, *l, *o; // [parts][rows], [parts][rows], [parts][rows][d_v]
    int rows, d_v;

    float *m_of(int part, int row) const { return m + at(part, row); }
    float *l_of(int part, int row) const { return l + at(part, row); }
    float *o_of(int part, int row) const { return o + at(part, row) * d_v; }

  private:
    int64_t at(int part, int row) const { return int64_t{part} * rows + row; }
};

// Chunks [first, first + chunks) of the list; their states go to parts 1 .. chunks, and join part 0.
struct Wave {
    int first, chunks;
    int parts; // decode: parts of the K/V heads, which with the chunks make the tasks
};

struct PrefillCut {
    int panels;       // of one K/V head
    int group_panels; // panels of one task
    int groups;       // of one K/V head
    bool split;       // each chunk is a task: there are too few panels for the threads

    PrefillCut(const pa_shape &s, const Batch &batch, int n_threads) {
        panels = ceil_div(batch.n_q * (s.n_head / s.n_kv_head), kPanel);
        group_panels = kMaxPanels;
        while (group_panels > 1 && s.n_kv_head * ceil_div(panels, group_panels) < 4 * n_threads) group_panels /= 2;
        groups = ceil_div(panels, group_panels);
        split = n_threads > 1 && s.n_kv_head * groups < 2 * n_threads && batch.live.n_chunks > 1 &&
                state_slots(s, batch.n_q * s.n_head) > 2;
    }
};

// What all threads see; `live` is filled by the first.
struct Shared {
    Live live;
    LiveScratch finding;
    uint8_t *seen;  // [max_cells], and room for a word
    View *views;    // decode: [n_q][tiles]; prefill: [panels][tiles]
    size_t n_views;
    float *q;       // decode: [n_q][n_head][d_k], scaled
    float *partial; // states
    uint8_t *thread; // first thread's own scratch
    size_t thread_bytes;
};

// Hands out aligned pieces of one allocation; with a null base it only counts.
class Carver {
  public:
    explicit Carver(void *base) : base_(static_cast<uint8_t *>(base)) {}
    template <class T> T *take(size_t count) {
        T *p = base_ == nullptr ? nullptr : reinterpret_cast<T *>(base_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
    size_t used() const { return used_; }

  private:
    uint8_t *base_;
    size_t used_ = 0;
};

// One panel of a prefill task: kPanel rows, transposed.
struct Panel {
    float *qt;     // [kDotChains][d_k / kDotChains][kPanel] Q, scaled: chain by chain
    float *ot;     // [d_v][kPanel] sum 2^(s-m) v of this chunk
    float *m;      // [kPanel] the reference, 0 before the first
    float *l;      // [kPanel]
    float *top;    // [kPanel] the largest logit of this tile
    float *shrink; // [kPanel] what ot is still to be multiplied by
    float *limit;  // [kPanel] a logit above it moves the reference; kHiddenLimit: there is none
    float *sum_o, *sum_m, *sum_l; // the state over the chunks before this one; sum_m kHidden: empty
    int first_row, rows; // of the head's n_q * group rows
    bool shrunk;   // some value of `shrink` is not 1
    bool touched;  // this chunk has been begun
    bool begun;    // sum_* hold something
};

struct PrefillScratch {
    float *k, *v, *p, *bias, *rows8;
    Panel panel[kMaxPanels];
    int k_stride, v_stride; // floats

    PrefillScratch(const pa_shape &s, Carver &carver) {
        const auto tile = static_cast<size_t>(kTile + kTileRows);
        const auto d_k = static_cast<size_t>(s.d_k), d_v = static_cast<size_t>(s.d_v);
        k_stride = key_stride(s.d_k);
        v_stride = s.d_v + 16; // rows one after another would fall into the same cache sets
        k = carver.take<float>(tile * static_cast<size_t>(k_stride));
        v = carver.take<float>(tile * (d_v + 16));
        p = carver.take<float>(tile * kPanel);
        bias = carver.take<float>(tile * kPanel);
        rows8 = carver.take<float>(8 * std::max(d_k, d_v));
        for (Panel &one : panel) {
            one.qt = carver.take<float>(d_k * kPanel);
            one.ot = carver.take<float>(d_v * kPanel);
            one.sum_o = carver.take<float>(d_v * kPanel);
            for (float **each : {&one.m, &one.l, &one.top, &one.shrink, &one.limit, &one.sum_m, &one.sum_l})
                *each = carver.take<float>(kPanel);
        }
    }
};

// Lays the shared scratch out; returns its whole size in bytes.
inline size_t carve(const pa_shape &s, int n_threads, void *base, Shared &shared) {
    Carver carver(base);
    carver.take<Shared>(1);
    const auto cells = static_cast<size_t>(s.max_cells), queries = static_cast<size_t>(s.max_q);
    const auto head = static_cast<size_t>(s.n_head), d_k = static_cast<size_t>(s.d_k), d_v = static_cast<size_t>(s.d_v);
    const auto few = static_cast<size_t>(std::min(s.max_q, kFewQueries));
    const auto panels = static_cast<size_t>(ceil_div(s.max_q * (s.n_head / s.n_kv_head), kPanel));
    shared.seen = carver.take<uint8_t>(cells + 8);
    LiveScratch &finding = shared.finding;
    for (int32_t **each : {&shared.live.cells, &shared.live.tiles, &shared.live.chunks, &finding.fresh, &finding.spare})
        *each = carver.take<int32_t>(cells + 1);
    finding.in = carver.take<uint64_t>(cells / 64 + 1);
    for (int32_t **each : {&shared.live.queries, &finding.waiting, &finding.by_index, &finding.first, &finding.end})
        *each = carver.take<int32_t>(queries);
    // Tiles with holes are more than cells / kTile; then fewer queries are worked on at a time (run.h).
    const auto one = static_cast<size_t>(ceil_div(s.n_head / s.n_kv_head, kPanel)); // panels of a query
    shared.n_views = std::max(std::max(few, panels) * (cells / kTile + 1), one * (cells + 1));
    shared.views = carver.take<View>(shared.n_views);
    shared.q = carver.take<float>(few * head * d_k);
    const auto states = std::max(static_cast<size_t>(kFewStates) * head, static_cast<size_t>(kSplitStates));
    shared.partial = carver.take<float>(states * (d_v + 2) + 64);
    Carver own(nullptr);
    PrefillScratch scratch(s, own);
    shared.thread_bytes = own.used();
    shared.thread = carver.take<uint8_t>(shared.thread_bytes * static_cast<size_t>(n_threads));
    return carver.used();
}

inline States states_in(float *memory, int parts, int rows, int d_v) {
    const int64_t n = int64_t{parts} * rows;
    return {memory, memory + n, memory + 2 * n, rows, d_v};
}

} // namespace paged_attn::cpu::PA_ISA
