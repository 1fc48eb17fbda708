#include "driver.h"

#include <dlfcn.h>

namespace paged_attn::gpu {

// Never closed again: the driver has threads and thread-local memory of its own, which outlive every context.
pa_status load_driver(Driver &driver, std::string &why) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        why = "no NVIDIA driver here: libcuda.so.1 was not found";
        return PA_NO_DEVICE;
    }
#define PA_DRIVER_FUNCTION(name, parameters)                                                                           \
    driver.name = reinterpret_cast<CuResult(*) parameters>(dlsym(library, #name));                                     \
    if (!driver.name) {                                                                                                \
        why = "the NVIDIA driver is older than this code: it has no " #name;                                           \
        return PA_UNSUPPORTED;                                                                                         \
    }
    PA_DRIVER_FUNCTIONS(PA_DRIVER_FUNCTION)
#undef PA_DRIVER_FUNCTION
    return PA_OK;
}

} // namespace paged_attn::gpu
