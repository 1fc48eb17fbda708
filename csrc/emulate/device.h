// The names of port.cuh for g++: the kernels' code on the host, every access to memory checked.
#pragma once
#include "block.h"

#include <cmath>

#define PA_DEVICE inline
#define PA_KERNEL inline

namespace paged_attn::gpu {

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

PA_DEVICE emulate::Block &here() { return *emulate::Block::current; }
PA_DEVICE int thread_index() { return here().thread(); }
PA_DEVICE int block_x() { return here().x; }
PA_DEVICE int block_y() { return here().y; }
PA_DEVICE int block_z() { return here().z; }
PA_DEVICE char *shared_memory() { return here().shared(); }
PA_DEVICE void sync_block(At site) { here().sync_block(site); }

enum Meeting { kShuffle = 1000, kMatrices = 2000, kMultiply = 3000 }; // kinds of exchange; a shuffle adds its mask

PA_DEVICE float shuffle_xor(float x, int mask) {
    const int lane = thread_index() % 32, to = mask == here().mutant.shuffle_mask ? 0 : mask;
    return here().exchange(kShuffle + mask, x)[lane ^ to];
}

template <class T> PA_DEVICE T load_shared(const T *p) {
    here().read(p, sizeof(T));
    return *p;
}
template <class T> PA_DEVICE void store_shared(T *p, T x) {
    here().write(p, sizeof(T));
    *p = x;
}
template <class T> PA_DEVICE T load_global(const T *p) {
    const char *at = here().global(p, sizeof(T));
    return at ? *reinterpret_cast<const T *>(at) : T{};
}
template <class T> PA_DEVICE void store_global(T *p, T x) {
    if (const char *at = here().global(p, sizeof(T))) *reinterpret_cast<T *>(const_cast<char *>(at)) = x;
}
template <class T> PA_DEVICE T load_rows(const T *p) { return load_global(p); }

template <int SIZE> PA_DEVICE void copy_async(void *shared, const void *global, bool valid) {
    here().copy_async(shared, global, SIZE, valid);
}
PA_DEVICE void commit_async() { here().commit_async(); }
template <int PENDING> PA_DEVICE void wait_async(At site) { here().wait_async(PENDING, site); }

PA_DEVICE float as_float(unsigned x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
PA_DEVICE unsigned as_bits(float x) {
    unsigned u;
    std::memcpy(&u, &x, 4);
    return u;
}
PA_DEVICE float exp2_fast(float x) { return std::exp2(x); }
PA_DEVICE float f16_to_f32(unsigned short h) {
    const unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 0x3FFu;
    if (exponent == 31) return as_float(sign | 0x7F800000u | fraction << 13);
    if (exponent != 0) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -small : small;
}
PA_DEVICE unsigned short f32_to_f16(float f) {
    const unsigned sign = as_bits(f) >> 16 & 0x8000u;
    const float size = std::fabs(f);
    if (std::isnan(f)) return static_cast<unsigned short>(sign | 0x7E00u);
    if (size >= 65520.0f) return static_cast<unsigned short>(sign | 0x7C00u);
    if (size < 6.103515625e-5f) // below the smallest normal number: whole steps of 2^-24
        return static_cast<unsigned short>(sign | static_cast<unsigned>(std::nearbyint(std::ldexp(size, 24))));
    const unsigned bits = as_bits(size);
    const unsigned rounded = bits + 0xFFFu + (bits >> 13 & 1u);
    return static_cast<unsigned short>(sign | ((rounded >> 13) - (112u << 10)));
}
PA_DEVICE unsigned f32_to_bf16(float f) {
    const unsigned bits = as_bits(f);
    return std::isnan(f) ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
template <bool BF16> PA_DEVICE unsigned pack_pair(float a, float b) {
    if (BF16) return f32_to_bf16(a) | f32_to_bf16(b) << 16;
    return f32_to_f16(a) | static_cast<unsigned>(f32_to_f16(b)) << 16;
}
PA_DEVICE unsigned multiply_high(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}

template <bool TRANSPOSED> PA_DEVICE void load_matrices(unsigned (&r)[4], const void *row) {
    const auto *rows = here().exchange(kMatrices, row);
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    for (int j = 0; j < 4; j++) {
        const auto value = [&](int of_row, int column) -> unsigned {
            return load_shared(static_cast<const unsigned short *>(rows[8 * j + of_row]) + column);
        };
        r[j] = TRANSPOSED ? value(2 * t, g) | value(2 * t + 1, g) << 16 : value(g, 2 * t) | value(g, 2 * t + 1) << 16;
    }
}

template <bool BF16> PA_DEVICE float half_of(unsigned pair, int upper) {
    const unsigned short bits = static_cast<unsigned short>(upper ? pair >> 16 : pair & 0xFFFFu);
    return BF16 ? as_float(static_cast<unsigned>(bits) << 16) : f16_to_f32(bits);
}
template <bool BF16> PA_DEVICE void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Fragments {
        unsigned a[4], b[2];
    };
    const auto *of = here().exchange(kMultiply, Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + i % 2;
        float x[16], y[16];
        for (int k = 0; k < 16; k++) {
            const int across = k % 8 / 2; // the lane of four that holds value k
            x[k] = half_of<BF16>(of[g * 4 + across].a[i / 2 + (k >= 8 ? 2 : 0)], k % 2);
            y[k] = half_of<BF16>(of[column * 4 + across].b[k >= 8 ? 1 : 0], k % 2);
        }
        c[i] = emulate::add_products(here().tensor_core, c[i], x, y);
    }
}

} // namespace paged_attn::gpu
