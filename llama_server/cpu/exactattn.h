// Exact attention (csrc/include/paged_attn) as GGML_OP_FLASH_ATTN_EXT of the CPU backend of llama.cpp, from Ollama v0.30 on.
//
// The lines that ollama_tiering/patchset/llama_server/exact_hooks.py places call these functions. There is no switch here: who loads
// this library wants it (score.cpp says who does). What paged_attn does not serve is left to the stock kernel, which is there, too.
#pragma once

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Called by every thread of the team, before the stock kernel. False, in all of them alike: nothing was done.
bool exactattn_compute(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of work memory that the call above wants with up to n_tasks threads; 0 where the stock kernel will run.
size_t exactattn_work_size(const struct ggml_tensor * dst, int n_tasks);

// Whether llamafile_sgemm has to multiply one column with weights of this type. ggml's vec_dot, which does it otherwise, sums f16, bf16
// and f32 in another order than several columns are summed in. Quantised weights have the same bits either way.
bool exactattn_multiplies_one_column(int weights);

// "exact 2 (avx512)": which bits these are (docs/exact.md), and by which kernels. Asked for by name, of the backend.
const char * exactattn_state(void);

#ifdef __cplusplus
}
#endif
