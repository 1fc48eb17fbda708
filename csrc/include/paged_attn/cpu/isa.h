// Which instruction set this translation unit is compiled for, and the vectors of it.
#pragma once

#if defined(PA_FORCE_SCALAR)
#define PA_ISA scalar
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PA_ISA avx512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PA_ISA avx2
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define PA_ISA neon
#else
#define PA_ISA scalar
#endif
