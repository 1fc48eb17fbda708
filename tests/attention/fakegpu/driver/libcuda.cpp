// The part of the CUDA driver that csrc/cuda/host uses, of the fake GPU: the same memory, streams and events that GGML's side
// has (backend.cpp), as the runtime and the driver share them. A link libcuda.so.1 to the library beside it makes it the
// driver: the loader knows that it is the same file.
//
// PA_DRIVER_FUNCTIONS (csrc/cuda/host/driver.h) says what there is. Whatever is called wrongly is a fault.
#include "../device.h"
#include "../settings.h"
#include "kernels.h"

#include "cuda/host/driver.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace fakegpu {
namespace {

using namespace paged_attn::gpu;

constexpr CuResult kLaunchFailed = 719;
constexpr int kBlocksEach = 2; // of a multiprocessor

// A function of a module, which lives for as long as the process does.
struct Function {
    const Kernel *kernel;
    std::string name;
};

std::vector<Device *> &contexts() { // of this thread, the last one is current
    thread_local std::vector<Device *> pushed;
    return pushed;
}
Device &current(const char *call) {
    if (contexts().empty()) fault("%s without a current context", call);
    return *contexts().back();
}

Stream &stream_of(CuStream stream) { return *static_cast<Stream *>(stream); }
Event &event_of(CuEvent event) { return *static_cast<Event *>(event); }
void *pointer(CuAddress address) { return reinterpret_cast<void *>(address); }

} // namespace
} // namespace fakegpu

using namespace fakegpu;
using namespace paged_attn::gpu;

#define PA_DRIVER_FUNCTION(name, parameters) extern "C" __attribute__((visibility("default"))) CuResult name parameters;
PA_DRIVER_FUNCTIONS(PA_DRIVER_FUNCTION)
#undef PA_DRIVER_FUNCTION

extern "C" {

// ---- devices and contexts

CuResult cuInit(unsigned) { return kCuSuccess; }
CuResult cuDriverGetVersion(int *version) { return *version = 13000, kCuSuccess; }
CuResult cuGetErrorString(CuResult error, const char **text) {
    *text = error == kLaunchFailed ? "unspecified launch failure" : error == kCuOutOfMemory ? "out of memory" : "fake error";
    return kCuSuccess;
}
CuResult cuDeviceGetCount(int *count) { return *count = static_cast<int>(devices().size()), kCuSuccess; }
CuResult cuDeviceGet(CuDevice *device, int ordinal) { return *device = ordinal, kCuSuccess; }
CuResult cuDeviceGetAttribute(int *value, int which, CuDevice) {
    const int multiprocessors = static_cast<int>(settings().multiprocessors);
    *value = which == kCuAttributeMajor ? kArch / 10 : which == kCuAttributeMinor ? kArch % 10 : multiprocessors;
    return kCuSuccess;
}
CuResult cuDevicePrimaryCtxRetain(CuContext *context, CuDevice device) {
    return *context = devices().at(static_cast<size_t>(device)).get(), kCuSuccess;
}
CuResult cuDevicePrimaryCtxRelease_v2(CuDevice) { return kCuSuccess; }
CuResult cuCtxPushCurrent_v2(CuContext context) {
    contexts().push_back(static_cast<Device *>(context));
    return kCuSuccess;
}
CuResult cuCtxPopCurrent_v2(CuContext *context) {
    *context = &current("cuCtxPopCurrent");
    contexts().pop_back();
    return kCuSuccess;
}

// ---- images

CuResult cuModuleLoadData(CuModule *module, const void *image) {
    const std::string content = static_cast<const char *>(image);
    *module = find_image(content.substr(0, content.find('\n')));
    return *module ? kCuSuccess : kCuNoBinaryForGpu;
}
CuResult cuModuleUnload(CuModule) { return kCuSuccess; }
CuResult cuModuleGetFunction(CuFunction *function, CuModule module, const char *name) {
    auto &kernels = static_cast<Image *>(module)->kernels;
    const auto found = kernels.find(name);
    if (found == kernels.end()) return kCuNotFound;
    return *function = new Function{&found->second, name}, kCuSuccess;
}
CuResult cuModuleGetGlobal_v2(CuAddress *address, size_t *bytes, CuModule module, const char *) {
    auto &info = static_cast<Image *>(module)->info;
    *address = reinterpret_cast<CuAddress>(&info);
    return *bytes = sizeof info, kCuSuccess;
}
CuResult cuFuncSetAttribute(CuFunction, int, int) { return kCuSuccess; }
CuResult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CuFunction, int, size_t) {
    return *blocks = kBlocksEach, kCuSuccess;
}

