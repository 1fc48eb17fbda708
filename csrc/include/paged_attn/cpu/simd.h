// The vectors of this translation unit's instruction set: Vec, W and what one can do with them.
#pragma once
#include "paged_attn/cpu/isa.h"

// Loops over registers must be unrolled whole, and what they call be part of them, or the arrays go to memory.
#define PA_INLINE __attribute__((always_inline)) inline
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

namespace paged_attn::cpu::PA_ISA {

// 2^r for r in [-0.5, 0.5], a polynomial of degree 5: what is left of 2^x once an integer has been split off by rounding.
// (AVX-512 splits off the floor, and has one of its own for [0, 1).)
inline Vec exp2_fraction(Vec r) {
    Vec p = vset(1.327647177e-3f);
    p = vfma(p, r, vset(9.675541333e-3f));
    p = vfma(p, r, vset(5.550713274e-2f));
    p = vfma(p, r, vset(2.402211972e-1f));
    p = vfma(p, r, vset(6.931469671e-1f));
    return vfma(p, r, vset(1.000000072f));
}

} // namespace paged_attn::cpu::PA_ISA
