// Whether what a caller gives fits together. Everything behind these trusts its arguments.
#pragma once
#include "paged_attn/paged_attn.h"

#include <cstdint>

namespace paged_attn {

// Bytes of a row of `d` values; d is a whole number of the type's blocks.
int64_t row_bytes(pa_dtype type, int32_t d) noexcept;

// A shape that can be meant. Whether a kernel serves it is the kernel's to say.
pa_status check_shape(const pa_shape *shape) noexcept;

// The inputs of a run: counts, strides, pages, mask. The shape has passed check_shape.
pa_status check_inputs(const pa_shape &shape, const pa_args *args) noexcept;

// Where the result goes: the output or a state, and no sinks with the latter.
pa_status check_outputs(const pa_args &args) noexcept;

} // namespace paged_attn
