// How a tensor core adds: products and the sum so far, brought to one exponent, cut off, added, cut off again.
//
// Products are exact. All terms of a step are shifted to the largest exponent among them and lose what lies below the last
// kept bit; the sum of what is left is exact and is cut to f32, towards zero. What differs from chip to chip is how many
// products a step takes and how many bits are kept below f32's: after Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior
// of NVIDIA tensor cores" (2021) for V100, T4 and A100, and the bit-level models published since for Ada and H100. For
// chips that nobody has published on, the coarsest of their neighbours.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace paged_attn::gpu::emulate {

struct TensorCore {
    int step;       // products that are added at once
    int extra_bits; // kept below f32's 24
};

inline TensorCore tensor_core_of(int arch) { // compute capability x 10
    if (arch < 80) return {4, 0};
    return arch == 90 ? TensorCore{16, 2} : TensorCore{8, 1};
}

inline int exponent_of(double x) { // of a normal number; f32 products are never below f64's normal numbers
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return static_cast<int>(bits >> 52 & 0x7FF) - 1023;
}
inline double power_of_two(int exponent) { // in f64's normal range
    const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}
inline float cut_to_f32(double x) { // towards zero
    const float f = static_cast<float>(x);
    return std::fabs(static_cast<double>(f)) > std::fabs(x) ? std::nextafter(f, 0.0f) : f;
}

// c + the sum of a[i] * b[i], i < 16.
inline float add_products(const TensorCore &core, float c, const float (&a)[16], const float (&b)[16]) {
    for (int first = 0; first < 16; first += core.step) {
        double terms[17];
        terms[0] = c;
        int largest = c != 0.0f ? exponent_of(c) : -1000;
        bool finite = std::isfinite(c);
        for (int i = 0; i < core.step; i++) {
            const float x = a[first + i], y = b[first + i];
            terms[i + 1] = static_cast<double>(x) * y;
            finite = finite && std::isfinite(terms[i + 1]);
            if (x == 0.0f || y == 0.0f) continue;
            const int exponent = exponent_of(x) + exponent_of(y); // not normalised: the product is below 4
            largest = exponent > largest ? exponent : largest;
        }
        double sum = 0.0;
        if (!finite || largest == -1000) {
            for (int i = 0; i <= core.step; i++) sum += terms[i];
        } else {
            const int last = largest - 23 - core.extra_bits;
            const double unit = power_of_two(last), per_unit = power_of_two(-last);
            for (int i = 0; i <= core.step; i++) sum += std::trunc(terms[i] * per_unit) * unit;
        }
        c = cut_to_f32(sum);
    }
    return c;
}

} // namespace paged_attn::gpu::emulate
