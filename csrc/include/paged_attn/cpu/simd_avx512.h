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
constexpr int kTileRows = 6; // keys (or values of d) a product block holds: 6 x 4 accumulators of 32 registers
constexpr int kTileVecs = 4;
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

// Lane i of the result is the sum over the lanes of x[i]: a transposition that adds on the way.
inline Vec vsum_each(const Vec *x) {
    Vec a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = vadd(_mm512_unpacklo_ps(x[i], x[i + 8]), _mm512_unpackhi_ps(x[i], x[i + 8]));
    for (int i = 0; i < 4; i++) b[i] = vadd(_mm512_unpacklo_ps(a[i], a[i + 4]), _mm512_unpackhi_ps(a[i], a[i + 4]));
    for (int i = 0; i < 2; i++)
        c[i] = vadd(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xDD));
    const Vec e = vadd(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15), e);
}

} // namespace paged_attn::cpu::PA_ISA

#include "paged_attn/cpu/simd_x86.h"
