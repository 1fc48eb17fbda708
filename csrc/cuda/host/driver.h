// The part of the CUDA driver API that is used, as a table of functions: the real one comes from libcuda.so.1 at run
// time, so that this library builds and loads where there is no driver; tests bring one of their own.
#pragma once
#include "paged_attn/paged_attn_cuda.h"

#include <cstddef>
#include <string>

namespace paged_attn::gpu {

// cuda.h's types and values; its binary interface is fixed.
using CuResult = int;
using CuDevice = int;
using CuAddress = unsigned long long;
using CuContext = void *;
using CuModule = void *;
using CuFunction = void *;
using CuStream = void *;
using CuEvent = void *;
constexpr CuResult kCuSuccess = 0, kCuOutOfMemory = 2, kCuNoDevice = 100, kCuNoBinaryForGpu = 209, kCuNotFound = 500;
constexpr int kCuAttributeMultiprocessors = 16, kCuAttributeMajor = 75, kCuAttributeMinor = 76;
constexpr int kCuFunctionMaxDynamicShared = 8;
constexpr unsigned kCuStreamNonBlocking = 1, kCuEventDisableTiming = 2;
constexpr int kOldestDriver = 12000; // cuDriverGetVersion; images of NVRTC 12 need a driver of CUDA 12

// name, parameters. The names are those of the library, with their versions.
#define PA_DRIVER_FUNCTIONS(X)                                                                                         \
    X(cuInit, (unsigned flags))                                                                                        \
    X(cuDriverGetVersion, (int *version))                                                                              \
    X(cuGetErrorString, (CuResult error, const char **text))                                                           \
    X(cuDeviceGetCount, (int *count))                                                                                  \
    X(cuDeviceGet, (CuDevice * device, int ordinal))                                                                   \
    X(cuDeviceGetAttribute, (int *value, int attribute, CuDevice device))                                              \
    X(cuDevicePrimaryCtxRetain, (CuContext * context, CuDevice device))                                                \
    X(cuDevicePrimaryCtxRelease_v2, (CuDevice device))                                                                 \
    X(cuCtxPushCurrent_v2, (CuContext context))                                                                        \
    X(cuCtxPopCurrent_v2, (CuContext * context))                                                                       \
    X(cuModuleLoadData, (CuModule * module, const void *image))                                                        \
    X(cuModuleUnload, (CuModule module))                                                                               \
    X(cuModuleGetFunction, (CuFunction * function, CuModule module, const char *name))                                 \
    X(cuModuleGetGlobal_v2, (CuAddress * address, size_t * bytes, CuModule module, const char *name))                  \
    X(cuFuncSetAttribute, (CuFunction function, int attribute, int value))                                             \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                                     \
      (int *n_blocks, CuFunction function, int n_threads, size_t shared_bytes))                                        \
    X(cuMemAlloc_v2, (CuAddress * address, size_t bytes))                                                              \
    X(cuMemFree_v2, (CuAddress address))                                                                               \
    X(cuMemcpyDtoH_v2, (void *to, CuAddress from, size_t bytes))                                                       \
    X(cuMemcpyHtoDAsync_v2, (CuAddress to, const void *from, size_t bytes, CuStream stream))                           \
    X(cuLaunchKernel, (CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,       \
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream, void **parameters,  \
                       void **extra))                                                                                  \
    X(cuStreamCreate, (CuStream * stream, unsigned flags))                                                             \
    X(cuStreamDestroy_v2, (CuStream stream))                                                                           \
    X(cuStreamSynchronize, (CuStream stream))                                                                          \
    X(cuStreamWaitEvent, (CuStream stream, CuEvent event, unsigned flags))                                             \
    X(cuEventCreate, (CuEvent * event, unsigned flags))                                                                \
    X(cuEventRecord, (CuEvent event, CuStream stream))                                                                 \
    X(cuEventSynchronize, (CuEvent event))                                                                             \
    X(cuEventDestroy_v2, (CuEvent event))

struct Driver {
#define PA_DRIVER_FUNCTION(name, parameters) CuResult(*name) parameters = nullptr;
    PA_DRIVER_FUNCTIONS(PA_DRIVER_FUNCTION)
#undef PA_DRIVER_FUNCTION
};

// The driver of this machine; else why there is none to use.
pa_status load_driver(Driver &driver, std::string &why);

} // namespace paged_attn::gpu
