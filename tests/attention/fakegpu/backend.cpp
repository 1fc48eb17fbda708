#include "device.h"
#include "launch.h"
#include "settings.h"

#include <cstring>
#include <memory>

namespace fakegpu {
namespace {

// What GGML calls a backend: a stream, and a CPU backend that does in one thread what is launched into it.
struct Backend {
    explicit Backend(Device &its_device, size_t number) : device(its_device), stream(its_device.number, number) {
        ggml_backend_dev_t host = cpu_device();
        cpu = host->iface.init_backend(host, nullptr);
        const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            host->reg->iface.get_proc_address(host->reg, "ggml_backend_set_n_threads"));
        if (set_threads) set_threads(cpu, 1);
    }

    Device &device;
    Stream stream;
    ggml_backend_t cpu;
};

Backend &backend_of(ggml_backend_t backend) { return *static_cast<Backend *>(backend->context); }

const char *backend_name(ggml_backend_t backend) { return backend_of(backend).device.name.c_str(); }

void free_backend(ggml_backend_t backend) {
    Backend &freed = backend_of(backend);
    freed.stream.synchronize();
    {
        std::lock_guard<std::mutex> lock(freed.device.mutex);
        freed.device.streams.erase(&freed.stream);
    }
    freed.cpu->iface.free(freed.cpu);
    delete &freed;
    delete backend;
}

void synchronize(ggml_backend_t backend) { backend_of(backend).stream.synchronize(); }

// From pinned memory the bytes are read when the copy runs, from other memory of the host when it is called.
void set_async(ggml_backend_t backend, ggml_tensor *tensor, const void *data, size_t offset, size_t bytes) {
    char *to = bytes_at(static_cast<char *>(tensor->data) + offset, bytes, tensor->name);
    Place place;
    if (find(data, bytes, &place)) {
        say("device %d: %zu bytes copied from pinned memory", backend_of(backend).device.number, bytes);
        backend_of(backend).stream.put([=] { std::memcpy(to, place.bytes, bytes); });
        return;
    }
    const auto *from = static_cast<const char *>(data);
    const auto copy = std::make_shared<std::vector<char>>(from, from + bytes);
    backend_of(backend).stream.put([=] { std::memcpy(to, copy->data(), copy->size()); });
}

void get_async(ggml_backend_t backend, const ggml_tensor *tensor, void *data, size_t offset, size_t bytes) {
    const char *from = bytes_at(static_cast<const char *>(tensor->data) + offset, bytes, tensor->name);
    backend_of(backend).stream.put([=] { std::memcpy(data, from, bytes); });
}

// As CUDA's: in the source's stream; the target's waits for it.
bool copy_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor *source, ggml_tensor *target) {
    const bool ours = from->iface.get_name == backend_name && to->iface.get_name == backend_name;
    if (!ours || !is_device_buffer_type(source->buffer->buft) || !is_device_buffer_type(target->buffer->buft)) return false;
    const size_t bytes = ggml_nbytes(source);
    char *into = bytes_at(target->data, bytes, target->name), *read = bytes_at(source->data, bytes, source->name);
    backend_of(from).stream.put([=] { std::memcpy(into, read, bytes); });
    Event copied;
    copied.record(backend_of(from).stream);
    copied.wait(backend_of(to).stream);
    return true;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph *graph, int batch_size) {
    Backend &on = backend_of(backend);
    const auto launch = std::make_shared<Launch>(*graph, on.device.number);
    say("device %d: graph of %d nodes, %zu of attention, %zu write rows", on.device.number, graph->n_nodes,
        launch->attention_nodes, launch->written_rows_nodes);
    on.stream.put([&on, launch, batch_size] {
        if (on.cpu->iface.graph_compute(on.cpu, &launch->graph, batch_size) != GGML_STATUS_SUCCESS)
            fault("device %d: the CPU backend could not compute a graph", on.device.number);
    });
    return GGML_STATUS_SUCCESS;
}

void record(ggml_backend_t backend, ggml_backend_event_t event) { event_of(event).record(backend_of(backend).stream); }

void wait(ggml_backend_t backend, ggml_backend_event_t event) { event_of(event).wait(backend_of(backend).stream); }

} // namespace

Event &event_of(ggml_backend_event_t event) { return *static_cast<Event *>(event->context); }

ggml_backend_t new_backend(ggml_backend_dev_t device) {
    static ggml_guid guid = {0xfa, 0x4e, 0x67, 0x70, 0x75, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    ggml_backend_i calls = {};
    calls.get_name = backend_name;
    calls.free = free_backend;
    calls.set_tensor_async = set_async;
    calls.get_tensor_async = get_async;
    calls.cpy_tensor_async = copy_async;
    calls.synchronize = synchronize;
    calls.graph_compute = compute;
    calls.event_record = record;
    calls.event_wait = wait;
    Device &on = device_of(device);
    std::lock_guard<std::mutex> lock(on.mutex);
    auto *made = new Backend(on, on.streams_made++);
    on.streams.insert(&made->stream);
    return new ggml_backend{&guid, calls, device, made};
}

} // namespace fakegpu
