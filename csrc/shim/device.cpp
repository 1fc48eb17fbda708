// The registry and the devices: the stock library's, wrapped.
#include "shim.h"

#include <dlfcn.h>
#include <cstdlib>
#include <cstring>

namespace shim {

namespace {

ggml_backend_reg_t stock_reg = nullptr;
std::vector<std::unique_ptr<Device>> devices;

// --- a device -------------------------------------------------------------------------------------------------------

ggml_backend_t init_backend(ggml_backend_dev_t outer, const char *params) {
    Device &device = device_of(outer);
    ggml_backend_t inner = device.inner->iface.init_backend(device.inner, params);
    return inner ? wrap_backend(device, inner) : nullptr;
}

bool supports_op(ggml_backend_dev_t outer, const ggml_tensor *op) {
    ggml_backend_dev_t inner = inner_of(outer);
    return serves(op) && inner->iface.supports_op(inner, op);
}

bool supports_buft(ggml_backend_dev_t outer, ggml_backend_buffer_type_t type) {
    ggml_backend_dev_t inner = inner_of(outer);
    return type == &device_of(outer).paged || inner->iface.supports_buft(inner, type);
}

// Ollama resets the devices that a model does not use. With CUDA that frees memory that was pinned while the device was
// current, for whichever device it is used: the stock library makes none current when it pins.
void reset(ggml_backend_dev_t outer) {
    ggml_backend_dev_t inner = inner_of(outer);
    if (const int count = paged_buffers()) {
        GGML_LOG_DEBUG("paged attention: %s is not reset while there are %d buffers of pinned K/V\n",
                       inner->iface.get_name(inner), count);
        return;
    }
    inner->iface.reset(inner);
}

// --- the registry ---------------------------------------------------------------------------------------------------

// What Ollama's side asks for by name (overlay ml/backend/ggml/kvpaged.go): the type of a device's paged buffers. With
// no_alloc its buffers are sizes only: a model's memory is measured before it is taken. `ahead` is for backends that
// are made from then on.
ggml_backend_buffer_type_t paged_buffer_type(ggml_backend_dev_t outer, bool no_alloc, bool ahead) {
    Device &device = device_of(outer);
    choose_engine(device); // only for a runner that asks for this type, and says in its namespace what computes
    device.paged.no_alloc = no_alloc;
    device.ahead = ahead;
    return device.inner->iface.get_host_buffer_type ? &device.paged : nullptr;
}

// Room on the device for mirrors of paged K/V (mirror.h), for graphs that are reserved from then on.
void set_mirror_bytes(ggml_backend_dev_t outer, size_t bytes) { device_of(outer).mirror_bytes = bytes; }

// What mirrors have taken of that room.
size_t mirrored_bytes(ggml_backend_dev_t outer) { return device_of(outer).mirrored; }

// What computes attention on a device instead of the stock library; "": nothing does.
const char *engine_name(ggml_backend_dev_t outer) { return device_of(outer).engine.name.c_str(); }

const char *reg_name(ggml_backend_reg_t) { return stock_reg->iface.get_name(stock_reg); }
size_t reg_count(ggml_backend_reg_t) { return devices.size(); }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t index) { return &devices.at(index)->outer; }
void *reg_proc(ggml_backend_reg_t, const char *name) {
    if (!std::strcmp(name, "kvpaged_buffer_type")) return reinterpret_cast<void *>(paged_buffer_type);
    if (!std::strcmp(name, "kvpaged_engine")) return reinterpret_cast<void *>(engine_name);
    if (!std::strcmp(name, "kvpaged_mirror_bytes")) return reinterpret_cast<void *>(set_mirror_bytes);
    if (!std::strcmp(name, "kvpaged_mirrored_bytes")) return reinterpret_cast<void *>(mirrored_bytes);
    return stock_reg->iface.get_proc_address ? stock_reg->iface.get_proc_address(stock_reg, name) : nullptr;
}

ggml_backend_reg_t open_stock() {
    Dl_info self;
    if (!dladdr(reinterpret_cast<void *>(&open_stock), &self)) return nullptr;
    std::string path(self.dli_fname);
    path = path.substr(0, path.rfind('/') + 1) + "libggml-cuda.so";
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        GGML_LOG_ERROR("paged attention: %s\n", dlerror());
        return nullptr;
    }
    auto init = reinterpret_cast<ggml_backend_init_t>(dlsym(library, "ggml_backend_init"));
    return init ? init() : nullptr;
}

} // namespace

Device &device_of(ggml_backend_dev_t outer) { return *static_cast<Device *>(outer->context); }
ggml_backend_dev_t inner_of(ggml_backend_dev_t outer) { return device_of(outer).inner; }

std::unique_ptr<Device> wrap_device(ggml_backend_dev_t inner, ggml_backend_reg_t reg, int ordinal) {
    using I = ggml_backend_device_i;
    auto device = std::make_unique<Device>();
    device->inner = inner;
    device->ordinal = ordinal;
    I &iface = device->outer.iface;
    forward<&I::get_name>(iface, inner->iface);
    forward<&I::get_description>(iface, inner->iface);
    forward<&I::get_memory>(iface, inner->iface);
    forward<&I::get_type>(iface, inner->iface);
    forward<&I::get_props>(iface, inner->iface);
    forward<&I::get_buffer_type>(iface, inner->iface);
    forward<&I::get_host_buffer_type>(iface, inner->iface);
    forward<&I::buffer_from_host_ptr>(iface, inner->iface);
    forward<&I::offload_op>(iface, inner->iface);
    forward<&I::event_new>(iface, inner->iface);
    forward<&I::event_free>(iface, inner->iface);
    forward<&I::event_synchronize>(iface, inner->iface);
    iface.init_backend = init_backend;
    iface.supports_op = supports_op;
    iface.supports_buft = supports_buft;
    if (inner->iface.reset) iface.reset = reset;
    device->outer.reg = reg;
    device->outer.context = device.get();
    make_paged_type(*device);
    return device;
}

} // namespace shim

extern "C" __attribute__((visibility("default"))) int ggml_backend_score(void) {
    const char *on = std::getenv("OLLAMA_PAGED_ATTN");
    return on && !std::strcmp(on, "1"); // 0: the loader takes the stock library, and lets go of this one
}

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    using namespace shim;
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {reg_name, reg_count, reg_device, reg_proc}, nullptr};
    if (stock_reg) return &reg;
    ggml_backend_reg_t stock = open_stock();
    if (!stock || stock->api_version != GGML_BACKEND_API_VERSION) return stock; // the loader says what is wrong
    stock_reg = stock;
    for (size_t i = 0; i < stock->iface.get_device_count(stock); i++) {
        devices.push_back(wrap_device(stock->iface.get_device(stock, i), &reg, static_cast<int>(i)));
    }
    return &reg;
}
