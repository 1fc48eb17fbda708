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

template <int ROWS> using Heads64 = Instance<64, 64, kF16, kF16, ROWS, 16, kArch>;

} // namespace

Image *find_image(const std::string &content) {
    static std::map<std::string, Image> all = {
        {"emulated 64x64 f16 rows1", image_of<Heads64<1>>()},
        {"emulated 64x64 f16 rows2", image_of<Heads64<2>>()},
        {"emulated 64x64 f16 rows5", image_of<Heads64<5>>()},
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
