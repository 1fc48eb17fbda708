// docs/attention/exact.md as a program: plain loops, std::fma, no vectors, and nothing of the kernels.
#pragma once
#include "paged_attn/paged_attn.h"

// out: [n_q][n_head][d_v]. Arguments have been checked.
void exact_model(const pa_shape &shape, const pa_args &args, float *out);
