// How a call of the C interface fails: a status, and a sentence that pa_last_error() of the same thread gives.
#pragma once
#include "paged_attn/paged_attn.h"

namespace paged_attn {

// Keeps the sentence (printf's format, cut at 511 bytes) for this thread and returns `status`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
pa_status fail(pa_status status, const char *format, ...) noexcept;

} // namespace paged_attn
