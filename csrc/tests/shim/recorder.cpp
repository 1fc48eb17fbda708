#include "recorder.h"
#include "ggml-impl.h"

#include <cstdlib>
#include <map>

namespace {

Recorder state;
ggml_backend_device devices[2];
ggml_backend_buffer_type device_types[2], pinned_type;

// In the order in which they were made; an address may come again.
struct Numbers {
    void add(const void *made) { of[made] = next++; }
    std::string text(const void *made) { return std::to_string(of.at(made)); }
    std::map<const void *, int> of;
    int next = 0;
} streams, events, buffers;

void say(const std::string &line) { state.lines.push_back(line); }
size_t index_of(ggml_backend_dev_t device) { return static_cast<size_t>(device - devices); }
std::string at(ggml_backend_t stream) { return "s" + streams.text(stream) + ": "; }
std::string at(ggml_backend_event_t event) { return " e" + events.text(event); }

// Where a tensor lies; nothing is said of the inputs and results that no test looks at.
std::string place(const ggml_tensor *tensor) {
    ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    if (!buffer) return "nowhere";
    if (ggml_backend_buft_is_host(buffer->buft)) return "pinned";
    if (buffer->no_alloc) return "measured";
    return "device" + buffers.text(buffer);
}

// --- memory

void *aligned(size_t size) { return std::aligned_alloc(128, (size + 127) / 128 * 128); }
void free_device_buffer(ggml_backend_buffer_t buffer) {
    state.live--;
    std::free(buffer->context);
    delete buffer;
}
void *device_base(ggml_backend_buffer_t buffer) { return buffer->context; }
void set_tensor(ggml_backend_buffer_t, ggml_tensor *tensor, const void *, size_t, size_t) {
    say("set " + std::string(tensor->name) + ">" + place(tensor));
}
const char *device_type_name(ggml_backend_buffer_type_t type) { return type == &device_types[0] ? "REC0" : "REC1"; }
ggml_backend_buffer_t alloc_device(ggml_backend_buffer_type_t type, size_t size) {
    if (state.allocations++ == state.failing || size > state.largest) return nullptr;
    ggml_backend_buffer_i iface{};
    iface.free_buffer = free_device_buffer;
    iface.get_base = device_base;
    iface.set_tensor = set_tensor;
    state.live++;
    ggml_backend_buffer_t buffer = ggml_backend_buffer_init(type, iface, aligned(size), size);
    buffers.add(buffer);
    return buffer;
}
size_t alignment(ggml_backend_buffer_type_t) { return 128; }
const char *pinned_type_name(ggml_backend_buffer_type_t) { return "REC_Host"; }
bool is_host(ggml_backend_buffer_type_t) { return true; }
void free_pinned(ggml_backend_buffer_t buffer) {
    std::free(buffer->context);
    delete buffer;
}
ggml_backend_buffer_t alloc_pinned(ggml_backend_buffer_type_t type, size_t size) {
    if (!state.pinned) return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(aligned(size), size);
    buffer->buft = type;
    buffer->iface.free_buffer = free_pinned;
    return buffer;
}

// --- a stream

std::string nodes_of(const ggml_cgraph *graph) {
    std::string words;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *node = graph->nodes[i];
        if (node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE) continue;
        words += std::string(" ") + node->name;
        if (node->op == GGML_OP_SET_ROWS) words += ">" + place(node);
        if (node->op == GGML_OP_FLASH_ATTN_EXT) {
            words += "<" + place(node->src[1]);
            if (place(node->src[2]) == "pinned" && place(node->src[1]) != "pinned") words += "!V"; // never
        }
    }
    return words;
}
ggml_status graph_compute(ggml_backend_t stream, ggml_cgraph *graph, int batch_size) {
    say(at(stream) + "graph" + nodes_of(graph) + (batch_size == 7 ? "" : " of an unknown batch"));
    return state.broken ? GGML_STATUS_FAILED : GGML_STATUS_SUCCESS;
}
ggml_status graph_reserve(ggml_backend_t stream, ggml_cgraph *graph, bool alloc) {
    say(at(stream) + (alloc ? "reserve" : "measure") + nodes_of(graph));
    return state.unreserved-- > 0 ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_SUCCESS;
}
size_t buffer_size(ggml_backend_t) { return 1000; }
void set_tensor_async(ggml_backend_t stream, ggml_tensor *tensor, const void *, size_t offset, size_t size) {
    const auto from_base = static_cast<char *>(tensor->data) - static_cast<char *>(device_base(tensor->buffer));
    const std::string to = place(tensor) + "+" + std::to_string(static_cast<size_t>(from_base) + offset);
    say(at(stream) + "copy " + tensor->name + ">" + to + " " + std::to_string(size));
}
std::string spot(const ggml_tensor *tensor) {
    const auto from_base = static_cast<char *>(tensor->data) - static_cast<char *>(device_base(tensor->buffer));
    return place(tensor) + "+" + std::to_string(from_base);
}
bool cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor *source, ggml_tensor *target) {
    if (!streams.of.count(from) || !streams.of.count(to)) return false; // not a backend of this library
    if (from == to) {
        if (!state.moves) return false;
        const std::string bytes = std::to_string(ggml_nbytes(target));
        say(at(to) + "move " + spot(source) + ">" + spot(target) + " " + bytes);
        return true;
    }
    say(at(to) + "copy from s" + streams.text(from));
    return true;
}
void event_record(ggml_backend_t stream, ggml_backend_event_t event) { say(at(stream) + "record" + at(event)); }
void event_wait(ggml_backend_t stream, ggml_backend_event_t event) { say(at(stream) + "wait" + at(event)); }
void synchronize(ggml_backend_t stream) { say(at(stream) + "synchronize"); }
const char *stream_name(ggml_backend_t) { return "REC"; }
void free_stream(ggml_backend_t stream) {
    streams.of.erase(stream); // something else may come to lie there
    delete stream;
}
void graph_optimize(ggml_backend_t stream, ggml_cgraph *) { say(at(stream) + "optimize"); }
void stream_reset(ggml_backend_t stream) { say(at(stream) + "reset"); }
ggml_guid guid = {1};

