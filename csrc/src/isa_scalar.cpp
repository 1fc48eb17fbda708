#define PA_FORCE_SCALAR
#include "paged_attn/cpu/core.h"
#include "src/kernels.h"

const paged_attn::Kernel paged_attn::kernel_scalar = {"scalar", cpu::scalar::unsupported, cpu::scalar::scratch_bytes,
                                                 cpu::scalar::run};
