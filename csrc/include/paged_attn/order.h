// The canonical order: what the bits of a row of exact attention on a CPU are. docs/attention/exact.md says it in words, from which
// a plain scalar model can be written (csrc/tests/exact_model.h); every kernel cites what stands here.
//
// A row is one query and one head. Its bits follow from its query, its sink, and from K, V, mask and place of the cells it
// sees: not from the other rows of the call, the threads, the kernel that ran, nor where cells lie in memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace paged_attn {

// Counts changes of any bit of a result: tests/unit/kernels/test_version.py holds the digest of results that belongs to it.
constexpr int kExactVersion = 2;

constexpr int kTile = 48;        // places of a tile: weights and values are summed from 0 over one
constexpr int kChunkTiles = 16;  // tiles of a chunk: it has a state of its own
constexpr int kChunk = kChunkTiles * kTile;
constexpr int kDotChains = 8;     // of a product q . k: value d belongs to chain d % 8
constexpr int kWeightChains = 16; // of the sum of a tile's weights: a cell belongs to chain place % 16
constexpr float kRise = 16.0f;    // the reference moves only when a logit is above it by more than this (base 2)
constexpr float kLeastExponent = -125.0f; // 2^y below it is 0: no weight is ever denormal

// A logit that stands for "hidden": far below any real one, and sums with real ones stay below kHiddenLimit.
constexpr float kHidden = -1e30f;
constexpr float kHiddenLimit = -1e29f;

constexpr float kNotANumber = __builtin_nanf(""); // how a value that is not finite is given

// 2^r for r in [-0.5, 0.5]: the highest power's coefficient first, relative error 1e-7.
constexpr float kExp2[6] = {1.327647177e-3f, 9.675541333e-3f, 5.550713274e-2f, 2.402211972e-1f, 6.931469671e-1f, 1.000000072f};

// Always part of the caller: one copy that the linker keeps for all instruction sets could be one this machine lacks.
#define PA_ORDER __attribute__((always_inline)) inline

// A product that is not to become part of a fused multiply-add, however the host program is compiled.
PA_ORDER float apart(float x) {
#if defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    volatile float kept = x;
    x = kept;
#endif
    return x;
}

// 2^y for an integer y <= 127, 0 below kLeastExponent; NaN stays NaN.
PA_ORDER float power_of_two(float y) {
    if (y < kLeastExponent) return 0.0f;
    if (y != y) return y;
    const auto bits = static_cast<uint32_t>(static_cast<int32_t>(y) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

// 2^(x - m): x = n + r with n = x rounded to the nearest integer (ties to even), so for an integer m the digits depend on
// x alone and m is exact. A NaN stays one.
PA_ORDER float exp2_over(float x, float m) {
    const float n = __builtin_nearbyintf(x), y = n - m;
    if (y < kLeastExponent) return 0.0f;
    const float r = x - n;
    float p = kExp2[0];
    for (int i = 1; i < 6; i++) p = __builtin_fmaf(p, r, kExp2[i]);
    return p * power_of_two(y);
}

} // namespace paged_attn
