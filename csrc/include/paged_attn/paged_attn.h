/* Exact attention over K/V that lies in pages: the C interface.
 *
 * Plan -> run. A plan fixes shapes, data types and options, and owns threads and scratch memory; a run
 * gives addresses. Nothing is allocated during a run. Every call answers a `pa_status`; the sentence that
 * belongs to it is `pa_last_error()` of the same thread. No C++ exception and no type of another library
 * crosses this border.
 *
 * Words. A *cell* is one position's place in the K/V cache; a *row* is the bytes of one cell, one head, K or
 * V; a *page* is `page_cells` consecutive cells that lie at one address. Attention of one query and one head:
 *     s[c] = softcap(scale * q . k[c]) + mask[c],   o = sum_c exp(s[c]) v[c] / (sum_c exp(s[c]) + exp(sink))
 * A query that sees no cell (and has no sink) gives 0.
 *
 * The attention *state* of a query and head over some of the cells is (m, l, o): m = a reference near the largest s in
 * base 2 (s * log2 e), l = sum 2^(s2 - m), o = sum 2^(s2 - m) v, not divided by l; the empty state is (-inf, 0, 0).
 * States over disjoint cells merge into the state over their union (attn_state.h).
 */
#ifndef PAGED_ATTN_H
#define PAGED_ATTN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define PA_API __declspec(dllexport)
#else
#define PA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PA_ABI_VERSION 2 /* counts changes of anything below */

typedef enum pa_status {
    PA_OK = 0,
    PA_BAD_ARGUMENT = 1,  /* shapes that disagree, null addresses, pages out of range */
    PA_UNSUPPORTED = 2,   /* a data type, head size or option that no kernel here serves */
    PA_OUT_OF_MEMORY = 3,
    PA_NO_DEVICE = 4,     /* no driver, a driver older than the code, no such GPU */
    PA_DEVICE_ERROR = 5,  /* the driver reported an error; the text names the call */
    PA_CANCELLED = 6,
} pa_status;

typedef enum pa_dtype {
    PA_F32 = 0,
    PA_F16 = 1,
    PA_BF16 = 2,
    PA_Q8_0 = 3, /* 32 values in 34 bytes: f16 scale, int8[32] (ggml's block_q8_0) */
    PA_Q4_0 = 4, /* 32 values in 18 bytes: f16 scale, nibbles: value i in the low half of byte i, i + 16 in the high */
} pa_dtype;

/* What a plan is made for. All counts > 0 unless said otherwise. */
typedef struct pa_shape {
    int32_t n_head;     /* query heads */
    int32_t n_kv_head;  /* K/V heads; divides n_head */
    int32_t d_k, d_v;   /* values per row of Q and K, of V; multiples of 16 (of 32 for q8_0, q4_0), at most 1024 */
    int32_t max_q;      /* most queries in one run */
    int32_t max_cells;  /* most cells in one run */
    pa_dtype k_type, v_type;
    float scale;        /* multiplies q . k; usually 1/sqrt(d_k) */
    float softcap;      /* 0: none; else s = softcap * tanh(s / softcap), before the mask */
} pa_shape;

/* Rows of K or of V. Cell c, head h lies at pages[c / page_cells] + (c % page_cells) * cell_stride + h * head_stride. */
typedef struct pa_rows {
    const void *const *pages; /* [n_pages] */
    int32_t n_pages;
    int32_t page_cells;
    int64_t cell_stride; /* bytes */
    int64_t head_stride; /* bytes */
} pa_rows;

/* Which cells a query sees. Either dense, or by position, or (all null) every cell. Beside a dense mask cell_pos alone may be
 * given: it changes nothing of what is seen, but the order of the sums, and with it last bits. A query's result then depends
 * on the positions of the cells it sees and not on where they lie (docs/attention/exact.md); without positions cells go by index. A run
 * on a GPU refuses both together. */
typedef struct pa_mask {
    const uint16_t *dense;     /* [n_q] rows of [n_cells] f16, added to s; -inf (or <= -65504) hides; null: none */
    int64_t dense_stride;      /* bytes between rows */
    const int32_t *cell_pos;   /* [n_cells] position of each cell; negative: it has none, the cell is empty; null: none */
    const int32_t *cell_seq;   /* [n_cells] sequence of each cell; null: all of one */
    const int32_t *query_pos;  /* [n_q] position of each query; seen: 0 <= cell_pos <= query_pos ... */
    const int32_t *query_seq;  /* [n_q] ... of the same sequence ... */
    int32_t window;            /* ... and query_pos - cell_pos < window; 0: no window */
} pa_mask;

typedef struct pa_args {
    int32_t n_q, n_cells; /* n_cells may be 0 */
    const float *q;       /* [n_q][n_head][d_k], by the strides below */
    int64_t q_stride;     /* bytes between queries */
    int64_t q_head_stride;/* bytes between heads */
    pa_rows k, v;
    pa_mask mask;
    const float *sinks;   /* [n_head] a logit per head that takes weight and gives no value; null: none */
    float *out;           /* [n_q][n_head][d_v] contiguous; null when a state is asked for */
    float *state_m;       /* [n_q][n_head]; null: none. With the two below: the state instead of the output; no sinks */
    float *state_l;       /* [n_q][n_head] */
    float *state_o;       /* [n_q][n_head][d_v] */
} pa_args;

PA_API int32_t pa_abi_version(void);
PA_API const char *pa_last_error(void); /* of this thread; never null */

/* ---- on the CPU ---- */
typedef struct pa_cpu_plan pa_cpu_plan;

/* isa: null or "auto" (the best this machine has), "avx512", "avx2", "neon", "scalar". n_threads >= 1, including the
 * caller's. A query's result has the same bits whatever n_threads is, whatever other queries are in the run, and with
 * avx512, avx2 and neon: docs/attention/exact.md defines them. */
PA_API pa_status pa_cpu_plan_create(const pa_shape *shape, int32_t n_threads, const char *isa, pa_cpu_plan **plan);
PA_API pa_status pa_cpu_run(pa_cpu_plan *plan, const pa_args *args); /* one run of a plan at a time */
PA_API const char *pa_cpu_plan_isa(const pa_cpu_plan *plan);
PA_API size_t pa_cpu_plan_bytes(const pa_cpu_plan *plan); /* scratch memory held */
PA_API void pa_cpu_plan_destroy(pa_cpu_plan *plan);       /* null is allowed */

/* The same in f64, one key after another: slow, obvious, what everything is compared with. out: [n_q][n_head][d_v]. */
PA_API pa_status pa_reference(const pa_shape *shape, const pa_args *args, double *out);

/* merge: state a over some cells, b over others -> a over both. n states of d_v values; m, l [n], o [n][d_v]. */
PA_API pa_status pa_state_merge(int64_t n, int32_t d_v, float *a_m, float *a_l, float *a_o,
                                const float *b_m, const float *b_l, const float *b_o);
/* out[i] = o[i] / l[i], or 0 where l is 0. A sink (null: none; [n]) joins first. */
PA_API pa_status pa_state_finish(int64_t n, int32_t d_v, const float *m, const float *l, const float *o,
                                 const float *sinks, float *out);

#ifdef __cplusplus
}
#endif
#endif
