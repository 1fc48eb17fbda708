#include "driver.h"

#include <dlfcn.h>

namespace paged_attn::gpu {

const char *load_driver(Driver &driver, void *&library) {
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return "no NVIDIA driver here: libcuda.so.1 was not found";
#define PA_DRIVER_FUNCTION(name, parameters)                                                                           \
    driver.name = reinterpret_cast<CuResult(*) parameters>(dlsym(library, #name));                                     \
    if (!driver.name) {                                                                                                \
        unload_driver(library);                                                                                        \
        library = nullptr;                                                                                             \
        return "the NVIDIA driver is older than this code: it has no " #name;                                          \
    }
    PA_DRIVER_FUNCTIONS(PA_DRIVER_FUNCTION)
#undef PA_DRIVER_FUNCTION
    return nullptr;
}

void unload_driver(void *library) {
    if (library) dlclose(library);
}

} // namespace paged_attn::gpu
