// Vectors of 4 floats: NEON of AArch64.
#pragma once
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "paged_attn/order.h"

namespace paged_attn::cpu::PA_ISA {

using Vec = float32x4_t;
constexpr int W = 4;
constexpr int kTileRows = 6; // 6 x 4 accumulators of 32 registers
constexpr int kTileVecs = 4;
constexpr int kTileChains = 2; // of a dot product, side by side in the block of products with Q
constexpr int kRegisters = 32;

inline Vec vload(const float *p) { return vld1q_f32(p); }
inline void vstore(float *p, Vec a) { vst1q_f32(p, a); }
inline Vec vset(float a) { return vdupq_n_f32(a); }
inline Vec vzero() { return vdupq_n_f32(0.0f); }
inline Vec vadd(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec vsub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec vmul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec vdiv(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec vfma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec vmax(Vec a, Vec b) { return vmaxnmq_f32(a, b); } // a number beside a NaN wins
inline bool vany_gt(Vec a, Vec b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }
inline Vec vselect_gt(Vec a, Vec b, Vec x, Vec y) { return vbslq_f32(vcgtq_f32(a, b), x, y); }
inline float vsum(Vec a) { // lanes 0 and 2, 1 and 3, then both
    const float32x2_t s = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(vpadd_f32(s, s), 0);
}
inline float vmax_lane(Vec a) { return vmaxnmvq_f32(a); }

inline Vec vround(Vec x) { return vrndnq_f32(x); } // to the nearest integer, ties to even
inline Vec vceil(Vec x) { return vrndpq_f32(x); }
// As simd_avx512.h; y is added to the exponent. A NaN of y becomes 0, and p stays.
inline Vec vscale2(Vec p, Vec y) {
    const int32x4_t e = vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(y), 23));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_s32(e), vcltq_f32(y, vset(kLeastExponent))));
}

inline Vec from_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Vec from_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline Vec widen_i8(int8x8_t bytes) { return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes)))); }
inline Vec from_i8(const int8_t *p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return widen_i8(vreinterpret_s8_u32(vdup_n_u32(four)));
}
// Four nibbles less 8 of a q4_0 block's 16 bytes; first: a multiple of 4 below 32, high halves from 16 on.
inline Vec from_nibbles(const uint8_t *block, int first) {
    uint32_t four;
    std::memcpy(&four, block + first % 16, 4);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    const uint8x8_t nibbles = first >= 16 ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(15));
    return widen_i8(vsub_s8(vreinterpret_s8_u8(nibbles), vdup_n_s8(8)));
}
inline float f16_to_f32(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }

// As simd_avx512.h; two vectors hold one cell of 8 chains.
inline Vec vjoin_halves(Vec a, Vec b) { return vadd(a, b); }
inline Vec vjoin_neighbours(Vec a, Vec b) { return vpaddq_f32(a, b); }

inline void hold(Vec &a) { __asm__("" : "+w"(a)); } // as simd_x86.h
__attribute__((always_inline)) inline void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

// As simd_x86.h: the FZ bit of FPCR.
struct FlushDenormals {
    uint64_t saved;
    FlushDenormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
        __asm__ volatile("msr fpcr, %0" : : "r"((saved & ~(uint64_t{3} << 22)) | (uint64_t{1} << 24)));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(saved)); }
    FlushDenormals(const FlushDenormals &) = delete;
    FlushDenormals &operator=(const FlushDenormals &) = delete;
};

inline void transpose8(const float *from, size_t from_stride, float *to, size_t to_stride) {
    for (size_t r = 0; r < 8; r++)
        for (size_t c = 0; c < 8; c++) to[c * to_stride + r] = from[r * from_stride + c];
}

} // namespace paged_attn::cpu::PA_ISA
