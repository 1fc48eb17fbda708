// What AVX2 and AVX-512 share.
#pragma once
#include <immintrin.h>

#include <cstddef>

namespace paged_attn::cpu::PA_ISA {

// Keeps a loaded value in a register. Else the compiler may fold the load into each product that uses it, and the
// loads become the limit: Zen 4 loads one vector of 64 bytes a cycle.
inline void hold(Vec &a) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(a));
#else
    __asm__("" : "+x"(a));
#endif
}

// Always part of the caller: a function that only prefetches has no effect, GCC finds, and leaves out its calls.
__attribute__((always_inline)) inline void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T1); }

// Denormals as zero and rounding to nearest, for as long as it lives. Products of small weights and values may be denormal,
// and each costs a trap into microcode; and no bit may depend on how the caller rounds.
struct FlushDenormals {
    unsigned saved = _mm_getcsr();
    FlushDenormals() { _mm_setcsr((saved & ~0x6000u) | 0x8040u); } // FTZ | DAZ
    ~FlushDenormals() { _mm_setcsr(saved); }
    FlushDenormals(const FlushDenormals &) = delete;
    FlushDenormals &operator=(const FlushDenormals &) = delete;
};

// to[c * to_stride + r] = from[r * from_stride + c] for 8 rows and 8 columns; strides in floats.
inline void transpose8(const float *from, size_t from_stride, float *to, size_t to_stride) {
    __m256 r[8], t[8];
    for (size_t i = 0; i < 8; i += 2) {
        r[i] = _mm256_loadu_ps(from + i * from_stride);
        r[i + 1] = _mm256_loadu_ps(from + (i + 1) * from_stride);
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (size_t i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (size_t i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

} // namespace paged_attn::cpu::PA_ISA
