// All kernels of an instance, and what the host must know to launch them.
#pragma once
#include "combine.cuh"
#include "decode.cuh"
#include "tile_fma.cuh"
#include "tile_mma.cuh"

namespace paged_attn::gpu {

// 16 rows; only where tensor cores serve the instance.
template <class I> PA_KERNEL void narrow(const Problem &p) {
    if constexpr (I::kHasMma) tile_mma<I, false>(p);
}

template <class I> PA_KERNEL void wide(const Problem &p) {
    if constexpr (I::kHasMma) tile_mma<I, true>(p);
    else tile_fma<I>(p);
}

template <class I> struct Kernels {
    static constexpr bool kMma = I::kHasMma;
    using Narrow = MmaTile<I, false>;
    using Wide = MmaTile<I, true>;
    // Sums in the state are cut off towards zero at every step, which adds up: with the published models of the chips'
    // rounding 4e-5 after 8192 cells of a warp, twice that after 16384 (docs/attention/kernels-cuda.md). sm_75 cuts coarser.
    static constexpr int kMostCells = I::kArch < 80 ? 4096 : 8192;
    static constexpr int kNarrowThreads = Narrow::kThreads;
    static constexpr int kWideThreads = kMma ? Wide::kThreads : FmaTile<I>::kThreads;
    static constexpr ImageInfo kInfo = {kImageVersion,
                                        I::kArch,
                                        I::kDK,
                                        I::kDV,
                                        I::kK,
                                        I::kV,
                                        I::kAlign,
                                        I::kRows,
                                        DecodeTile<I>::kThreads,
                                        DecodeTile<I>::kShared,
                                        kMma ? Narrow::kRows : 0,
                                        kMma ? kNarrowThreads : 0,
                                        kMma ? Narrow::kShared : 0,
                                        kMma ? Wide::kRows : FmaTile<I>::kRows,
                                        kWideThreads,
                                        kMma ? Wide::kShared : FmaTile<I>::kShared,
                                        CombineTile<I>::kThreads,
                                        CombineTile<I>::kShared,
                                        kMma && !Wide::kSumsApart ? kMostCells : 0,
                                        sizeof(Problem),
                                        sizeof(Combination),
                                        sizeof(Mask)};
    // what a block may have: 48 KiB everywhere, more on request
    static constexpr int kMostShared = I::kArch == 75                      ? 65536
                                       : I::kArch == 80                    ? 163 * 1024
                                       : I::kArch == 90 || I::kArch == 100 ? 227 * 1024
                                       : I::kArch >= 80                    ? 99 * 1024
                                       : I::kArch == 70                    ? 96 * 1024
                                                                           : 48 * 1024;
    static_assert(kInfo.decode_shared <= kMostShared && kInfo.narrow_shared <= kMostShared &&
                      kInfo.wide_shared <= kMostShared && kInfo.combine_shared <= 48 * 1024,
                  "a block's shared memory");
};

} // namespace paged_attn::gpu
