#include "paged_attn/cpu/core.h"
#include "src/kernels.h"

const paged_attn::Kernel paged_attn::kernel_neon = {"neon", cpu::neon::unsupported, cpu::neon::scratch_bytes,
                                                 cpu::neon::run};
