// The one algebra: attention state (m, l, o) and merge. For the host and for the device.
//
// m: the reference in base 2 (largest s * log2 e, or a value near it), l = sum 2^(s2 - m), o = sum 2^(s2 - m) v.
// Any reference is legal as long as l and o use the same; the final o / l cancels it. Merging is associative and
// commutative up to rounding, so any split of the cells, in any order, is an answer. After FlashInfer's state.cuh.
#pragma once
#if defined(__CUDACC_RTC__) // no headers there; the functions are built in
#define INFINITY __builtin_bit_cast(float, 0x7F800000)
#else
#include <cmath>
#endif

#if defined(__CUDACC__)
#define PA_HD __host__ __device__ __forceinline__
#else
#define PA_HD inline
#endif

namespace paged_attn {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kEmptyM = -INFINITY; // the reference of the empty state

// What both sides are multiplied by when two states meet. -inf on both sides (two empty states) gives 0 and 0:
// (-inf) - (-inf) is not a number, so it is never computed.
struct MergeWeights {
    float m, a, b;
};

PA_HD MergeWeights merge_weights(float m_a, float m_b) {
    const float m = m_a > m_b ? m_a : m_b;
    if (m == kEmptyM) return {kEmptyM, 0.0f, 0.0f};
    return {m, exp2f(m_a - m), exp2f(m_b - m)};
}

// (m, l, o[0..n)) of `a` becomes the state over both.
PA_HD void merge(float &m_a, float &l_a, float *o_a, float m_b, float l_b, const float *o_b, int n) {
    const MergeWeights w = merge_weights(m_a, m_b);
    m_a = w.m;
    l_a = l_a * w.a + l_b * w.b;
    for (int i = 0; i < n; i++) o_a[i] = o_a[i] * w.a + o_b[i] * w.b;
}

// A sink is a state of its own: m = its logit in base 2, l = 1, o = 0. It joins once, at the end. `factor` is multiplied
// by what o has to be multiplied by.
PA_HD void merge_sink(float &factor, float &l, float m, float sink) {
    const MergeWeights w = merge_weights(m, sink * kLog2e);
    factor *= w.a;
    l = l * w.a + w.b;
}

PA_HD float inverse_or_zero(float l) { return l == 0.0f ? 0.0f : 1.0f / l; } // NaN stays NaN

} // namespace paged_attn
