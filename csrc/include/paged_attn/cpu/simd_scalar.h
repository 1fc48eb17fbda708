// Vectors of 4 floats in the compiler's own vector type: any machine that GCC or Clang serves (on x86-64 this is SSE2).
// Products and sums are rounded one by one, so its bits are not those of the others (docs/attention/exact.md).
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "paged_attn/order.h"

namespace paged_attn::cpu::PA_ISA {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
constexpr int W = 4;
constexpr int kTileRows = 6; // 6 x 2 accumulators of 16 registers
constexpr int kTileVecs = 2;
constexpr int kTileChains = 2; // of a dot product, side by side in the block of products with Q
constexpr int kRegisters = 16;

inline Vec vload(const float *p) {
    Vec a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
inline void vstore(float *p, Vec a) { std::memcpy(p, &a, sizeof a); }
inline Vec vset(float a) { return Vec{a, a, a, a}; }
inline Vec vzero() { return vset(0.0f); }
inline Vec vadd(Vec a, Vec b) { return a + b; }
inline Vec vsub(Vec a, Vec b) { return a - b; }
inline Vec vmul(Vec a, Vec b) { return a * b; }
inline Vec vdiv(Vec a, Vec b) { return a / b; }
inline Vec vfma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec vselect_gt(Vec a, Vec b, Vec x, Vec y) {
    const IntVec mask = a > b;
    IntVec xi, yi;
    std::memcpy(&xi, &x, sizeof xi);
    std::memcpy(&yi, &y, sizeof yi);
    const IntVec r = (xi & mask) | (yi & ~mask);
    Vec out;
    std::memcpy(&out, &r, sizeof out);
    return out;
}
inline Vec vmax(Vec a, Vec b) { return vselect_gt(a, b, a, b); }
inline bool vany_gt(Vec a, Vec b) {
    const IntVec mask = a > b;
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
}
inline float vsum(Vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float vmax_lane(Vec a) { return std::fmax(std::fmax(a[0], a[1]), std::fmax(a[2], a[3])); }

inline Vec vround(Vec x) { // adding 1.5 * 2^23 rounds; what is larger than 2^22 is left as it is, as is NaN
    const Vec magic = vset(12582912.0f), limit = vset(4194304.0f);
    const Vec rounded = (x + magic) - magic;
    return vselect_gt(limit, vmax(x, -x), rounded, x);
}
inline Vec vceil(Vec x) {
    const Vec n = vround(x);
    return vselect_gt(x, n, n + vset(1.0f), n);
}
// As simd_avx512.h; y is added to the exponent.
inline Vec vscale2(Vec p, Vec y) {
    const Vec low = vset(kLeastExponent), kept = vselect_gt(low, y, low, y);
    typedef uint32_t Bits __attribute__((vector_size(16)));
    Bits bits;
    std::memcpy(&bits, &p, sizeof bits);
    for (int i = 0; i < W; i++)
        if (kept[i] == kept[i]) bits[i] += static_cast<uint32_t>(static_cast<int32_t>(kept[i])) << 23;
    Vec out;
    std::memcpy(&out, &bits, sizeof out);
    return vselect_gt(low, y, vzero(), out);
}

// IEEE half to single by shifting the exponent; halves below 2^-14 by a product.
inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7fffu;
    uint32_t bits;
    float f;
    if (rest >= 0x7c00u) {
        bits = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
    } else if (rest >= 0x400u) {
        bits = sign | ((rest << 13) + 0x38000000u);
    } else {
        f = static_cast<float>(rest) * 0x1p-24f;
        std::memcpy(&bits, &f, sizeof bits);
        bits |= sign;
    }
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
inline Vec from_f16(const uint16_t *p) {
    return Vec{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}
inline Vec from_bf16(const uint16_t *p) {
    const IntVec wide = {static_cast<int32_t>(static_cast<uint32_t>(p[0]) << 16),
                         static_cast<int32_t>(static_cast<uint32_t>(p[1]) << 16),
                         static_cast<int32_t>(static_cast<uint32_t>(p[2]) << 16),
                         static_cast<int32_t>(static_cast<uint32_t>(p[3]) << 16)};
    Vec out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}
inline Vec from_i8(const int8_t *p) {
    return Vec{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
}
// Four nibbles less 8 of a q4_0 block's 16 bytes; first: a multiple of 4 below 32, high halves from 16 on.
inline Vec from_nibbles(const uint8_t *block, int first) {
    const uint8_t *p = block + first % 16;
    const int shift = first >= 16 ? 4 : 0;
    return Vec{static_cast<float>((p[0] >> shift & 15) - 8), static_cast<float>((p[1] >> shift & 15) - 8),
               static_cast<float>((p[2] >> shift & 15) - 8), static_cast<float>((p[3] >> shift & 15) - 8)};
}

// As simd_neon.h.
inline Vec vjoin_halves(Vec a, Vec b) { return a + b; }
inline Vec vjoin_neighbours(Vec a, Vec b) { return Vec{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]}; }

inline void hold(Vec &a) { // as simd_x86.h
#if defined(__SSE2__)
    __asm__("" : "+x"(a));
#else
    __asm__("" : "+m"(a));
#endif
}
__attribute__((always_inline)) inline void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

inline void transpose8(const float *from, size_t from_stride, float *to, size_t to_stride) {
    for (size_t r = 0; r < 8; r++)
        for (size_t c = 0; c < 8; c++) to[c * to_stride + r] = from[r * from_stride + c];
}

#if defined(__SSE2__)
// As simd_x86.h; the bits have been there since SSE.
struct FlushDenormals {
    unsigned saved = __builtin_ia32_stmxcsr();
    FlushDenormals() { __builtin_ia32_ldmxcsr((saved & ~0x6000u) | 0x8040u); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(saved); }
    FlushDenormals(const FlushDenormals &) = delete;
    FlushDenormals &operator=(const FlushDenormals &) = delete;
};
#else
struct FlushDenormals { // no switch known for this machine: slower with peaked logits, not wrong
    FlushDenormals() {}
};
#endif

} // namespace paged_attn::cpu::PA_ISA
