#include "paged_attn/cpu/core.h"
#include "src/kernels.h"

const paged_attn::Kernel paged_attn::kernel_avx512 = {"avx512", cpu::avx512::unsupported, cpu::avx512::scratch_bytes,
                                                 cpu::avx512::run};
