// All states of a row merged and divided: out = sum_s o_s 2^(m_s - m) / (sum_s l_s 2^(m_s - m) + sink).
//
// Grid: one block per row (query x head). Threads: d_v / 4 neighbours take four values each, and the groups of such
// neighbours share the slots; group g takes slots g, g + groups, ..., and the groups are added in order, so that the
// same slots give the same bits. States of the VRAM's pages, of staged pages and of the CPU are all just slots.
#pragma once
#include "paged_attn/attn_state.h"
#include "visible.cuh"

namespace paged_attn::gpu {

template <class I> struct CombineTile {
    static constexpr int kThreads = 256;
    static constexpr int kLanes = I::kDV / 4, kGroups = kThreads / kLanes;
    static constexpr int kMax = 0;             // f32 [threads]
    static constexpr int kDenominators = 1024; // f32 [groups]
    static constexpr int kSums = 2048;         // f32 [groups][d_v]
    static constexpr int kShared = kSums + kGroups * I::kDV * 4;
};

template <class I> PA_KERNEL void combine(const Combination &c) {
    using T = CombineTile<I>;
    char *shared = shared_memory();
    auto *maxima = reinterpret_cast<float *>(shared + T::kMax);
    auto *denominators = reinterpret_cast<float *>(shared + T::kDenominators);
    auto *sums = reinterpret_cast<float *>(shared + T::kSums);
    const int thread = thread_index(), row = block_x();
    const long long n_rows = c.n_rows;
    const float *m_of = c.slots.base + n_rows * I::kDV + row, *l_of = m_of + n_rows;
    const float *o_of = c.slots.base + static_cast<long long>(row) * I::kDV;

    float m = kEmptyM;
    for (int slot = thread; slot < c.n_slots; slot += T::kThreads) {
        const float m_slot = load_global(m_of + slot * c.slots.stride);
        m = m_slot > m ? m_slot : m;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other = shuffle_xor(m, mask);
        m = other > m ? other : m;
    }
    if (thread % 32 == 0) store_shared(maxima + thread / 32, m);
    sync_block(At::combine_max_ready);
    for (int warp = 0; warp < T::kThreads / 32; warp++) {
        const float m_warp = load_shared(maxima + warp);
        m = m_warp > m ? m_warp : m;
    }
    const float sink = c.sinks ? load_global(c.sinks + row % c.n_head) * kLog2e : kEmptyM;
    m = sink > m ? sink : m;

    const int group = thread / T::kLanes, lane = thread % T::kLanes;
    if (group < T::kGroups) {
        float l = 0.0f;
        Float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int slot = group; slot < c.n_slots; slot += T::kGroups) {
            const long long at = slot * c.slots.stride;
            const float weight = merge_weights(m, load_global(m_of + at)).b;
            const Float4 x = load_global(reinterpret_cast<const Float4 *>(o_of + at) + lane);
            l += load_global(l_of + at) * weight;
            if (weight > 0.0f) o = {o.x + x.x * weight, o.y + x.y * weight, o.z + x.z * weight, o.w + x.w * weight};
        }
        store_shared(reinterpret_cast<Float4 *>(sums + group * I::kDV) + lane, o);
        if (lane == 0) store_shared(denominators + group, l);
    }
    sync_block(At::combine_sums_ready);
    if (group != 0) return;
    float l = merge_weights(m, sink).b;
    Float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int g = 0; g < T::kGroups; g++) {
        l += load_shared(denominators + g);
        const Float4 x = load_shared(reinterpret_cast<const Float4 *>(sums + g * I::kDV) + lane);
        o = {o.x + x.x, o.y + x.y, o.z + x.z, o.w + x.w};
    }
    const float scale = inverse_or_zero(l);
    store_global(reinterpret_cast<Float4 *>(c.out + static_cast<long long>(row) * I::kDV) + lane,
                 Float4{o.x * scale, o.y * scale, o.z * scale, o.w * scale});
}

} // namespace paged_attn::gpu