// --- a device

ggml_backend_t init_backend(ggml_backend_dev_t device, const char *) {
    ggml_backend_i iface{};
    iface.get_name = stream_name;
    iface.free = free_stream;
    iface.set_tensor_async = set_tensor_async;
    iface.cpy_tensor_async = cpy_tensor_async;
    iface.synchronize = synchronize;
    iface.graph_compute = graph_compute;
    iface.event_record = event_record;
    iface.event_wait = event_wait;
    iface.graph_optimize = graph_optimize;
    iface.graph_reserve = graph_reserve;
    iface.buffer_size = buffer_size;
    iface.reset = stream_reset;
    auto *made = new ggml_backend{&guid, iface, device, nullptr};
    streams.add(made);
    return made;
}
const char *device_name(ggml_backend_dev_t device) { return index_of(device) ? "CUDA1" : "CUDA0"; }
void device_props(ggml_backend_dev_t, ggml_backend_dev_props *props) {
    *props = {};
    props->compute_major = 8;
    props->compute_minor = 9;
}
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device) { return &device_types[index_of(device)]; }
ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t) { return &pinned_type; }
bool supports_op(ggml_backend_dev_t, const ggml_tensor *) { return true; }
bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) { return type == buffer_type(device); }
ggml_backend_event_t event_new(ggml_backend_dev_t device) {
    if (!state.events) return nullptr;
    auto *made = new ggml_backend_event{device, nullptr};
    events.add(made);
    return made;
}
void event_free(ggml_backend_dev_t, ggml_backend_event_t event) { delete event; }
void device_reset(ggml_backend_dev_t device) { say("device " + std::to_string(index_of(device)) + ": reset"); }

const char *reg_name(ggml_backend_reg_t) { return "CUDA"; }
size_t reg_count(ggml_backend_reg_t) { return 2; }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t index) { return &devices[index]; }
void *reg_proc(ggml_backend_reg_t, const char *name) {
    return std::string(name) == "stock_function" ? &state : nullptr;
}

} // namespace

extern "C" __attribute__((visibility("default"))) Recorder *recorder(void) { return &state; }

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {reg_name, reg_count, reg_device, reg_proc}, nullptr};
    pinned_type.iface = {pinned_type_name, alloc_pinned, alignment, nullptr, nullptr, is_host, nullptr};
    for (size_t i = 0; i < 2; i++) {
        device_types[i].iface = {device_type_name, alloc_device, alignment, nullptr, nullptr, nullptr, nullptr};
        device_types[i].device = &devices[i];
        ggml_backend_device_i &iface = devices[i].iface;
        iface.get_name = device_name;
        iface.get_type = device_type;
        iface.get_props = device_props;
        iface.init_backend = init_backend;
        iface.get_buffer_type = buffer_type;
        iface.get_host_buffer_type = host_buffer_type;
        iface.supports_op = supports_op;
        iface.supports_buft = supports_buft;
        iface.event_new = event_new;
        iface.event_free = event_free;
        iface.reset = device_reset;
        devices[i].reg = &reg;
    }
    return &reg;
}
