// One image: the kernels for one combination of head sizes, data types and rows of a decode block.
//
// Compiled once per combination and compute capability (ollama_tiering/kernels/nvrtc.py, or nvcc -cubin) with
//     -DPA_D_K=128 -DPA_D_V=128 -DPA_K_TYPE=1 -DPA_V_TYPE=1 -DPA_ROWS=5 -DPA_ALIGN=16 -I csrc/include
#include "kernels.cuh"

namespace paged_attn::gpu {

#if defined(__CUDA_ARCH__)
using Built = Instance<PA_D_K, PA_D_V, static_cast<RowType>(PA_K_TYPE), static_cast<RowType>(PA_V_TYPE), PA_ROWS,
                       PA_ALIGN, PA_ARCH>;

extern "C" {

__global__ void __launch_bounds__(DecodeTile<Built>::kThreads, 1) pa_decode(const Problem p) { decode<Built>(p); }

__global__ void __launch_bounds__(CombineTile<Built>::kThreads) pa_combine(const Combination c) { combine<Built>(c); }

__global__ void __launch_bounds__(128) pa_bounds(const Mask mask, int n_cells, CellBounds *bounds) {
    find_bounds(mask, n_cells, 128, bounds);
}

__global__ void __launch_bounds__(Kernels<Built>::kNarrowThreads, 1) pa_narrow(const Problem p) { narrow<Built>(p); }

__global__ void __launch_bounds__(Kernels<Built>::kWideThreads, 1) pa_wide(const Problem p) { wide<Built>(p); }

__constant__ ImageInfo pa_image = Kernels<Built>::kInfo;
}
#endif

} // namespace paged_attn::gpu
