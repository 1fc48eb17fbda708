// The vectors of this translation unit's instruction set: Vec, W and what one can do with them.
#pragma once
#include "paged_attn/cpu/isa.h"

// Loops over registers must be unrolled whole, and what they call be part of them, or the arrays go to memory.
#define PA_INLINE __attribute__((always_inline)) inline
#define PA_INLINE_LAMBDA __attribute__((always_inline))
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

// exp2_over of order.h, lane by lane.
PA_INLINE Vec vexp2_over(Vec x, Vec m) {
    const Vec n = vround(x), r = vsub(x, n);
    Vec p = vset(kExp2[0]);
    PA_UNROLL
    for (int i = 1; i < 6; i++) p = vfma(p, r, vset(kExp2[i]));
    return vscale2(p, vsub(n, m));
}

// 2^y for an integer y <= 127, 0 below kLeastExponent.
PA_INLINE Vec vpower_of_two(Vec y) { return vscale2(vset(1.0f), y); }

#if !defined(PA_BITS_BELOW) // simd_avx512.h, simd_avx2.h
inline uint64_t bits_below(const uint16_t *p, uint16_t limit) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; i++) bits |= uint64_t{p[i] < limit} << i;
    return bits;
}
#endif

// What a result is given as: NaN is one NaN, what is not finite is that NaN, and zero has no sign.
PA_INLINE Vec vsettled(Vec x) {
    hold(x); // a product may not become part of the sums below
    const Vec zero_or_nan = vfma(x, vzero(), vzero());
    return vselect_gt(vset(1.0f), zero_or_nan, vadd(x, vzero()), vset(kNotANumber));
}

} // namespace paged_attn::cpu::PA_ISA
