// Staging memory on the device, and what else a Pager holds there: the stream that copies, and its events.
#include "exact.h"
#include "mirror.h"

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
    : device_(device), compute_(compute), chunk_cells_(chunk_cells()), ring_wanted_(ring_wanted()),
      mirrors_(std::make_unique<Mirrors>(device)) {}

Pager::~Pager() {
    synchronize();
    exact_.reset();
    std::vector<ggml_backend_event_t> events = {begun_, written_};
    for (Staging *staging : {&whole_, &ring_}) {
        for (Slot &slot : staging->slots) {
            give_back(slot);
            events.insert(events.end(), {slot.filled, slot.drained});
        }
    }
    for (ggml_backend_event_t event : events) {
        if (event) event->device->iface.event_free(event->device, event);
    }
    if (copier_) copier_->iface.free(copier_);
}

void Pager::note(const ggml_cgraph *graph, const std::vector<Layer> &layers) {
    ggml_backend_buffer_type_t type = device_.inner->iface.get_buffer_type(device_.inner);
    for (const Layer &layer : layers) {
        const ggml_tensor *node = graph->nodes[layer.attention];
        if (in_pieces(node)) {
            note_pieces(node);
            continue;
        }
        whole_.k_bytes = std::max(whole_.k_bytes, ggml_backend_buft_get_alloc_size(type, root(node->src[1])));
        whole_.v_bytes = std::max(whole_.v_bytes, ggml_backend_buft_get_alloc_size(type, root(node->src[2])));
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

bool Pager::provide_for(const std::vector<Layer> &layers) {
    return (!exact_ || exact_->provide()) && (layers.empty() || provide(0));
}

bool Pager::provide(size_t index) { return provide(whole_, index) && provide(ring_, index); }

bool Pager::provide(Staging &staging, size_t index) {
    Slot &slot = staging.slots[index];
    const bool has = slot.k && slot.v && slot.k->size >= staging.k_bytes && slot.v->size >= staging.v_bytes;
    if (has || staging.k_bytes == 0) return true;
    if (index == 1 && staging.one_slot) return false;
    synchronize(); // what is given back may be in use
    give_back(slot);
    ggml_backend_buffer_type_t type = device_.inner->iface.get_buffer_type(device_.inner);
    slot.k = ggml_backend_buft_alloc_buffer(type, staging.k_bytes);
    slot.v = ggml_backend_buft_alloc_buffer(type, staging.v_bytes);
    if (slot.k && slot.v) return true;
    give_back(slot);
    if (index == 1) {
        staging.one_slot = true;
        GGML_LOG_WARN("paged attention: no memory on %s for K/V of a second %s: none is copied ahead\n",
                      device_.inner->iface.get_name(device_.inner), &staging == &ring_ ? "piece" : "layer");
    }
    return false;
}

void Pager::give_back(Slot &slot) {
    ggml_backend_buffer_free(slot.k);
    ggml_backend_buffer_free(slot.v);
    slot.k = slot.v = nullptr;
}

size_t Pager::staging_bytes() const {
    const auto bytes = [this](const Staging &staging) {
        const size_t slots = prefetch_ == yes && device_.ahead && !staging.one_slot ? 2 : 1;
        return slots * (staging.k_bytes + staging.v_bytes);
    };
    return bytes(whole_) + bytes(ring_) + (exact_ ? exact_->bytes() : 0) + mirrors_->bytes();
}

void Pager::synchronize() {
    wait_for(copier_);
    wait_for(compute_);
}

void Pager::reset() {
    synchronize();
    for (Staging *staging : {&whole_, &ring_}) {
        for (Slot &slot : staging->slots) give_back(slot);
        staging->k_bytes = staging->v_bytes = 0;
        staging->one_slot = false;
    }
    if (exact_) exact_->reset();
    mirrors_->reset();
}

// Mirrors come last, and go first: nothing that is needed lacks memory for them.
ggml_status Pager::reserve(ggml_cgraph *graph, bool alloc) {
    const std::vector<Layer> layers = layers_of(graph);
    ggml_status status = reserve_without_mirrors(graph, layers, alloc);
    if (status && mirrors_->taken()) {
        synchronize();
        mirrors_->refuse();
        status = reserve_without_mirrors(graph, layers, alloc);
    }
    if (status) return status;
    mirrors_->plan(graph, layers);
    if (alloc && compute_->iface.set_tensor_async) mirrors_->provide();
    return status;
}

// The stock library is asked what the graph needs with K/V staged: it may convert all of them to another type. It is not
// asked about what csrc's kernels attend.
ggml_status Pager::reserve_without_mirrors(ggml_cgraph *graph, const std::vector<Layer> &layers, bool alloc) {
    note(graph, layers);
    const bool prefetch = !layers.empty() && may_prefetch();
    if (alloc && !provide_for(layers)) return GGML_STATUS_ALLOC_FAILED;
    if (alloc && prefetch) provide(1);
    if (!compute_->iface.graph_reserve) return GGML_STATUS_SUCCESS;
    ggml_backend_buffer_type_t type = device_.inner->iface.get_buffer_type(device_.inner);
    ggml_backend_buffer measured_k = {{}, type, nullptr, whole_.k_bytes, GGML_BACKEND_BUFFER_USAGE_ANY, true};
    ggml_backend_buffer measured_v = {{}, type, nullptr, whole_.v_bytes, GGML_BACKEND_BUFFER_USAGE_ANY, true};
    std::vector<ggml_tensor> replaced(3 * layers.size());
    size_t layer = 0;
    std::vector<ggml_tensor *> nodes;
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor *node = graph->nodes[i];
        const bool is_layer = layer < layers.size() && layers[layer].attention == i;
        if (is_layer && !exact_takes(node)) {
            ggml_tensor &k = replaced[3 * layer], &v = replaced[3 * layer + 1], &over_staged = replaced[3 * layer + 2];
            k = staged(node->src[1], alloc ? whole_.slots[0].k : &measured_k);
            v = staged(node->src[2], alloc ? whole_.slots[0].v : &measured_v);
            over_staged = *node;
            over_staged.src[1] = &k;
            over_staged.src[2] = &v;
            nodes.push_back(&over_staged);
        } else if (!exact_takes(node)) {
            nodes.push_back(node);
        }
        layer += is_layer ? 1 : 0;
    }
    ggml_cgraph part = *graph;
    part.nodes = nodes.data();
    part.n_nodes = static_cast<int>(nodes.size());
    return compute_->iface.graph_reserve(compute_, &part, alloc);
}

// Copies ahead need room for two slots, a second stream, and events of both. OLLAMA_PAGED_PREFETCH=0 is for comparisons.
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
    if (!made(begun_) || !made(written_)) return false;
    for (Staging *staging : {&whole_, &ring_}) {
        for (Slot &slot : staging->slots) {
            if (!made(slot.filled) || !made(slot.drained)) return false;
        }
    }
    copier_ = device->iface.init_backend(device, nullptr);
    if (copier_) prefetch_ = yes;
    return prefetch_ == yes;
}

} // namespace shim
