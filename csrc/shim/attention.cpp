// Attention over K/V in pinned memory: copies into staging memory on the device, and a kernel over those.
//
// Sequential: the copy is an operation of the stream that computes, between SET_ROWS and the attention.
// Prefetching: a second stream copies the K/V of the next two such layers while the first computes, ordered by events:
//   begun    the copies of a graph come after all that was computed before it (rows written, staging read)
//   filled   the attention comes after its copy
//   drained  the copy for the layer after next comes after the attention that reads the same staging memory
// Such a copy may run before this graph has written its own rows. They are written a second time, into the staging
// memory, right after the first: what was written is still there then, whatever the allocator puts in its place later.
#include "exact.h"

#include <algorithm>

namespace shim {

namespace {

bool is_view(const ggml_tensor *node) {
    switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    default:
        return false;
    }
}

ggml_cgraph part_of(const ggml_cgraph *graph, ggml_tensor **nodes, int count) {
    ggml_cgraph part = *graph;
    part.nodes = nodes;
    part.size = part.n_nodes = count;
    part.leafs = nullptr;
    part.n_leafs = 0;
    return part;
}

ggml_status run_stock(ggml_backend_t backend, const ggml_cgraph *graph, int first, int end, int batch_size) {
    if (std::all_of(graph->nodes + first, graph->nodes + end, is_view)) return GGML_STATUS_SUCCESS; // nothing to compute
    ggml_cgraph part = part_of(graph, graph->nodes + first, end - first);
    return backend->iface.graph_compute(backend, &part, batch_size);
}

} // namespace

std::vector<Layer> layers_of(const ggml_cgraph *graph) {
    std::vector<Layer> layers;
    std::vector<int> writes; // of paged rows, so far
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor *node = graph->nodes[i];
        if (lies_paged(node) && !is_view(node)) writes.push_back(i);
        if (node->op != GGML_OP_FLASH_ATTN_EXT || !lies_paged(node->src[1]) || !lies_paged(node->src[2])) continue;
        Layer layer;
        layer.attention = i;
        const int before = layers.empty() ? -1 : layers.back().attention;
        for (int write : writes) {
            const ggml_tensor *written = root(graph->nodes[write]);
            if (written != root(node->src[1]) && written != root(node->src[2])) continue;
            layer.ahead = layer.ahead && write > before && graph->nodes[write]->op == GGML_OP_SET_ROWS;
            layer.writes.push_back(write);
        }
        layers.push_back(layer);
    }
    return layers;
}

ggml_status Pager::compute(ggml_cgraph *graph, int batch_size) {
    const std::vector<Layer> layers = layers_of(graph);
    if (layers.empty() && !exact_takes_any(graph)) return compute_->iface.graph_compute(compute_, graph, batch_size);
    note(graph, layers);
    if (exact_ && !exact_->provide()) return GGML_STATUS_ALLOC_FAILED;
    if (layers.empty()) return run(graph, 0, graph->n_nodes, batch_size);
    if (!provide(slots_[0])) return GGML_STATUS_ALLOC_FAILED;
    const bool all_ahead = std::all_of(layers.begin(), layers.end(), [](const Layer &layer) { return layer.ahead; });
    if (all_ahead && may_prefetch() && provide(slots_[1])) return prefetching(graph, layers, batch_size);
    return sequential(graph, layers, batch_size);
}

// Without the attention over paged K/V. What csrc's kernels attend over K/V on the device stands between two parts.
ggml_status Pager::run(const ggml_cgraph *graph, int first, int end, int batch_size) {
    for (int i = first; exact_ && i < end; i++) {
        const ggml_tensor *node = graph->nodes[i];
        if (!exact_takes(node)) continue;
        if (ggml_status bad = run_stock(compute_, graph, first, i, batch_size)) return bad;
        if (ggml_status bad = exact_->attend(node, node->src[1]->data, node->src[2]->data)) return bad;
        first = i + 1;
    }
    return run_stock(compute_, graph, first, end, batch_size);
}

ggml_status Pager::sequential(ggml_cgraph *graph, const std::vector<Layer> &layers, int batch_size) {
    int next = 0;
    for (const Layer &layer : layers) {
        if (ggml_status bad = run(graph, next, layer.attention, batch_size)) return bad;
        fill(slots_[0], graph->nodes[layer.attention], compute_);
        if (ggml_status bad = attend(slots_[0], graph, graph->nodes[layer.attention], batch_size)) return bad;
        next = layer.attention + 1;
    }
    return run(graph, next, graph->n_nodes, batch_size);
}

