#include "paged_attn/cpu/core.h"
#include "src/kernels.h"

const paged_attn::Kernel paged_attn::kernel_avx2 = {"avx2", cpu::avx2::unsupported, cpu::avx2::scratch_bytes,
                                                 cpu::avx2::run};
