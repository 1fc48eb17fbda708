// A backend (a stream of a device), wrapped: graphs go through a Pager, the rest is forwarded.
#include "shim.h"

namespace shim {

namespace {

struct FreeInner {
    void operator()(ggml_backend_t inner) const { inner->iface.free(inner); }
};

struct Backend {
    Backend(Device &device, ggml_backend_t its) : inner(its), pager(device, its) {}

    const std::unique_ptr<ggml_backend, FreeInner> inner; // outlives the pager
    Pager pager;
};

Backend &of(ggml_backend_t backend) { return *static_cast<Backend *>(backend->context); }

void free_backend(ggml_backend_t backend) {
    delete &of(backend);
    delete backend;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph *graph, int batch_size) {
    return of(backend).pager.compute(graph, batch_size);
}

ggml_status graph_reserve(ggml_backend_t backend, ggml_cgraph *graph, bool alloc) {
    return of(backend).pager.reserve(graph, alloc);
}

size_t buffer_size(ggml_backend_t backend) {
    ggml_backend_t inner = inner_of(backend);
    return of(backend).pager.staging_bytes() + (inner->iface.buffer_size ? inner->iface.buffer_size(inner) : 0);
}

void reset(ggml_backend_t backend) {
    ggml_backend_t inner = inner_of(backend);
    of(backend).pager.reset();
    if (inner->iface.reset) inner->iface.reset(inner);
}

void synchronize(ggml_backend_t backend) { of(backend).pager.synchronize(); }

bool cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor *source, ggml_tensor *copy) {
    ggml_backend_t inner = inner_of(to);
    return inner->iface.cpy_tensor_async(inner_of(from), inner, source, copy);
}

// Of our own: the stock library must not take a wrapped backend for one of its.
ggml_guid guid = {0x6b, 0x76, 0x70, 0x61, 0x67, 0x65, 0x64, 0x2d, 0x61, 0x74, 0x74, 0x65, 0x6e, 0x74, 0x6e, 0x01};

} // namespace

ggml_backend_t inner_of(ggml_backend_t backend) {
    return backend->iface.graph_compute == graph_compute ? of(backend).inner.get() : backend;
}

// graph_optimize is not forwarded: CUDA's spreads parts of a graph over streams that it joins at a later node, and a
// graph that is computed in pieces may be cut between the two.
ggml_backend_t wrap_backend(Device &device, ggml_backend_t inner) {
    using I = ggml_backend_i;
    I iface{};
    forward<&I::get_name>(iface, inner->iface);
    forward<&I::set_tensor_async>(iface, inner->iface);
    forward<&I::get_tensor_async>(iface, inner->iface);
    forward<&I::event_record>(iface, inner->iface);
    forward<&I::event_wait>(iface, inner->iface);
    if (inner->iface.cpy_tensor_async) iface.cpy_tensor_async = cpy_tensor_async;
    iface.free = free_backend;
    iface.synchronize = synchronize;
    iface.graph_compute = graph_compute;
    iface.graph_reserve = graph_reserve;
    iface.buffer_size = buffer_size;
    iface.reset = reset;
    return new ggml_backend{&guid, iface, &device.outer, new Backend(device, inner)};
}

} // namespace shim
