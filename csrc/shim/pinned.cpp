// K/V in pinned system memory: the buffer type, and which operations may touch what lies there.
#include "shim.h"

#include <atomic>

namespace shim {

namespace {

std::atomic<int> live{0};

Device &device_of_type(ggml_backend_buffer_type_t type) { return *static_cast<Device *>(type->context); }

const char *type_name(ggml_backend_buffer_type_t type) { return device_of_type(type).paged_name.c_str(); }

void free_buffer(ggml_backend_buffer_t buffer) {
    const auto free_pinned = device_of_type(buffer->buft).free_pinned;
    free_pinned(buffer);
    live--; // only now may a device be reset
}

// The stock library hands out ordinary memory where none can be pinned. No kernel may write to that: such a buffer
// keeps the type that it has, the CPU's, and GGML's scheduler treats K/V in it as those of a CPU.
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    Device &device = device_of_type(type);
    ggml_backend_buffer_type_t pinned = device.inner->iface.get_host_buffer_type(device.inner);
    ggml_backend_buffer_t buffer = pinned->iface.alloc_buffer(pinned, size);
    if (!buffer) return nullptr;
    if (buffer->buft != pinned) {
        static std::atomic<bool> said{false};
        if (!said.exchange(true)) {
            GGML_LOG_WARN("paged attention: %.1f MiB of memory could not be pinned; K/V there are copied whole for "
                          "every token, which is slow: lower OLLAMA_PAGED_HOST_GB or num_ctx\n",
                          static_cast<double>(size) / 1048576.0);
        }
        return buffer;
    }
    device.free_pinned = buffer->iface.free_buffer;
    buffer->buft = type;
    buffer->iface.free_buffer = free_buffer;
    live++;
    return buffer;
}

size_t alignment(ggml_backend_buffer_type_t type) { // of the device, so that staged rows are aligned as those of stock
    ggml_backend_dev_t inner = device_of_type(type).inner;
    ggml_backend_buffer_type_t on_device = inner->iface.get_buffer_type(inner);
    return on_device->iface.get_alignment(on_device);
}

bool is_host(ggml_backend_buffer_type_t) { return true; }

// K and V without gaps, in tensors of their own, and nothing else paged. What is declined here the CPU computes: right,
// and slow.
bool can_stage(const ggml_tensor *op) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (lies_paged(op->src[i]) != (i == 1 || i == 2)) return false;
    }
    const ggml_tensor *k = op->src[1], *v = op->src[2];
    if (root(k) == root(v) || lies_paged(op)) return false;
    return ggml_is_contiguously_allocated(k) && ggml_is_contiguously_allocated(v);
}

} // namespace

void make_paged_type(Device &device) {
    device.paged_name = std::string(device.inner->iface.get_name(device.inner)) + "_Paged";
    ggml_backend_buffer_type_i &iface = device.paged.iface;
    iface.get_name = type_name;
    iface.alloc_buffer = alloc_buffer;
    iface.get_alignment = alignment;
    iface.is_host = is_host;
    device.paged.device = &device.outer;
    device.paged.context = &device;
}

bool lies_paged(const ggml_tensor *tensor) {
    if (!tensor) return false;
    ggml_backend_buffer_t buffer = root(tensor)->buffer;
    return buffer && buffer->buft->iface.get_name == type_name;
}

int paged_buffers() { return live; }

bool serves(const ggml_tensor *op) {
    bool paged = lies_paged(op);
    for (const ggml_tensor *source : op->src) {
        paged = paged || lies_paged(source);
    }
    if (!paged) return true;
    switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    case GGML_OP_SET_ROWS: // a new token's rows are written over the bus
        return lies_paged(op) && !lies_paged(op->src[0]) && !lies_paged(op->src[1]);
    case GGML_OP_ROPE: // a shift of the context turns K where it lies
    case GGML_OP_CPY:
        return true;
    case GGML_OP_FLASH_ATTN_EXT:
        return can_stage(op);
    default: // would read all of K/V over the bus, unasked
        return false;
    }
}

} // namespace shim