ggml_status Pager::prefetching(ggml_cgraph *graph, const std::vector<Layer> &layers, int batch_size) {
    const auto copy_ahead = [&](size_t index) {
        const Slot &slot = slots_[index % 2];
        if (index >= 2) copier_->iface.event_wait(copier_, slot.drained);
        fill(slot, graph->nodes[layers[index].attention], copier_);
        copier_->iface.event_record(copier_, slot.filled);
    };
    compute_->iface.event_record(compute_, begun_);
    copier_->iface.event_wait(copier_, begun_);
    for (size_t index = 0; index < std::min<size_t>(2, layers.size()); index++) {
        copy_ahead(index);
    }
    int next = 0;
    for (size_t index = 0; index < layers.size(); index++) {
        const Layer &layer = layers[index];
        const Slot &slot = slots_[index % 2];
        const int first_write = layer.writes.empty() ? layer.attention : layer.writes.front();
        if (ggml_status bad = run(graph, next, first_write, batch_size)) return bad;
        compute_->iface.event_wait(compute_, slot.filled);
        next = first_write;
        for (int write : layer.writes) {
            if (ggml_status bad = run(graph, next, write, batch_size)) return bad;
            if (ggml_status bad = write_again(slot, graph, layer, write, batch_size)) return bad;
            next = write + 1;
        }
        if (ggml_status bad = run(graph, next, layer.attention, batch_size)) return bad;
        if (ggml_status bad = attend(slot, graph, graph->nodes[layer.attention], batch_size)) return bad;
        compute_->iface.event_record(compute_, slot.drained);
        if (index + 2 < layers.size()) copy_ahead(index + 2);
        next = layer.attention + 1;
    }
    return run(graph, next, graph->n_nodes, batch_size);
}

// A SET_ROWS, and the same into the staging memory. They are a graph of their own: the stock library may compute
// SET_ROWS together with what makes its rows (CUDA: ROPE, VIEW, SET_ROWS), and then the rows would be nowhere else.
ggml_status Pager::write_again(const Slot &slot, const ggml_cgraph *graph, const Layer &layer, int write,
                               int batch_size) {
    ggml_tensor *node = graph->nodes[write];
    const bool is_k = root(node) == root(graph->nodes[layer.attention]->src[1]);
    ggml_tensor again = staged(node, is_k ? slot.k : slot.v);
    again.op = node->op;
    std::copy(std::begin(node->src), std::end(node->src), std::begin(again.src));
    ggml_tensor *both[] = {node, &again};
    ggml_cgraph part = part_of(graph, both, 2);
    return compute_->iface.graph_compute(compute_, &part, batch_size);
}

ggml_status Pager::attend(const Slot &slot, const ggml_cgraph *graph, const ggml_tensor *node, int batch_size) {
    ggml_tensor k = staged(node->src[1], slot.k), v = staged(node->src[2], slot.v), over_staged = *node;
    if (exact_takes(node)) return exact_->attend(node, k.data, v.data);
    over_staged.src[1] = &k; // the query, the mask and the sinks are as they were
    over_staged.src[2] = &v;
    ggml_tensor *one[] = {&over_staged};
    ggml_cgraph part = part_of(graph, one, 1);
    return compute_->iface.graph_compute(compute_, &part, batch_size);
}

// Copies the rows that the attention sees, in the order of the stream. A device has few units that copy: what another
// stream needs (an input, a mask) may come between two chunks.
void Pager::fill(const Slot &slot, const ggml_tensor *node, ggml_backend_t stream) {
    for (int side : {1, 2}) {
        const ggml_tensor *rows = node->src[side];
        ggml_tensor to = staged(rows, side == 1 ? slot.k : slot.v);
        const size_t all = ggml_nbytes(rows), cells = static_cast<size_t>(rows->ne[1]);
        const size_t chunk = chunk_cells_ < cells ? chunk_cells_ * rows->nb[1] : all;
        if (!stream->iface.set_tensor_async) wait_for(stream);
        for (size_t from = 0; from < all; from += chunk) {
            const char *data = static_cast<const char *>(rows->data) + from;
            const size_t size = std::min(chunk, all - from);
            if (stream->iface.set_tensor_async) {
                stream->iface.set_tensor_async(stream, &to, data, from, size);
            } else {
                to.buffer->iface.set_tensor(to.buffer, &to, data, from, size);
            }
        }
    }
}

} // namespace shim
