#include "kernels.h"
#include "../memory.h"
#include "../settings.h"

#include "cuda/kernels.cuh"
#include "emulate/launch.h"

#include <mutex>

namespace fakegpu {
namespace {

using namespace paged_attn::gpu;

template <class Argument> Kernel kernel_of(void (*threads)(const Argument &)) {
    return {[threads](void **parameters) -> std::function<void()> {
        return [threads, argument = *static_cast<const Argument *>(parameters[0])] { threads(argument); };
    }};
}

template <class I> Image image_of() {
    Image image = {Kernels<I>::kInfo, {}};
    image.kernels["pa_decode"] = kernel_of<Problem>(decode<I>);
    image.kernels["pa_narrow"] = kernel_of<Problem>(narrow<I>);
    image.kernels["pa_wide"] = kernel_of<Problem>(wide<I>);
    image.kernels["pa_combine"] = kernel_of<Combination>(combine<I>);
    image.kernels["pa_bounds"] = {}; // of masks by position, which nobody here gives
    return image;
}

template <int D_K, int D_V, RowType K, RowType V, int ROWS, int ALIGN>
constexpr auto make = image_of<Instance<D_K, D_V, K, V, ROWS, ALIGN, kArch>>;

} // namespace

Image *find_image(const std::string &content) {
    static std::map<std::string, Image> all = {
        {"emulated 64x64-f16-f16-rows1-align16", make<64, 64, kF16, kF16, 1, 16>()},
        {"emulated 64x64-f16-f16-rows2-align16", make<64, 64, kF16, kF16, 2, 16>()},
        {"emulated 64x64-f16-f16-rows5-align16", make<64, 64, kF16, kF16, 5, 16>()},
        {"emulated 64x64-q8_0-q8_0-rows2-align4", make<64, 64, kQ8, kQ8, 2, 4>()},
        {"emulated 96x96-q8_0-q8_0-rows2-align2", make<96, 96, kQ8, kQ8, 2, 2>()},
        {"emulated 64x64-q8_0-q4_0-rows2-align4", make<64, 64, kQ8, kQ4, 2, 4>()},
        {"emulated 256x256-f16-f16-rows2-align16", make<256, 256, kF16, kF16, 2, 16>()},
        {"emulated 256x256-q8_0-q8_0-rows2-align4", make<256, 256, kQ8, kQ8, 2, 4>()},
        {"emulated 192x128-f16-f16-rows1-align16", make<192, 128, kF16, kF16, 1, 16>()},
    };
    const auto found = all.find(content);
    return found == all.end() ? nullptr : &found->second;
}

// One at a time: the emulation has one block, whoever runs it.
void run_kernel(int device, const Grid &grid, const std::function<void()> &threads) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    emulate::Launch launch = {};
    launch.grid_x = static_cast<int>(grid.x);
    launch.grid_y = static_cast<int>(grid.y);
    launch.grid_z = static_cast<int>(grid.z);
    launch.n_threads = static_cast<int>(grid.threads);
    launch.shared_bytes = grid.shared_bytes;
    launch.arch = kArch;
    for (const Reachable &range : reachable_by(device))
        launch.buffers.push_back({range.address, range.address + range.bytes, range.memory - range.address});
    emulate::Findings findings;
    emulate::launch(launch, findings, threads);
    for (const std::string &text : findings.texts) fault("device %d: a kernel of csrc's: %s", device, text.c_str());
}

} // namespace fakegpu
