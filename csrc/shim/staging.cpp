// Staging memory on the device, and what else a Pager holds there: the stream that copies, and its events.
#include "exact.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace shim {

ggml_tensor staged(const ggml_tensor *tensor, ggml_backend_buffer_t buffer) {
    const ptrdiff_t offset = static_cast<char *>(tensor->data) - static_cast<char *>(root(tensor)->data);
    ggml_tensor copy = *tensor;
    copy.op = GGML_OP_NONE;
    std::fill(std::begin(copy.src), std::end(copy.src), nullptr);
    copy.view_src = nullptr;
    copy.view_offs = 0;
    copy.buffer = buffer;
    copy.data = static_cast<char *>(ggml_backend_buffer_get_base(buffer)) + offset;
    return copy;
}

void wait_for(ggml_backend_t backend) {
    if (backend && backend->iface.synchronize) backend->iface.synchronize(backend);
}

size_t chunk_cells() {
    constexpr size_t all = SIZE_MAX;
    const char *text = std::getenv("OLLAMA_PAGED_CHUNK_SIZE");
    if (!text || !*text) return all;
    char *end = nullptr;
    const unsigned long cells = std::strtoul(text, &end, 10);
    if (!*end && *text != '-' && cells > 0) return cells;
    GGML_LOG_WARN("paged attention: OLLAMA_PAGED_CHUNK_SIZE=%s is not a number of cells: all are copied at once\n", text);
    return all;
}

Pager::Pager(const Device &device, ggml_backend_t compute)
    : device_(device), compute_(compute), chunk_cells_(chunk_cells()) {}

Pager::~Pager() {
    synchronize();
    exact_.reset();
    for (Slot &slot : slots_) {
        give_back(slot);
        for (ggml_backend_event_t event : {slot.filled, slot.drained}) {
            if (event) event->device->iface.event_free(event->device, event);
        }
    }
    if (begun_) begun_->device->iface.event_free(begun_->device, begun_);
    if (copier_) copier_->iface.free(copier_);
}

void Pager::note(const ggml_cgraph *graph, const std::vector<Layer> &layers) {
    ggml_backend_buffer_type_t type = device_.inner->iface.get_buffer_type(device_.inner);
    for (const Layer &layer : layers) {
        const ggml_tensor *node = graph->nodes[layer.attention];
        k_bytes_ = std::max(k_bytes_, ggml_backend_buft_get_alloc_size(type, root(node->src[1])));
        v_bytes_ = std::max(v_bytes_, ggml_backend_buft_get_alloc_size(type, root(node->src[2])));
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        if (exact_takes(graph->nodes[i])) exact_->note(graph->nodes[i]);
    }
}

bool Pager::exact_takes(const ggml_tensor *node) {
    if (device_.engine.name.empty()) return false;
    if (!exact_) exact_ = std::make_unique<Exact>(device_, compute_);
    return exact_->takes(node);
}

bool Pager::exact_takes_any(const ggml_cgraph *graph) {
    const auto takes = [this](const ggml_tensor *node) { return exact_takes(node); };
    return !device_.engine.name.empty() && std::any_of(graph->nodes, graph->nodes + graph->n_nodes, takes);
}

bool Pager::provide(Slot &slot) {
    const bool has = slot.k && slot.v && slot.k->size >= k_bytes_ && slot.v->size >= v_bytes_;
    if (has || (one_slot_ && &slot == &slots_[1])) return has;
    synchronize(); // what is given back may be in use
    give_back(slot);
    ggml_backend_buffer_type_t type = device_.inner->iface.get_buffer_type(device_.inner);
    slot.k = ggml_backend_buft_alloc_buffer(type, k_bytes_);
    slot.v = ggml_backend_buft_alloc_buffer(type, v_bytes_);
    if (slot.k && slot.v) return true;
    give_back(slot);
    if (&slot == &slots_[1]) {
        one_slot_ = true;
        GGML_LOG_WARN("paged attention: no memory on %s for K/V of a second layer: no layer is copied ahead\n",
                      device_.inner->iface.get_name(device_.inner));
    }
    return false;
}

