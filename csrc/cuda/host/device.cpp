#include "device.h"

#include <cstdarg>
#include <cstdio>
#include <new>
#include <string>

namespace paged_attn::gpu {
namespace {

thread_local char error_text[512] = "";

} // namespace

pa_status fail(pa_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return status;
}

pa_status checked(const Driver &driver, CuResult result, const char *call) {
    if (result == kCuSuccess) return PA_OK;
    const char *text = nullptr;
    if (driver.cuGetErrorString(result, &text) != kCuSuccess || !text) text = "an error without a name";
    const pa_status status = result == kCuOutOfMemory ? PA_OUT_OF_MEMORY : PA_DEVICE_ERROR;
    return fail(status, "%s: %s (%d)", call, text, result);
}

pa_status open_device(const Driver &driver, int ordinal, pa_cuda_device **device) {
    *device = nullptr;
    const CuResult started = driver.cuInit(0);
    if (started == kCuNoDevice) return fail(PA_NO_DEVICE, "the NVIDIA driver finds no GPU (cuInit: %d)", started);
    PA_TRY(checked(driver, started, "the NVIDIA driver does not start: cuInit"));
    int version = 0, count = 0;
    PA_TRY(PA_CALL(driver, cuDriverGetVersion, &version));
    if (version < kOldestDriver)
        return fail(PA_UNSUPPORTED, "the NVIDIA driver is older than this code: it is for CUDA %d.%d, %d.%d is needed",
                    version / 1000, version % 1000 / 10, kOldestDriver / 1000, kOldestDriver % 1000 / 10);
    PA_TRY(PA_CALL(driver, cuDeviceGetCount, &count));
    if (ordinal < 0 || ordinal >= count) return fail(PA_NO_DEVICE, "no GPU %d: this machine has %d", ordinal, count);
    auto *made = new (std::nothrow) pa_cuda_device;
    if (!made) return fail(PA_OUT_OF_MEMORY, "no memory for a device");
    made->driver = driver;
    int major = 0, minor = 0;
    pa_status status = PA_CALL(driver, cuDeviceGet, &made->device, ordinal);
    if (status == PA_OK) status = PA_CALL(driver, cuDeviceGetAttribute, &major, kCuAttributeMajor, made->device);
    if (status == PA_OK) status = PA_CALL(driver, cuDeviceGetAttribute, &minor, kCuAttributeMinor, made->device);
    if (status == PA_OK)
        status =
            PA_CALL(driver, cuDeviceGetAttribute, &made->n_multiprocessors, kCuAttributeMultiprocessors, made->device);
    if (status == PA_OK) status = PA_CALL(driver, cuDevicePrimaryCtxRetain, &made->context, made->device);
    if (status != PA_OK) {
        delete made;
        return status;
    }
    made->arch = major * 10 + minor;
    *device = made;
    return PA_OK;
}

} // namespace paged_attn::gpu

using namespace paged_attn::gpu;

const char *pa_cuda_last_error(void) { return error_text; }

pa_status pa_cuda_open(int32_t ordinal, pa_cuda_device **device) {
    if (!device) return fail(PA_BAD_ARGUMENT, "null where the device's handle goes");
    *device = nullptr;
    Driver driver;
    std::string why;
    if (const pa_status status = load_driver(driver, why); status != PA_OK) return fail(status, "%s", why.c_str());
    return open_device(driver, ordinal, device);
}

int32_t pa_cuda_arch(const pa_cuda_device *device) { return device->arch; }
int32_t pa_cuda_multiprocessors(const pa_cuda_device *device) { return device->n_multiprocessors; }

pa_status pa_cuda_synchronize(pa_cuda_device *device, void *stream) {
    if (!device) return fail(PA_BAD_ARGUMENT, "no device");
    const Current current(*device);
    PA_TRY(current.status());
    return PA_CALL(device->driver, cuStreamSynchronize, stream);
}

void pa_cuda_close(pa_cuda_device *device) {
    if (!device) return;
    device->driver.cuDevicePrimaryCtxRelease_v2(device->device);
    delete device;
}
