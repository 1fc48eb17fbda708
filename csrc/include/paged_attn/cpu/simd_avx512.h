// Vectors of 16 floats: AVX-512 F, BW, VL, DQ.
#pragma once
#if defined(__GNUC__) && !defined(__clang__) // its own header warns of itself (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#include "paged_attn/order.h"

namespace paged_attn::cpu::PA_ISA {

using Vec = __m512;
constexpr int W = 16;        // floats in a vector
constexpr int kTileRows = 12; // keys (or values of d) a product block holds: 12 x 2 accumulators of 32 registers;
constexpr int kTileVecs = 2;  // a panel of Q (D 128) then fills half of a 32 KB first-level cache
constexpr int kTileChains = 2; // of a dot product, side by side in the block of products with Q
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

inline Vec vround(Vec x) { return _mm512_roundscale_ps(x, 8); } // to the nearest integer, ties to even
inline Vec vceil(Vec x) { return _mm512_roundscale_ps(x, 10); }
// p * 2^y for an integer y, 0 where y < kLeastExponent; y or p NaN stays NaN.
inline Vec vscale2(Vec p, Vec y) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, vset(kLeastExponent), _CMP_NLT_UQ), p, y);
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

// Bit i: p[i] < limit, for 64 of them.
#define PA_BITS_BELOW
inline uint64_t bits_below(const uint16_t *p, uint16_t limit) {
    const __m512i most = _mm512_set1_epi16(static_cast<short>(limit));
    const uint64_t low = _mm512_cmplt_epu16_mask(_mm512_loadu_si512(p), most);
    return low | uint64_t{_mm512_cmplt_epu16_mask(_mm512_loadu_si512(p + 32), most)} << 32;
}

// Eight values of each of two rows, a's in the lower half.
#define PA_TWO_ROWS
inline Vec two_f32(const float *a, const float *b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}
inline __m256i two_halves(const void *a, const void *b) { // 16 bytes of each
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i *>(a))),
                                   _mm_loadu_si128(static_cast<const __m128i *>(b)), 1);
}
inline Vec two_f16(const uint16_t *a, const uint16_t *b) { return _mm512_cvtph_ps(two_halves(a, b)); }
inline Vec two_bf16(const uint16_t *a, const uint16_t *b) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(two_halves(a, b)), 16));
}
inline __m128i two_bytes(const void *a, const void *b) { // 8 bytes of each
    return _mm_unpacklo_epi64(_mm_loadl_epi64(static_cast<const __m128i *>(a)), _mm_loadl_epi64(static_cast<const __m128i *>(b)));
}
inline Vec two_i8(const int8_t *a, const int8_t *b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(two_bytes(a, b))); }
// first: 0, 8 (low halves), 16, 24 (high halves).
inline Vec two_nibbles(const uint8_t *a, const uint8_t *b, int first) {
    __m128i bytes = two_bytes(a + first % 16, b + first % 16);
    if (first >= 16) bytes = _mm_srli_epi16(bytes, 4);
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i less8 = _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_shuffle_epi8(less8, bytes)));
}
inline Vec two_set(float a, float b) { return _mm512_mask_blend_ps(0xFF00, vset(a), vset(b)); }
inline Vec two_same(const float *p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); } // 8 values in both halves

// The chains of a dot product join in three steps (order.h): c + 4, neighbours, neighbours. A vector holds two cells of 8
// chains; these join those of a and b.
inline Vec vjoin_halves(Vec a, Vec b) {
    return vadd(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
inline Vec vjoin_neighbours(Vec a, Vec b) { // of the four lanes of each part of 128 bits
    return vadd(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}

} // namespace paged_attn::cpu::PA_ISA

#include "paged_attn/cpu/simd_x86.h"
