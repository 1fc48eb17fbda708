// Attention in f64, one cell after another: slow and obvious, what every kernel is compared with.
#pragma once
#include "paged_attn/paged_attn.h"

#include <cstdint>

namespace paged_attn {

// Row (cell, head) of `rows` as the values its bytes stand for: d of them. All five types are exact in f32.
void dequantise(const pa_rows &rows, pa_dtype type, int32_t d, int32_t cell, int32_t head, float *values);

// What is added to the logit of (query, cell); -infinity where the query does not see the cell.
double mask_bias(const pa_mask &mask, int32_t query, int32_t cell);

// out: [n_q][n_head][d_v]. Arguments have been checked. std::bad_alloc.
void reference(const pa_shape &shape, const pa_args &args, double *out);

} // namespace paged_attn
