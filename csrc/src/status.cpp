#include "src/status.h"

#include <cstdarg>
#include <cstdio>

namespace paged_attn {

static thread_local char last_error[512];

pa_status fail(pa_status status, const char *format, ...) noexcept {
    va_list values;
    va_start(values, format);
    std::vsnprintf(last_error, sizeof last_error, format, values);
    va_end(values);
    return status;
}

} // namespace paged_attn

int32_t pa_abi_version(void) { return PA_ABI_VERSION; }

const char *pa_last_error(void) { return paged_attn::last_error; }
