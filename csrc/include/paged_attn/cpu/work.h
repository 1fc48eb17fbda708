// How one run is cut into tasks, and the scratch memory the tasks share. Everything here follows from the shape and from
// what the mask shows, never from the number of threads: that is why the bits do not depend on it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "paged_attn/cpu/mask.h"
#include "paged_attn/cpu/rows.h"

namespace paged_attn::cpu::PA_ISA {

constexpr int kPanel = kTileVecs * W;   // rows (query x head of the group) of a prefill panel, along the SIMD lanes
constexpr int kDecodeTile = 32;         // cells of a decode tile
constexpr int kDecodeQueries = 16;      // most queries the decode kernel is asked for
constexpr int kDecodeStates = 64;       // most partial states of one head over all queries and chunks
constexpr int kTasks = 32;              // tasks that states may be kept for, so that many cores find work
constexpr int kMaxPanels = 16;          // of one prefill task: they share a widened K/V tile
constexpr int kMinSplitTiles = 4;       // tiles of K/V below which a prefill is not split further

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Cells of a prefill tile: K, V and P together stay in the second-level cache beside the panels. A multiple of kTileRows.
inline int tile_cells(const pa_shape &s) {
    const int d = std::max(s.d_k, s.d_v);
    return d <= 128 ? 96 : d <= 256 ? 48 : 24;
}

// Floats from one widened row of K to the next: the smallest of these that holds d_k. The large ones are odd multiples of
// a line, so that rows do not fall into the same cache sets.
constexpr int kStrides[] = {64, 128, 208, 272, 592, 1040};
inline int key_stride(int d_k) {
    for (const int stride : kStrides)
        if (d_k <= stride) return stride;
    return 0; // unsupported() has refused it
}

struct DecodeCut {
    int chunk_cells, chunks; // chunks of live cells ...
    int parts;               // ... times parts of the K/V heads = tasks

    DecodeCut(const pa_shape &s, int n_q, int n_live) {
        const int most = std::max(kDecodeStates / n_q, kDecodeStates / kDecodeQueries);
        chunk_cells = std::max(2 * kDecodeTile, ceil_div(ceil_div(n_live, most), kDecodeTile) * kDecodeTile);
        chunks = ceil_div(n_live, chunk_cells);
        parts = std::clamp(kTasks / std::max(chunks, 1), 1, s.n_kv_head);
    }
};

struct PrefillCut {
    int panels;       // of one K/V head
    int group_panels; // panels of one task
    int groups;       // of one K/V head
    int splits;       // of the live cells, in whole tiles
    int split_tiles;

    // Which panels go together changes no bit, so it may follow the number of threads; the splits may not.
    PrefillCut(const pa_shape &s, int n_q, int n_live, int n_threads) {
        const int tiles = ceil_div(n_live, tile_cells(s));
        panels = ceil_div(n_q * (s.n_head / s.n_kv_head), kPanel);
        group_panels = kMaxPanels;
        while (group_panels > 1 && s.n_kv_head * ceil_div(panels, group_panels) < 4 * n_threads) group_panels /= 2;
        groups = ceil_div(panels, group_panels);
        splits = std::clamp(kTasks / (s.n_kv_head * panels), 1, std::max(tiles / kMinSplitTiles, 1));
        split_tiles = ceil_div(std::max(tiles, 1), splits);
        splits = ceil_div(std::max(tiles, 1), split_tiles);
    }
};

// Partial states, one per part and row; row = query * n_head + head.
struct States {
    float *m, *l, *o; // [parts][rows], [parts][rows], [parts][rows][d_v]
    int rows, d_v;

    float *m_of(int part, int row) const { return m + at(part, row); }
    float *l_of(int part, int row) const { return l + at(part, row); }
    float *o_of(int part, int row) const { return o + at(part, row) * d_v; }

  private:
    int64_t at(int part, int row) const { return int64_t{part} * rows + row; }
};

// What all threads see. `live`: the cells that some query sees, ascending; everything after works on these alone.
struct Shared {
    int n_live;
    bool decode;
    uint8_t *seen;  // [max_cells]
    int32_t *live;  // [max_cells]
    View *views;    // decode: [n_q][tiles of kDecodeTile]; prefill: [panels][tiles of tile_cells]
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
    float *qt;    // [d_k][kPanel] Q, scaled
    float *ot;    // [d_v][kPanel] sum 2^(s-m) v
    float *neg_m; // [kPanel] minus the reference
    float *l;     // [kPanel]
    float *shrink;// [kPanel] what ot is still to be multiplied by
    float *limit; // [kPanel] a logit above it moves the reference
    int first_row, rows; // of the head's n_q * group rows
    bool shrunk;
};

struct PrefillScratch {
    float *k, *v, *p, *bias, *rows8;
    Panel panel[kMaxPanels];
    int k_stride, v_stride; // floats

    PrefillScratch(const pa_shape &s, Carver &carver) {
        const auto tile = static_cast<size_t>(tile_cells(s) + kTileRows);
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
            one.neg_m = carver.take<float>(kPanel);
            one.l = carver.take<float>(kPanel);
            one.shrink = carver.take<float>(kPanel);
            one.limit = carver.take<float>(kPanel);
        }
    }
};

// Lays the shared scratch out; returns its whole size in bytes.
inline size_t carve(const pa_shape &s, int n_threads, void *base, Shared &shared) {
    Carver carver(base);
    carver.take<Shared>(1);
    const auto cells = static_cast<size_t>(s.max_cells);
    const auto head = static_cast<size_t>(s.n_head), d_k = static_cast<size_t>(s.d_k), d_v = static_cast<size_t>(s.d_v);
    const auto few = static_cast<size_t>(std::min(s.max_q, kDecodeQueries));
    const auto panels = static_cast<size_t>(ceil_div(s.max_q * (s.n_head / s.n_kv_head), kPanel));
    shared.seen = carver.take<uint8_t>(cells);
    shared.live = carver.take<int32_t>(cells + kDecodeTile);
    shared.views = carver.take<View>(std::max(few * (cells / kDecodeTile + 1),
                                              panels * (cells / static_cast<size_t>(tile_cells(s)) + 1)));
    shared.q = carver.take<float>(few * head * d_k);
    const size_t states = std::max(kDecodeStates * head, size_t{kTasks} * kPanel);
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
