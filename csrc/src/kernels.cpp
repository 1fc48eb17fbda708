#include "src/kernels.h"

#include "src/status.h"

#include <cstring>

namespace paged_attn {

namespace {

struct Candidate {
    const char *isa;
    const Kernel *kernel; // null: compiled for another machine
    bool usable;
};

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

} // namespace

pa_status find_kernel(const char *isa, const Kernel *&kernel) noexcept {
    const Candidate candidates[] = {
#if defined(__x86_64__)
        {"avx512", &kernel_avx512, has_avx512()}, {"avx2", &kernel_avx2, has_avx2()}, {"neon", nullptr, false},
#elif defined(__aarch64__)
        {"avx512", nullptr, false}, {"avx2", nullptr, false}, {"neon", &kernel_neon, true},
#else
        {"avx512", nullptr, false}, {"avx2", nullptr, false}, {"neon", nullptr, false},
#endif
        {"scalar", &kernel_scalar, true},
    };
    const bool best = !isa || std::strcmp(isa, "auto") == 0;
    for (const Candidate &candidate : candidates) {
        if (best ? !candidate.usable : std::strcmp(isa, candidate.isa) != 0) continue;
        if (!candidate.usable) return fail(PA_UNSUPPORTED, "this machine has no %s", isa);
        kernel = candidate.kernel;
        return PA_OK;
    }
    return fail(PA_BAD_ARGUMENT, "%.40s is no instruction set: auto, avx512, avx2, neon, scalar", isa);
}

} // namespace paged_attn
