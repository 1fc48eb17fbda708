// The numbers that make a division a multiplication (Granlund and Montgomery 1994), exact for 0 <= i < 2^31.
#pragma once
#include "../problem.h"

namespace paged_attn::gpu {

inline Divisor make_divisor(unsigned n) { // 1 <= n < 2^31
    unsigned shift = 0;
    while (shift < 31 && (1u << shift) < n) shift++;
    const unsigned long long multiplier = ((1ull << 32) * ((1ull << shift) - n)) / n + 1;
    return {n, static_cast<unsigned>(multiplier), shift};
}

} // namespace paged_attn::gpu
