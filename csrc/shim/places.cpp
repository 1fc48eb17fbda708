// Page tables on the device, for as long as its backend lives: what lies where it lay before is not copied again. For a
// model that answers that is nothing, token after token; where a window moves it is one entry.
#include "exact.h"

#include "../cuda/host/device.h"

namespace shim {

using namespace paged_attn::gpu;

namespace {

constexpr unsigned kPlaces = 1024; // address of K, address of V
constexpr size_t kPlaceBytes = 2 * sizeof(void *);

} // namespace

pa_status Places::open(pa_cuda_device *gpu) {
    gpu_ = gpu;
    return PA_CALL(gpu->driver, cuMemAlloc_v2, &table_, kPlaces * kPlaceBytes);
}

void Places::close() {
    if (table_) gpu_->driver.cuMemFree_v2(table_);
    table_ = 0;
    known_.clear();
}

// An entry that is written over was read by kernels of the same stream, which come before the copy.
pa_status Places::find(const void *k, const void *v, void *stream, const void *const **entry) {
    const std::pair<const void *, const void *> wanted(k, v);
    auto at = known_.find(wanted);
    if (at == known_.end()) {
        if (known_.size() == kPlaces) known_.clear();
        const unsigned long long to = table_ + known_.size() * kPlaceBytes;
        const void *addresses[2] = {k, v};
        // the driver takes what is not pinned at once
        PA_TRY(PA_CALL(gpu_->driver, cuMemcpyHtoDAsync_v2, to, addresses, kPlaceBytes, stream));
        at = known_.emplace(wanted, to).first;
    }
    *entry = reinterpret_cast<const void *const *>(at->second);
    return PA_OK;
}

} // namespace shim
