// A GPU that is not there: a backend library of GGML, as libggml-cuda.so is, whose devices have as much memory as a test
// chooses and compute with GGML's own CPU library, so that results are that library's bits. What it cannot show is what
// silicon does: kernels, their speed, CUDA graphs, the driver.
#include "device.h"
#include "settings.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

namespace fakegpu {
namespace {

const char *device_name(ggml_backend_dev_t device) { return device_of(device).name.c_str(); }

const char *description(ggml_backend_dev_t) { return "Fake GPU"; }

// Of this process: what others use does not count.
void get_memory(ggml_backend_dev_t device, size_t *free, size_t *total) {
    *total = device_of(device).memory.total();
    *free = *total - device_of(device).memory.used();
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void properties(ggml_backend_dev_t device, ggml_backend_dev_props *props) {
    *props = {};
    props->name = device_name(device);
    props->description = description(device);
    props->id = device_of(device).id.c_str();
    props->type = device_type(device);
    props->device_id = device_of(device).pci.c_str();
    get_memory(device, &props->memory_free, &props->memory_total);
    props->caps.async = props->caps.host_buffer = props->caps.events = true;
    props->driver_major = 13;
    props->compute_major = 8;
    props->compute_minor = 9;
    props->library = "CUDA";
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char *) { return new_backend(device); }

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t device) { return &device_of(device).buffer_type; }

ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t) { return pinned_buffer_type(); }

// What the CPU can, unless a source lies in another device's memory.
bool supports_op(ggml_backend_dev_t device, const ggml_tensor *op) {
    for (const ggml_tensor *source : op->src) {
        ggml_backend_buffer_type_t lies_in = source && source->buffer ? source->buffer->buft : nullptr;
        if (lies_in && is_device_buffer_type(lies_in) && lies_in->device != device) return false;
    }
    return cpu_device()->iface.supports_op(cpu_device(), op);
}

bool supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return is_device_buffer_type(type) && type->device == device;
}

// As CUDA's: what has large batches is worth copying its weights for.
bool offload_op(ggml_backend_dev_t, const ggml_tensor *op) {
    constexpr int64_t kLeast = 32;
    switch (op->op) {
    case GGML_OP_GET_ROWS: return false;
    case GGML_OP_MUL_MAT: return op->ne[1] >= kLeast;
    case GGML_OP_MUL_MAT_ID: return op->ne[2] >= kLeast;
    default: return ggml_nrows(op) >= kLeast;
    }
}

ggml_backend_event_t new_event(ggml_backend_dev_t device) { return new ggml_backend_event{device, new Event}; }

void free_event(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete &event_of(event);
    delete event;
}

void synchronize_event(ggml_backend_dev_t, ggml_backend_event_t event) { event_of(event).synchronize(); }

// cudaDeviceReset frees all of the device's memory, whoever uses it.
void reset(ggml_backend_dev_t device) {
    if (const size_t used = device_of(device).memory.used())
        fault("device %d is reset while %zu bytes of it are in use", device_of(device).number, used);
    say("device %d: reset", device_of(device).number);
}

const char *registry_name(ggml_backend_reg_t) { return "CUDA"; }

size_t device_count(ggml_backend_reg_t) { return devices().size(); }

ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t index) { return &devices()[index]->ggml; }

void *proc_address(ggml_backend_reg_t, const char *) { return nullptr; }

std::string id_of(int number) { return "GPU-fa4e0000-0000-0000-0000-00000000000" + std::to_string(number); }

bool is_visible(int number) {
    const auto &visible = settings().visible;
    return !visible || std::find(visible->begin(), visible->end(), id_of(number)) != visible->end() ||
           std::find(visible->begin(), visible->end(), std::to_string(number)) != visible->end();
}

ggml_backend_reg_t make_registry() {
    static ggml_backend_reg registry = {
        GGML_BACKEND_API_VERSION, {registry_name, device_count, get_device, proc_address}, nullptr};
    if (!cpu_device()) return &registry; // without devices
    const std::vector<long> &vram_mib = settings().vram_mib;
    for (size_t i = 0; i < vram_mib.size(); i++) {
        const int number = static_cast<int>(i);
        if (!is_visible(number)) continue;
        const std::string name = "CUDA" + std::to_string(devices().size());
        devices().push_back(std::make_unique<Device>(number, name, static_cast<size_t>(vram_mib[i]) << 20, &registry));
    }
    return &registry;
}

} // namespace

Device::Device(int its_number, std::string its_name, size_t vram_bytes, ggml_backend_reg_t registry)
    : number(its_number), name(std::move(its_name)), id(id_of(its_number)),
      pci("0000:0" + std::to_string(its_number + 1) + ":00.0"), memory(its_number, vram_bytes) {
    ggml.context = this;
    ggml.reg = registry;
    ggml_backend_device_i &calls = ggml.iface;
    calls.get_name = device_name;
    calls.get_description = description;
    calls.get_memory = get_memory;
    calls.get_type = device_type;
    calls.get_props = properties;
    calls.init_backend = init_backend;
    calls.get_buffer_type = get_buffer_type;
    calls.get_host_buffer_type = host_buffer_type;
    calls.supports_op = supports_op;
    calls.supports_buft = supports_buffer_type;
    calls.offload_op = offload_op;
    calls.event_new = new_event;
    calls.event_free = free_event;
    calls.event_synchronize = synchronize_event;
    calls.reset = reset;
    buffer_type = buffer_type_of(*this);
}

void Device::synchronize() {
    std::lock_guard<std::mutex> lock(mutex);
    for (Stream *stream : streams) stream->synchronize();
}

std::vector<std::unique_ptr<Device>> &devices() {
    static auto *all = new std::vector<std::unique_ptr<Device>>; // worker threads may outlive what is destroyed at exit
    return *all;
}

} // namespace fakegpu

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    static const ggml_backend_reg_t registry = fakegpu::make_registry();
    return registry;
}
