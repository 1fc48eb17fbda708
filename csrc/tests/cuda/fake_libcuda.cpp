// A libcuda.so.1 without a GPU, for what uses the driver from outside: memory is the host's, streams run at once, and the
// kernels of the instances below run in the emulation, which looks at every access. LD_LIBRARY_PATH names its folder.
//
//     PA_FAKE_INIT=100            what cuInit answers (100: no GPU)
//     PA_FAKE_FAIL=cuLaunchKernel:3   from the third call on, 700 (an illegal address), as every call after it
//
// A graph that is captured runs while it is captured, and not again.
#include "cuda/host/driver.h"
#include "cuda/kernels.cuh"
#include "emulate/launch.h"

#include <chrono>
#include <cstdlib>
#include <map>

namespace paged_attn::gpu {
namespace {

constexpr int kArch = 80, kIllegalAddress = 700, kInvalidValue = 1;

struct FakeImage { // of one image
    ImageInfo info;
    std::map<std::string, std::function<void(void **)>> by_name;
};
struct Function {
    const std::function<void(void **)> *run;
};

template <class I> FakeImage kernels_of() {
    FakeImage k = {Kernels<I>::kInfo, {}};
    k.by_name["pa_decode"] = [](void **p) { decode<I>(*static_cast<Problem *>(p[0])); };
    k.by_name["pa_narrow"] = [](void **p) { narrow<I>(*static_cast<Problem *>(p[0])); };
    k.by_name["pa_wide"] = [](void **p) { wide<I>(*static_cast<Problem *>(p[0])); };
    k.by_name["pa_combine"] = [](void **p) { combine<I>(*static_cast<Combination *>(p[0])); };
    k.by_name["pa_bounds"] = [](void **p) {
        find_bounds(*static_cast<Mask *>(p[0]), *static_cast<int *>(p[1]), 128, *static_cast<CellBounds **>(p[2]));
    };
    return k;
}

std::vector<FakeImage> &images() {
    static std::vector<FakeImage> all = {kernels_of<Instance<64, 64, kF16, kF16, 5, 16, kArch>>(),
                                        kernels_of<Instance<64, 64, kQ8, kF16, 5, 4, kArch>>(),
                                        {{}, {{"pa_read", [](void **) {}}}}}; // read.cu: only its time is looked at
    return all;
}

struct State {
    std::map<char *, size_t> memory;
    std::map<std::string, int> n_calls;
    std::map<std::pair<const FakeImage *, std::string>, Function> functions;
    bool broken = false;
    uintptr_t last_handle = 0;
};
State &state() {
    static State s;
    return s;
}

CuResult enter(const char *call) {
    static const char *const fail = std::getenv("PA_FAKE_FAIL");
    State &s = state();
    const int n = ++s.n_calls[call];
    if (fail && std::string(fail) == std::string(call) + ":" + std::to_string(n)) s.broken = true;
    return s.broken ? kIllegalAddress : kCuSuccess;
}
#define PA_ENTER(call)                                                                                                 \
    if (const CuResult error = enter(#call); error != kCuSuccess) return error

void *new_handle() { return reinterpret_cast<void *>(++state().last_handle); }

bool is_device_memory(CuAddress at, size_t bytes) {
    char *p = reinterpret_cast<char *>(at);
    auto after = state().memory.upper_bound(p);
    if (after == state().memory.begin()) return false;
    --after;
    return p + bytes <= after->first + after->second;
}

size_t size_of(const char *elf) { // an ELF file ends with its table of sections
    uint64_t at = 0;
    uint16_t each = 0, n = 0;
    std::memcpy(&at, elf + 40, 8);
    std::memcpy(&each, elf + 58, 2);
    std::memcpy(&n, elf + 60, 2);
    return at + static_cast<size_t>(each) * n;
}

bool holds(const char *image, size_t bytes, const void *what, size_t n) {
    return memmem(image, bytes, what, n) != nullptr;
}

using Clock = std::chrono::steady_clock;
struct Event {
    Clock::time_point at;
};

} // namespace
} // namespace paged_attn::gpu

using namespace paged_attn::gpu;

extern "C" {

CuResult cuInit(unsigned) {
    const char *answer = std::getenv("PA_FAKE_INIT");
    return answer ? std::atoi(answer) : kCuSuccess;
}
CuResult cuDriverGetVersion(int *version) { return *version = 12090, kCuSuccess; }
CuResult cuGetErrorString(CuResult error, const char **text) {
    return *text = error == kIllegalAddress ? "an illegal memory access was encountered" : "fake error", kCuSuccess;
}
CuResult cuDeviceGetCount(int *n) { return *n = 1, kCuSuccess; }
CuResult cuDeviceGet(CuDevice *device, int ordinal) { return *device = ordinal, kCuSuccess; }
CuResult cuDeviceGetName(char *name, int n, CuDevice) { return std::snprintf(name, n, "emulation"), kCuSuccess; }
CuResult cuDeviceTotalMem_v2(size_t *bytes, CuDevice) { return *bytes = size_t{1} << 30, kCuSuccess; }
CuResult cuDeviceGetAttribute(int *value, int which, CuDevice) {
    *value = which == kCuAttributeMajor             ? kArch / 10
             : which == kCuAttributeMinor           ? kArch % 10
             : which == kCuAttributeMultiprocessors ? 3
                                                    : 1;
    return kCuSuccess;
}
CuResult cuDevicePrimaryCtxRetain(CuContext *context, CuDevice) { return *context = &state(), kCuSuccess; }
CuResult cuDevicePrimaryCtxRelease_v2(CuDevice) { return kCuSuccess; }
CuResult cuCtxSetCurrent(CuContext) { return kCuSuccess; }
CuResult cuCtxPushCurrent_v2(CuContext) { return kCuSuccess; }
CuResult cuCtxPopCurrent_v2(CuContext *) { return kCuSuccess; }

CuResult cuModuleLoadData(CuModule *module, const void *image) {
    PA_ENTER(cuModuleLoadData);
    const char *bytes = static_cast<const char *>(image);
    const size_t size = size_of(bytes);
    for (FakeImage &k : images()) {
        const bool found = k.info.version ? holds(bytes, size, &k.info, sizeof k.info) : holds(bytes, size, "pa_read", 7);
        if (found) return *module = &k, kCuSuccess;
    }
    std::fprintf(stderr, "fake libcuda: no such instance is compiled into it\n");
    return kCuNoBinaryForGpu;
}
CuResult cuModuleUnload(CuModule) { return kCuSuccess; }
CuResult cuModuleGetFunction(CuFunction *function, CuModule module, const char *name) {
    auto *k = static_cast<FakeImage *>(module);
    const auto found = k->by_name.find(name);
    if (found == k->by_name.end()) return kCuNotFound;
    Function &made = state().functions[{k, name}];
    made.run = &found->second;
    return *function = &made, kCuSuccess;
}
CuResult cuModuleGetGlobal_v2(CuAddress *at, size_t *bytes, CuModule module, const char *) {
    auto *k = static_cast<FakeImage *>(module);
    *at = reinterpret_cast<CuAddress>(&k->info);
    return *bytes = sizeof k->info, kCuSuccess;
}
CuResult cuFuncSetAttribute(CuFunction, int, int) { return kCuSuccess; }
CuResult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CuFunction, int, size_t) { return *n = 2, kCuSuccess; }

CuResult cuMemAlloc_v2(CuAddress *at, size_t bytes) {
    PA_ENTER(cuMemAlloc_v2);
    char *made = static_cast<char *>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    std::memset(made, 0xFF, bytes);
    state().memory[made] = bytes;
    return *at = reinterpret_cast<CuAddress>(made), kCuSuccess;
}
CuResult cuMemFree_v2(CuAddress at) {
    char *p = reinterpret_cast<char *>(at);
    if (!state().memory.erase(p)) return kInvalidValue;
    return std::free(p), kCuSuccess;
}
CuResult cuMemHostAlloc(void **p, size_t bytes, unsigned) {
    return *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256), kCuSuccess;
}
CuResult cuMemFreeHost(void *p) { return std::free(p), kCuSuccess; }
CuResult cuMemcpyHtoD_v2(CuAddress to, const void *from, size_t bytes) {
    PA_ENTER(cuMemcpyHtoD_v2);
    if (!is_device_memory(to, bytes)) return kInvalidValue;
    return std::memcpy(reinterpret_cast<void *>(to), from, bytes), kCuSuccess;
}
CuResult cuMemcpyHtoDAsync_v2(CuAddress to, const void *from, size_t bytes, CuStream) {
    return cuMemcpyHtoD_v2(to, from, bytes);
}
CuResult cuMemcpyDtoH_v2(void *to, CuAddress from, size_t bytes) { // pa_image, too, which is no allocation
    PA_ENTER(cuMemcpyDtoH_v2);
    return std::memcpy(to, reinterpret_cast<const void *>(from), bytes), kCuSuccess;
}
CuResult cuMemsetD8Async(CuAddress at, unsigned char x, size_t bytes, CuStream) {
    return std::memset(reinterpret_cast<void *>(at), x, bytes), kCuSuccess;
}

CuResult cuLaunchKernel(CuFunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                        unsigned shared, CuStream, void **parameters, void **) {
    PA_ENTER(cuLaunchKernel);
    emulate::Launch l = {};
    l.grid_x = static_cast<int>(x), l.grid_y = static_cast<int>(y), l.grid_z = static_cast<int>(z);
    l.n_threads = static_cast<int>(threads);
    l.shared_bytes = shared;
    l.arch = kArch;
    for (const auto &[begin, bytes] : state().memory) l.buffers.push_back({begin, begin + bytes});
    emulate::Findings findings;
    const auto *kernel = static_cast<const Function *>(function);
    if (x && y && z && threads % 32 == 0 && kernel->run != &images().back().by_name["pa_read"])
        emulate::launch(l, findings, [&] { (*kernel->run)(parameters); });
    for (const auto &text : findings.texts) std::fprintf(stderr, "fake libcuda: %s\n", text.c_str());
    state().broken = !findings.texts.empty();
    return state().broken ? kIllegalAddress : kCuSuccess;
}

CuResult cuStreamCreate(CuStream *stream, unsigned) { return *stream = new_handle(), kCuSuccess; }
CuResult cuStreamDestroy_v2(CuStream) { return kCuSuccess; }
CuResult cuStreamSynchronize(CuStream) {
    PA_ENTER(cuStreamSynchronize);
    return kCuSuccess;
}
CuResult cuStreamWaitEvent(CuStream, CuEvent, unsigned) { return kCuSuccess; }
CuResult cuStreamBeginCapture_v2(CuStream, int) { return kCuSuccess; }
CuResult cuStreamEndCapture(CuStream, void **graph) { return *graph = new_handle(), kCuSuccess; }
CuResult cuGraphInstantiateWithFlags(void **ready, void *, unsigned long long) {
    return *ready = new_handle(), kCuSuccess;
}
CuResult cuGraphLaunch(void *, CuStream) { return kCuSuccess; }
CuResult cuGraphExecDestroy(void *) { return kCuSuccess; }
CuResult cuGraphDestroy(void *) { return kCuSuccess; }

CuResult cuEventCreate(CuEvent *event, unsigned) { return *event = new Event, kCuSuccess; }
CuResult cuEventRecord(CuEvent event, CuStream) {
    return static_cast<Event *>(event)->at = Clock::now(), kCuSuccess;
}
CuResult cuEventSynchronize(CuEvent) { return kCuSuccess; }
CuResult cuEventElapsedTime(float *ms, CuEvent from, CuEvent to) {
    const auto took = static_cast<Event *>(to)->at - static_cast<Event *>(from)->at;
    *ms = std::chrono::duration<float, std::milli>(took).count() + 1e-3f;
    return kCuSuccess;
}
CuResult cuEventDestroy_v2(CuEvent event) { return delete static_cast<Event *>(event), kCuSuccess; }
}
