// The one algebra: attention state (m, l, o) and merge. For the host and for the device.
//
// m: the reference in base 2 (an integer near the largest s * log2 e in the CPU's states, that s itself in the GPU's),
// l = sum 2^(s2 - m), o = sum 2^(s2 - m) v. Any reference is legal as long as l and o use the same; the final o / l cancels
// it. Merging is associative and commutative up to rounding, so any split of the cells, in any order, is an answer. After
// FlashInfer's state.cuh. Between integers the weights are powers of two: merging then rounds sums only.
#pragma once
#if defined(__CUDACC_RTC__) // no headers there; the functions are built in
#define INFINITY __builtin_bit_cast(float, 0x7F800000)
#else
#include "paged_attn/order.h"
#endif

#if defined(__CUDACC__)
#define PA_HD __host__ __device__ __forceinline__
#else
#define PA_HD __attribute__((always_inline)) inline
#endif

namespace paged_attn {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kEmptyM = -INFINITY; // the reference of the empty state

// 2^x for x <= 0. On the host it is that of order.h, the same with every libc, and exact for an integer.
#if defined(__CUDACC__)
PA_HD float exp2_weight(float x) { return exp2f(x); }
#else
PA_HD float exp2_weight(float x) {
    return x == __builtin_nearbyintf(x) ? power_of_two(x) : exp2_over(x, 0.0f);
}
PA_HD float product(float a, float b) { return apart(a * b); }
#endif

// What both sides are multiplied by when two states meet. -inf on both sides (two empty states) gives 0 and 0:
// (-inf) - (-inf) is not a number, so it is never computed.
struct MergeWeights {
    float m, a, b;
};

PA_HD MergeWeights merge_weights(float m_a, float m_b) {
    const float m = m_a > m_b ? m_a : m_b;
    if (m == kEmptyM) return {kEmptyM, 0.0f, 0.0f};
    return {m, exp2_weight(m_a - m), exp2_weight(m_b - m)};
}

#if !defined(__CUDACC__)
// (m, l, o[0..n)) of `a` becomes the state over both. Two products and a sum, so that it commutes bit for bit.
PA_HD void merge(float &m_a, float &l_a, float *o_a, float m_b, float l_b, const float *o_b, int n) {
    const MergeWeights w = merge_weights(m_a, m_b);
    m_a = w.m;
    l_a = product(l_a, w.a) + product(l_b, w.b);
    for (int i = 0; i < n; i++) o_a[i] = product(o_a[i], w.a) + product(o_b[i], w.b);
}

// A sink is a cell of its own with l = 2^(its logit) and o = 0. It joins once, at the end, under an integer reference.
// `factor` is multiplied by what o has to be multiplied by. A sink of -inf is none.
PA_HD void merge_sink(float &factor, float &l, float m, float sink) {
    const float s2 = product(sink, kLog2e);
    if (s2 == kEmptyM) return;
    const float up = __builtin_ceilf(s2), reference = m > up ? m : up;
    const float shrink = m == kEmptyM ? 0.0f : exp2_weight(m - reference);
    factor *= shrink;
    l = product(l, shrink) + exp2_over(s2, reference);
}
#endif

PA_HD float inverse_or_zero(float l) { return l == 0.0f ? 0.0f : 1.0f / l; } // NaN stays NaN

} // namespace paged_attn
