// One GPU: the driver's table, its primary context, and how errors become values.
#pragma once
#include "driver.h"
#include "paged_attn/paged_attn_cuda.h"

struct pa_cuda_device {
    paged_attn::gpu::Driver driver;
    paged_attn::gpu::CuDevice device = 0;
    paged_attn::gpu::CuContext context = nullptr;
    int arch = 0, n_multiprocessors = 0;
};

namespace paged_attn::gpu {

// Sets the sentence of this thread and answers `status`.
pa_status fail(pa_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

// PA_OK, or the driver's error with the name of the call.
pa_status checked(const Driver &driver, CuResult result, const char *call);

#define PA_TRY(expression)                                                                                             \
    do {                                                                                                               \
        if (const pa_status pa_try_status = (expression); pa_try_status != PA_OK) return pa_try_status;                \
    } while (false)
// A driver call by name, its result checked and named: PA_CALL(driver, cuEventRecord, event, stream).
#define PA_CALL(table, name, ...) ::paged_attn::gpu::checked(table, (table).name(__VA_ARGS__), #name)

// The device's context is current in this thread while this lives.
class Current {
public:
    explicit Current(const pa_cuda_device &device)
        : driver_(device.driver), status_(PA_CALL(driver_, cuCtxPushCurrent_v2, device.context)) {}
    ~Current() {
        CuContext popped = nullptr;
        if (status_ == PA_OK) driver_.cuCtxPopCurrent_v2(&popped);
    }
    Current(const Current &) = delete;
    pa_status status() const { return status_; }

private:
    const Driver &driver_;
    pa_status status_;
};

// pa_cuda_open with a given driver, which must outlive nothing: it is copied.
pa_status open_device(const Driver &driver, int ordinal, pa_cuda_device **device);

} // namespace paged_attn::gpu
