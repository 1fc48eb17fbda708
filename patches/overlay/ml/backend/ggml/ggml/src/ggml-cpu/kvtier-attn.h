// Exact attention (paged_attn/) in the place of the CPU backend's GGML_OP_FLASH_ATTN_EXT.
//
// On with OLLAMA_CPU_ATTENTION=exact, which is read once; else, and for what paged_attn does not serve, the stock
// kernel runs. Why it does is said once for each reason, in ggml's log.
#pragma once

#include "ggml.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// The source of GGML_OP_FLASH_ATTN_EXT that has the position of each cell, as I32, -1 of a cell that holds nothing; it may
// be missing. Nobody else looks at it.
#define KVTIER_ATTN_POSITIONS 5

// Called by every thread of the team, before the stock kernel. False, in all of them alike: nothing was done.
bool kvtier_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of work memory that the call above wants with up to n_tasks threads; 0 where the stock kernel will run.
size_t kvtier_attn_work_size(const struct ggml_tensor * dst, int n_tasks);

// The fewest columns for which llamafile_sgemm multiplies weights of this type: ggml's vec_dot, which has those below, sums
// f16, bf16 and f32 in another order. Quantised ones have the same bits either way.
int kvtier_attn_fewest_columns(int weights);

// How many calls that had positions the stock kernel has computed, which knows none: their rows are not what the order of positions
// gives.
uint64_t kvtier_attn_refused(void);

// "stock", "exact (avx512)", or "exact (avx512), but stock where " and the last reason for it. Never null.
const char * kvtier_attn_state(void);

// The address of one of the last two, by its name: the backend may be a library that was loaded at run time. Null for others.
void * kvtier_attn_function(const char * name);

#ifdef __cplusplus
}
#endif
