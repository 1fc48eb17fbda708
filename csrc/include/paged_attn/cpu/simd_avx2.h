// Vectors of 8 floats: AVX2, FMA, F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "paged_attn/order.h"

namespace paged_attn::cpu::PA_ISA {

using Vec = __m256;
constexpr int W = 8;
constexpr int kTileRows = 6; // 6 x 2 accumulators of 16 registers
constexpr int kTileVecs = 2;
constexpr int kTileChains = 2; // of a dot product, side by side in the block of products with Q
constexpr int kRegisters = 16;

inline Vec vload(const float *p) { return _mm256_loadu_ps(p); }
inline void vstore(float *p, Vec a) { _mm256_storeu_ps(p, a); }
inline Vec vset(float a) { return _mm256_set1_ps(a); }
inline Vec vzero() { return _mm256_setzero_ps(); }
inline Vec vadd(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec vsub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec vmul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec vdiv(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline bool vany_gt(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
inline Vec vselect_gt(Vec a, Vec b, Vec x, Vec y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline float vsum(Vec a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float vmax_lane(Vec a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline Vec vround(Vec x) { return _mm256_round_ps(x, 8); } // to the nearest integer, ties to even
inline Vec vceil(Vec x) { return _mm256_round_ps(x, 10); }
// As simd_avx512.h; y is added to the exponent. A NaN of y becomes an integer whose last bits are 0, and p stays.
inline Vec vscale2(Vec p, Vec y) {
    const Vec e = _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(y), 23)));
    return _mm256_and_ps(e, _mm256_cmp_ps(y, vset(kLeastExponent), _CMP_NLT_UQ));
}

inline Vec from_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline Vec from_bf16(const uint16_t *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec from_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
// Eight nibbles less 8 of a q4_0 block's 16 bytes; first: 0, 8 (low halves), 16, 24 (high halves). A number below 2^23
// in the last bits of 2^23 is 2^23 plus that number.
inline Vec from_nibbles(const uint8_t *block, int first) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(block + first % 16)));
    const __m256i nibble = first < 16 ? _mm256_and_si256(bytes, _mm256_set1_epi32(15)) : _mm256_srli_epi32(bytes, 4);
    const Vec big = _mm256_castsi256_ps(_mm256_or_si256(nibble, _mm256_set1_epi32(0x4B000000)));
    return vsub(big, vset(8388608.0f + 8.0f));
}
inline float f16_to_f32(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }

// As simd_avx512.h. x < limit where the smaller of x and limit - 1 is x.
#define PA_BITS_BELOW
inline uint64_t bits_below(const uint16_t *p, uint16_t limit) {
    const __m256i most = _mm256_set1_epi16(static_cast<short>(limit - 1));
    uint64_t bits = 0;
    for (int i = 0; i < 64; i += 32) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + i + 16));
        const __m256i both = _mm256_packs_epi16(_mm256_cmpeq_epi16(_mm256_min_epu16(a, most), a),
                                                _mm256_cmpeq_epi16(_mm256_min_epu16(b, most), b)); // by halves
        const auto found = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(both, 0xD8)));
        bits |= uint64_t{found} << i;
    }
    return bits;
}

// As simd_avx512.h; a vector holds one cell of 8 chains.
inline Vec vjoin_halves(Vec a, Vec b) {
    return vadd(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline Vec vjoin_neighbours(Vec a, Vec b) { return vadd(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)); }

} // namespace paged_attn::cpu::PA_ISA

#include "paged_attn/cpu/simd_x86.h"