// ---- memory

CuResult cuMemAlloc_v2(CuAddress *address, size_t bytes) {
    void *made = current("cuMemAlloc").memory.allocate(bytes);
    *address = reinterpret_cast<CuAddress>(made);
    return made ? kCuSuccess : kCuOutOfMemory;
}
CuResult cuMemFree_v2(CuAddress address) {
    Device &device = current("cuMemFree");
    device.synchronize();
    device.memory.release(pointer(address));
    return kCuSuccess;
}
CuResult cuMemcpyDtoH_v2(void *to, CuAddress from, size_t bytes) {
    Place place;
    const void *read = find(pointer(from), bytes, &place) ? place.bytes : pointer(from); // else what an image says of itself
    std::memcpy(to, read, bytes);
    return kCuSuccess;
}
CuResult cuMemcpyHtoDAsync_v2(CuAddress to, const void *from, size_t bytes, CuStream stream) {
    char *target = bytes_at(pointer(to), bytes, "cuMemcpyHtoDAsync");
    const auto *first = static_cast<const char *>(from);
    say("device %d: %zu bytes copied by the driver", current("cuMemcpyHtoDAsync").number, bytes);
    stream_of(stream).put([target, copy = std::vector<char>(first, first + bytes)] {
        std::memcpy(target, copy.data(), copy.size());
    });
    return kCuSuccess;
}

// ---- launches

CuResult cuLaunchKernel(CuFunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                        unsigned shared_bytes, CuStream stream, void **parameters, void **) {
    static std::mutex mutex;
    static long launches = 0;
    const auto &launched = *static_cast<const Function *>(function);
    const int device = current("cuLaunchKernel").number;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const std::vector<long> &failing = settings().failing_launches;
        if (std::find(failing.begin(), failing.end(), ++launches) != failing.end()) return kLaunchFailed;
        say("device %d: kernel %s of %u x %u x %u blocks", device, launched.name.c_str(), x, y, z);
    }
    const Grid grid = {x, y, z, threads, shared_bytes};
    stream_of(stream).put([device, grid, run = launched.kernel->take(parameters)] { run_kernel(device, grid, run); });
    return kCuSuccess;
}

// ---- streams and events: GGML's are the same objects

CuResult cuStreamCreate(CuStream *stream, unsigned) {
    Device &device = current("cuStreamCreate");
    std::lock_guard<std::mutex> lock(device.mutex);
    auto *made = new Stream(device.number, device.streams_made++);
    device.streams.insert(made);
    return *stream = made, kCuSuccess;
}
CuResult cuStreamDestroy_v2(CuStream stream) {
    Device &device = current("cuStreamDestroy");
    stream_of(stream).synchronize();
    {
        std::lock_guard<std::mutex> lock(device.mutex);
        device.streams.erase(&stream_of(stream));
    }
    delete &stream_of(stream);
    return kCuSuccess;
}
CuResult cuStreamSynchronize(CuStream stream) { return stream_of(stream).synchronize(), kCuSuccess; }
CuResult cuStreamWaitEvent(CuStream stream, CuEvent event, unsigned) {
    return event_of(event).wait(stream_of(stream)), kCuSuccess;
}
CuResult cuEventCreate(CuEvent *event, unsigned) { return *event = new Event, kCuSuccess; }
CuResult cuEventRecord(CuEvent event, CuStream stream) {
    return event_of(event).record(stream_of(stream)), kCuSuccess;
}
CuResult cuEventSynchronize(CuEvent event) { return event_of(event).synchronize(), kCuSuccess; }
CuResult cuEventDestroy_v2(CuEvent event) { return delete &event_of(event), kCuSuccess; }
}
