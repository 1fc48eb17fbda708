// The recorder as libcuda.so.1, too: it takes images that are text, `version 2 64x64`, and computes nothing.
#include "recorder.h"

#include "cuda/host/driver.h"
#include "cuda/problem.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" Recorder *recorder(void);

using namespace paged_attn::gpu;

namespace {

constexpr CuResult kRefused = kCuOutOfMemory;

CuResult answer(const char *call) { return recorder()->refused == call ? kRefused : kCuSuccess; }
CuResult noted(const char *call) {
    recorder()->calls.push_back(call);
    return answer(call);
}

ImageInfo read_info(const std::string &image) {
    ImageInfo info = {};
    std::sscanf(image.c_str(), "version %d %dx%d", &info.version, &info.d_k, &info.d_v);
    info.k_type = info.v_type = PA_F16;
    info.row_align = 16;
    info.decode_rows = 2;
    info.wide_rows = 64;
    info.decode_threads = info.wide_threads = info.combine_threads = 128;
    info.problem_bytes = sizeof(Problem);
    info.combination_bytes = sizeof(Combination);
    info.mask_bytes = sizeof(Mask);
    return info;
}

} // namespace

#define PA_DRIVER_FUNCTION(name, parameters) extern "C" __attribute__((visibility("default"))) CuResult name parameters;
PA_DRIVER_FUNCTIONS(PA_DRIVER_FUNCTION)
#undef PA_DRIVER_FUNCTION

extern "C" {

CuResult cuInit(unsigned) { return answer("cuInit"); }
CuResult cuDriverGetVersion(int *version) { return *version = recorder()->driver, kCuSuccess; }
CuResult cuGetErrorString(CuResult, const char **text) { return *text = "refused", kCuSuccess; }
CuResult cuDeviceGetCount(int *count) { return *count = 2, kCuSuccess; }
CuResult cuDeviceGet(CuDevice *device, int ordinal) { return *device = ordinal, kCuSuccess; }
CuResult cuDeviceGetAttribute(int *value, int, CuDevice) { return *value = 8, kCuSuccess; }
CuResult cuDevicePrimaryCtxRetain(CuContext *context, CuDevice) {
    recorder()->contexts++;
    return *context = recorder(), kCuSuccess;
}
CuResult cuDevicePrimaryCtxRelease_v2(CuDevice) { return recorder()->contexts--, kCuSuccess; }
CuResult cuCtxPushCurrent_v2(CuContext) { return kCuSuccess; }
CuResult cuCtxPopCurrent_v2(CuContext *) { return kCuSuccess; }

CuResult cuModuleLoadData(CuModule *module, const void *image) {
    recorder()->loaded.push_back(static_cast<const char *>(image));
    return *module = new ImageInfo(read_info(recorder()->loaded.back())), answer("cuModuleLoadData");
}
CuResult cuModuleUnload(CuModule module) { return delete static_cast<ImageInfo *>(module), kCuSuccess; }
CuResult cuModuleGetFunction(CuFunction *function, CuModule module, const char *) { return *function = module, kCuSuccess; }
CuResult cuModuleGetGlobal_v2(CuAddress *address, size_t *bytes, CuModule module, const char *) {
    return *address = reinterpret_cast<CuAddress>(module), *bytes = sizeof(ImageInfo), kCuSuccess;
}
CuResult cuFuncSetAttribute(CuFunction, int, int) { return kCuSuccess; }
CuResult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CuFunction, int, size_t) { return *blocks = 1, kCuSuccess; }

CuResult cuMemAlloc_v2(CuAddress *address, size_t bytes) {
    *address = 0;
    if (const CuResult bad = noted("cuMemAlloc")) return bad;
    return *address = reinterpret_cast<CuAddress>(std::malloc(bytes)), kCuSuccess;
}
CuResult cuMemFree_v2(CuAddress address) { return std::free(reinterpret_cast<void *>(address)), noted("cuMemFree"); }
CuResult cuMemcpyDtoH_v2(void *to, CuAddress from, size_t bytes) {
    return std::memcpy(to, reinterpret_cast<const void *>(from), bytes), kCuSuccess;
}
CuResult cuMemcpyHtoDAsync_v2(CuAddress, const void *, size_t, CuStream) { return kCuSuccess; }
CuResult cuLaunchKernel(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream stream,
                        void **, void **) {
    return noted(stream ? "cuLaunchKernel" : "cuLaunchKernel in the default stream");
}

CuResult cuStreamCreate(CuStream *stream, unsigned) {
    *stream = nullptr;
    if (const CuResult bad = noted("cuStreamCreate")) return bad;
    return *stream = recorder(), kCuSuccess;
}
CuResult cuStreamDestroy_v2(CuStream) { return noted("cuStreamDestroy"); }
CuResult cuStreamSynchronize(CuStream) { return kCuSuccess; }
CuResult cuStreamWaitEvent(CuStream, CuEvent, unsigned) { return kCuSuccess; }
CuResult cuEventCreate(CuEvent *event, unsigned) { return *event = nullptr, kCuSuccess; }
CuResult cuEventRecord(CuEvent, CuStream) { return kCuSuccess; }
CuResult cuEventSynchronize(CuEvent) { return kCuSuccess; }
CuResult cuEventDestroy_v2(CuEvent) { return kCuSuccess; }
}
