// The kernels, once per instruction set, and the choice among them at run time.
//
// Each isa_*.cpp compiles the header core with flags of its own. Inline functions and templates that lie outside the
// instruction set's namespace would be compiled several times under one name, and the linker keeps one of them: the
// wrong one would crash an older machine. So there must be none (scripts/test-csrc looks at the symbols), and the
// objects for every machine come first in sources.txt.
#pragma once
#include "paged_attn/cpu/team.h"
#include "paged_attn/paged_attn.h"

#include <cstddef>

namespace paged_attn {

struct Kernel {
    const char *isa;
    const char *(*unsupported)(const pa_shape &shape);
    size_t (*scratch_bytes)(const pa_shape &shape, int n_threads);
    void (*run)(const pa_shape &shape, const pa_args &args, void *scratch, const cpu::Team &team);
};

#if defined(__x86_64__)
extern const Kernel kernel_avx512, kernel_avx2;
#elif defined(__aarch64__)
extern const Kernel kernel_neon;
#endif
extern const Kernel kernel_scalar;

// The kernel by its name, or the best one for null and "auto". PA_UNSUPPORTED when this machine lacks it,
// PA_BAD_ARGUMENT when nothing is called that.
pa_status find_kernel(const char *isa, const Kernel *&kernel) noexcept;

} // namespace paged_attn
