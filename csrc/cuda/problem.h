// What a kernel is told, by value: addresses, shapes, strides. Shared by the host and the device.
#pragma once

namespace paged_attn::gpu {

// i / n without a division, for 0 <= i < 2^31: (high half of i * multiplier + i) >> shift.
struct Divisor {
    unsigned n, multiplier, shift;
};

struct Rows {
    const char *const *pages; // [n_pages] device addresses
    Divisor page_cells;
    long long cell_stride, head_stride; // bytes
};

// Cells of 32 together: what can be seen of them at all. An empty range has low > high.
struct CellBounds {
    int low_pos, high_pos; // of the cells that are not empty
    int low_seq, high_seq; // likewise; 0, 0 where no sequences are given
    int n_empty;           // empty cells, and cells past the end
};
constexpr int kBoundsCells = 32;

struct Mask {
    const unsigned short *dense; // [n_q][n_cells] f16, or null
    long long dense_stride;      // bytes
    const int *cell_pos;         // [n_cells], or null
    const int *cell_seq;         // [n_cells], or null
    const int *query_pos;        // [n_q]
    const int *query_seq;        // [n_q], or null
    int window;                  // cells; 0: none
    const CellBounds *bounds;    // [ceil(n_cells / 32)]; given exactly when cell_pos is
};

// Attention states in slots. Slot s holds, f32: o [n_q * n_head][d_v], m [n_q * n_head], l [n_q * n_head].
struct Slots {
    float *base;
    long long stride; // floats from slot to slot; a multiple of 4
};

struct Problem {
    int n_q, n_cells, n_head, group;   // group: query heads per K/V head
    float score_scale;                 // multiplies q . k: scale * log2 e, or scale / softcap
    float cap_log2;                    // softcap * log2 e; 0: none
    const float *q;                    // [n_q][n_head][d_k] by the strides
    long long q_stride, q_head_stride; // bytes
    Rows k, v;
    Mask mask;
    Slots slots;
    int first_slot; // split x of the grid writes slot first_slot + x
    int n_splits;   // of the cells, at multiples of 64
    int accumulate; // 1: each split's state joins what its slot holds; 0: that is overwritten
};

struct Combination {
    Slots slots;
    int n_slots, n_rows, n_head; // rows: n_q * n_head
    const float *sinks;          // [n_head], or null
    float *out;                  // [n_rows][d_v]
};

// What an image was compiled for and how its kernels are launched; each image holds one, named pa_image.
struct ImageInfo {
    int version; // kImageVersion
    int arch;    // 52 .. 120
    int d_k, d_v, k_type, v_type, row_align;
    int decode_rows, decode_threads, decode_shared; // shared: bytes
    int narrow_rows, narrow_threads, narrow_shared; // 16 rows on tensor cores; rows 0: the image has none
    int wide_rows, wide_threads, wide_shared;
    int combine_threads, combine_shared;
    int most_cells; // of one split, for the bound on the error to hold; 0: any number
    int problem_bytes, combination_bytes, mask_bytes; // the kernels' arguments, as the image's compiler lays them out
};
constexpr int kImageVersion = 2;

// The cells of a split begin at multiples of this, and every tile is a part of it.
constexpr int kSplitCells = 64;

} // namespace paged_attn::gpu
