// The vectors of this translation unit's instruction set: Vec, W and what one can do with them.
#pragma once
#include "paged_attn/cpu/isa.h"

// Loops over registers must be unrolled whole, or the arrays go to memory.
#if defined(__clang__)
#define PA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PA_UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(PA_FORCE_SCALAR)
#include "paged_attn/cpu/simd_scalar.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "paged_attn/cpu/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "paged_attn/cpu/simd_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "paged_attn/cpu/simd_neon.h"
#else
#include "paged_attn/cpu/simd_scalar.h"
#endif
