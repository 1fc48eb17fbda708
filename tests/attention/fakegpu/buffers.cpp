#include "device.h"
#include "settings.h"

#include "ggml-impl.h"

#include <cstring>

namespace fakegpu {
namespace {

struct Allocation {
    Device *device;
    void *address;
};

Allocation &allocation_of(ggml_backend_buffer_t buffer) { return *static_cast<Allocation *>(buffer->context); }

// ---- a buffer of device memory. Its accesses are done when they return, and wait for no stream: CUDA's are in a stream
// of the calling thread, which is not ordered with those that compute.

void free_buffer(ggml_backend_buffer_t buffer) {
    Allocation &allocation = allocation_of(buffer);
    allocation.device->synchronize(); // as cudaFree does
    allocation.device->memory.release(allocation.address);
    delete &allocation;
    delete buffer;
}

void *base(ggml_backend_buffer_t buffer) { return allocation_of(buffer).address; }

char *at(const ggml_tensor *tensor, size_t offset, size_t bytes) {
    return bytes_at(static_cast<const char *>(tensor->data) + offset, bytes, tensor->name);
}

// The padding of quantised rows is read by products, and must not be NaN.
ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor) {
    const size_t bytes = ggml_nbytes(tensor), padded = buffer->buft->iface.get_alloc_size(buffer->buft, tensor);
    if (!tensor->view_src && padded > bytes && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE)
        std::memset(at(tensor, bytes, padded - bytes), 0, padded - bytes);
    return GGML_STATUS_SUCCESS;
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t bytes) {
    std::memset(at(tensor, offset, bytes), value, bytes);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor *tensor, const void *data, size_t offset, size_t bytes) {
    std::memcpy(at(tensor, offset, bytes), data, bytes);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor *tensor, void *data, size_t offset, size_t bytes) {
    std::memcpy(data, at(tensor, offset, bytes), bytes);
}

bool copy_tensor(ggml_backend_buffer_t, const ggml_tensor *source, ggml_tensor *target) {
    if (!is_device_buffer_type(source->buffer->buft)) return false;
    const size_t bytes = ggml_nbytes(source);
    std::memcpy(at(target, 0, bytes), at(source, 0, bytes), bytes);
    return true;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(bytes_at(base(buffer), buffer->size, "clear"), value, buffer->size);
}

const ggml_backend_buffer_i kBuffer = {
    free_buffer, base, init_tensor, memset_tensor, set_tensor, get_tensor, copy_tensor, clear, nullptr,
};

// ---- its type

Device &device_of(ggml_backend_buffer_type_t type) { return *static_cast<Device *>(type->context); }

const char *type_name(ggml_backend_buffer_type_t type) { return device_of(type).name.c_str(); }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t bytes) {
    Device &device = device_of(type);
    void *address = device.memory.allocate(bytes);
    if (!address) {
        GGML_LOG_ERROR("fake GPU: %.2f MiB on device %d: out of memory\n", bytes / 1048576.0, device.number);
        return nullptr;
    }
    return ggml_backend_buffer_init(type, kBuffer, new Allocation{&device, address}, bytes);
}

size_t alignment(ggml_backend_buffer_type_t) { return 128; }

// As CUDA's: quantised rows are padded to multiples of 512 elements.
size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *tensor) {
    const int64_t over = tensor->ne[0] % 512;
    const bool padded = ggml_is_quantized(tensor->type) && over != 0;
    return ggml_nbytes(tensor) + (padded ? ggml_row_size(tensor->type, 512 - over) : 0);
}

bool is_host(ggml_backend_buffer_type_t) { return settings().host_visible; }

// ---- pinned memory of the host: a CPU buffer that devices read in place

const char *pinned_name(ggml_backend_buffer_type_t) { return "CUDA_Host"; }

void free_pinned(ggml_backend_buffer_t buffer) {
    for (auto &device : devices()) device->synchronize();
    unpin(buffer->context);
    delete buffer;
}

ggml_backend_buffer_t alloc_pinned(ggml_backend_buffer_type_t type, size_t bytes) {
    void *address = pin(bytes);
    if (!address) return nullptr;
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(address, bytes);
    buffer->buft = type;
    buffer->iface.free_buffer = free_pinned;
    return buffer;
}

bool pinned_is_host(ggml_backend_buffer_type_t) { return true; }

} // namespace

ggml_backend_buffer_type buffer_type_of(Device &device) {
    return {{type_name, alloc_buffer, alignment, nullptr, alloc_size, is_host, nullptr}, &device.ggml, &device, false};
}

ggml_backend_buffer_type_t pinned_buffer_type() {
    static ggml_backend_buffer_type type = {
        {pinned_name, alloc_pinned, alignment, nullptr, nullptr, pinned_is_host, nullptr},
        &devices().front()->ggml,
        nullptr,
        false,
    };
    return &type;
}

bool is_device_buffer_type(ggml_backend_buffer_type_t type) { return type->iface.alloc_buffer == alloc_buffer; }

} // namespace fakegpu
