// Vectors of 16 floats: AVX-512 F, BW, VL, DQ.
#pragma once
#if defined(__GNUC__) && !defined(__clang__) // its own header warns of itself (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

namespace paged_attn::cpu::PA_ISA {

using Vec = __m512;
constexpr int W = 16;        // floats in a vector
constexpr int kTileRows = 12; // keys (or values of d) a product block holds: 12 x 2 accumulators of 32 registers;
constexpr int kTileVecs = 2;  // a panel of Q (D 128) then fills half of a 32 KB first-level cache
constexpr int kRegisters = 32;

inline Vec vload(const float *p) { return _mm512_loadu_ps(p); }
inline void vstore(float *p, Vec a) { _mm512_storeu_ps(p, a); }
inline Vec vset(float a) { return _mm512_set1_ps(a); }
inline Vec vzero() { return _mm512_setzero_ps(); }
inline Vec vadd(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec vsub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec vmul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec vdiv(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline bool vany_gt(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
// a > b ? x : y, lane by lane; NaN is not greater.
inline Vec vselect_gt(Vec a, Vec b, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
inline float vsum(Vec a) {
    a = vadd(a, _mm512_shuffle_f32x4(a, a, 0x4E));
    a = vadd(a, _mm512_shuffle_f32x4(a, a, 0xB1));
    __m128 s = _mm512_castps512_ps128(a);
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float vmax_lane(Vec a) {
    a = vmax(a, _mm512_shuffle_f32x4(a, a, 0x4E));
    a = vmax(a, _mm512_shuffle_f32x4(a, a, 0xB1));
    __m128 s = _mm512_castps512_ps128(a);
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// 2^x for any x <= 127, 0 below -149. Splits off floor(x); a polynomial of degree 5 on [0, 1), relative error 7.5e-8.
inline Vec vexp2(Vec x) {
    const Vec r = _mm512_reduce_ps(x, 9); // x - floor(x)
    Vec p = vset(1.877576644e-3f);
    p = vfma(p, r, vset(8.989340167e-3f));
    p = vfma(p, r, vset(5.582631799e-2f));
    p = vfma(p, r, vset(2.401536171e-1f));
    p = vfma(p, r, vset(6.931530732e-1f));
    p = vfma(p, r, vset(9.999999251e-1f));
    return _mm512_scalef_ps(p, x); // p * 2^floor(x)
}

inline Vec from_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline Vec from_bf16(const uint16_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec from_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
// Nibbles less 8 of a q4_0 block's 16 bytes; first: 0 (low halves) or 16 (high halves).
inline Vec from_nibbles(const uint8_t *block, int first) {
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block));
    if (first != 0) bytes = _mm_srli_epi16(bytes, 4);
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i less8 = _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_shuffle_epi8(less8, bytes)));
}
inline float f16_to_f32(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }

// Sums of four vectors, not yet joined over the 128-bit lanes: lane 4 i + j holds a part of the sum of argument j.
inline Vec vfold4(Vec a, Vec b, Vec c, Vec d) {
    const Vec t0 = vadd(_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c));
    const Vec t1 = vadd(_mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d));
    return vadd(_mm512_unpacklo_ps(t0, t1), _mm512_unpackhi_ps(t0, t1));
}
// W/4 folds -> the W sums, in order.
inline Vec vjoin(const Vec *f) {
    const Vec a = vadd(_mm512_shuffle_f32x4(f[0], f[1], 0x88), _mm512_shuffle_f32x4(f[0], f[1], 0xDD));
    const Vec b = vadd(_mm512_shuffle_f32x4(f[2], f[3], 0x88), _mm512_shuffle_f32x4(f[2], f[3], 0xDD));
    return vadd(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

} // namespace paged_attn::cpu::PA_ISA

#include "paged_attn/cpu/simd_x86.h"
