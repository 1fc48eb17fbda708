// Exact attention (paged_attn/) in the place of the CPU backend's GGML_OP_FLASH_ATTN_EXT.
//
// On with OLLAMA_CPU_ATTENTION=exact, which is read once; else, and for what paged_attn does not serve, the stock
// kernel runs. Why it does is said once for each reason, in ggml's log.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// The source of GGML_OP_FLASH_ATTN_EXT that has the position of each cell, as I32, -1 of a cell that holds nothing; it may
// be missing. Nobody else looks at it.
#define EXACTATTN_POSITIONS 5

// Called by every thread of the team, before the stock kernel. False, in all of them alike: nothing was done.
bool exactattn_compute(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of work memory that the call above wants with up to n_tasks threads; 0 where the stock kernel will run.
size_t exactattn_work_size(const struct ggml_tensor * dst, int n_tasks);

// The fewest columns for which llamafile_sgemm multiplies weights of this type: ggml's vec_dot, which has those below, sums
// f16 and f32 in another order. Quantised ones have the same bits either way.
int exactattn_fewest_columns(int weights);

// "stock", "exact (avx512)", or "exact (avx512), but stock where " and the last reason for it. Never null.
const char * exactattn_state(void);

#ifdef __cplusplus
}
#endif