void Pager::give_back(Slot &slot) {
    ggml_backend_buffer_free(slot.k);
    ggml_backend_buffer_free(slot.v);
    slot.k = slot.v = nullptr;
}

size_t Pager::staging_bytes() const {
    return (prefetch_ == yes && device_.ahead && !one_slot_ ? 2 : 1) * (k_bytes_ + v_bytes_) + (exact_ ? exact_->bytes() : 0);
}

void Pager::synchronize() {
    wait_for(copier_);
    wait_for(compute_);
}

void Pager::reset() {
    synchronize();
    for (Slot &slot : slots_) {
        give_back(slot);
    }
    if (exact_) exact_->reset();
    k_bytes_ = v_bytes_ = 0;
    one_slot_ = false;
}

// The stock library is asked what the graph needs with K/V staged: it may convert all of them to another type.
ggml_status Pager::reserve(ggml_cgraph *graph, bool alloc) {
    const std::vector<Layer> layers = layers_of(graph);
    note(graph, layers);
    const bool prefetch = !layers.empty() && may_prefetch();
    if (alloc && exact_ && !exact_->provide()) return GGML_STATUS_ALLOC_FAILED;
    if (alloc && !layers.empty()) {
        if (!provide(slots_[0])) return GGML_STATUS_ALLOC_FAILED;
        if (prefetch) provide(slots_[1]);
    }
    if (!compute_->iface.graph_reserve) return GGML_STATUS_SUCCESS;
    ggml_backend_buffer_type_t type = device_.inner->iface.get_buffer_type(device_.inner);
    ggml_backend_buffer measured_k = {{}, type, nullptr, k_bytes_, GGML_BACKEND_BUFFER_USAGE_ANY, true};
    ggml_backend_buffer measured_v = {{}, type, nullptr, v_bytes_, GGML_BACKEND_BUFFER_USAGE_ANY, true};
    std::vector<ggml_tensor *> nodes(graph->nodes, graph->nodes + graph->n_nodes);
    std::vector<ggml_tensor> replaced(3 * layers.size());
    for (size_t i = 0; i < layers.size(); i++) {
        ggml_tensor *&node = nodes[static_cast<size_t>(layers[i].attention)];
        ggml_tensor &k = replaced[3 * i], &v = replaced[3 * i + 1], &over_staged = replaced[3 * i + 2];
        k = staged(node->src[1], alloc ? slots_[0].k : &measured_k);
        v = staged(node->src[2], alloc ? slots_[0].v : &measured_v);
        over_staged = *node;
        over_staged.src[1] = &k;
        over_staged.src[2] = &v;
        node = &over_staged;
    }
    ggml_cgraph part = *graph;
    part.nodes = nodes.data();
    return compute_->iface.graph_reserve(compute_, &part, alloc);
}

// Copies ahead need room for the staging of two layers, a second stream, and events of both. OLLAMA_PAGED_PREFETCH=0 is for comparisons.
bool Pager::may_prefetch() {
    if (!device_.ahead) return false;
    if (prefetch_ != unknown) return prefetch_ == yes;
    prefetch_ = no;
    const char *wanted = std::getenv("OLLAMA_PAGED_PREFETCH");
    ggml_backend_dev_t device = device_.inner;
    const ggml_backend_i &stream = compute_->iface;
    if (wanted && !std::strcmp(wanted, "0")) return false;
    if (!device->iface.event_new || !stream.event_record || !stream.event_wait || !stream.set_tensor_async) {
        return false;
    }
    const auto made = [device](ggml_backend_event_t &event) {
        event = device->iface.event_new(device);
        return event != nullptr; // it is in a build without events
    };
    if (!made(begun_)) return false;
    for (Slot &slot : slots_) {
        if (!made(slot.filled) || !made(slot.drained)) return false;
    }
    copier_ = device->iface.init_backend(device, nullptr);
    if (copier_) prefetch_ = yes;
    return prefetch_ == yes;
}

} // namespace shim
