// Attention over K/V in pinned memory: copies into staging memory on the device, and a kernel over those.
//
// Attention by the stock kernel is over a layer's K/V as a whole; that of engine 2 in pieces (pieces.cpp).
// Sequential: the copy is an operation of the stream that computes, between SET_ROWS and the attention.
// Prefetching: a second stream copies the K/V of the next two such layers while the first computes, ordered by events:
//   begun    the copies of a graph come after all that was computed before it (rows written, staging read)
//   filled   the attention comes after its copy
//   drained  the copy for the layer after next comes after the attention that reads the same staging memory
// Such a copy may run before this graph has written its own rows. They are written a second time, into the staging
// memory, right after the first: what was written is still there then, whatever the allocator puts in its place later.
#include "exact.h"
#include "mirror.h"

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
    std::vector<Use> uses = mirrors_->look(graph, layers);
    if (layers.empty() && !exact_takes_any(graph)) return compute_->iface.graph_compute(compute_, graph, batch_size);
    const ggml_status status = paged(graph, layers, uses, batch_size);
    if (status) mirrors_->distrust(); // not all of it was computed
    return status;
}

ggml_status Pager::paged(ggml_cgraph *graph, const std::vector<Layer> &layers, std::vector<Use> &uses, int batch_size) {
    note(graph, layers);
    bool provided = provide_for(layers);
    if (!provided && mirrors_->taken()) { // a graph larger than any that was reserved
        synchronize();
        mirrors_->refuse();
        uses.assign(layers.size(), {});
        provided = provide_for(layers);
    }
    if (!provided) return GGML_STATUS_ALLOC_FAILED;
    if (layers.empty()) return run(graph, 0, graph->n_nodes, batch_size);
    bool all_ahead = true;
    for (size_t i = 0; i < layers.size(); i++) {
        uses[i].pieces = pieces_of(graph, layers[i], uses[i]);
        all_ahead = all_ahead && (layers[i].ahead || !uses[i].pieces.empty()); // of pieces each waits for what it must
    }
    if (all_ahead && may_prefetch() && provide(1)) return prefetching(graph, layers, uses, batch_size);
    return sequential(graph, layers, uses, batch_size);
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

ggml_status Pager::sequential(ggml_cgraph *graph, const std::vector<Layer> &layers, const std::vector<Use> &uses,
                              int batch_size) {
    int next = 0;
    for (size_t index = 0; index < layers.size(); index++) {
        const Layer &layer = layers[index];
        const ggml_tensor *node = graph->nodes[layer.attention];
        if (uses[index].whole) {
            if (ggml_status bad = over_mirror(graph, next, layer, uses[index], batch_size)) return bad;
        } else if (!uses[index].pieces.empty()) {
            if (ggml_status bad = run(graph, next, layer.attention, batch_size)) return bad;
            if (ggml_status bad = pieces_in_turn(node, uses[index])) return bad;
        } else {
            Use written = uses[index]; // the copy comes after the write
            written.k.trusted = written.k.kept;
            written.v.trusted = written.v.kept;
            if (ggml_status bad = run(graph, next, layer.attention, batch_size)) return bad;
            fill(whole_.slots[0], node, written, nullptr, compute_);
            if (ggml_status bad = attend(whole_.slots[0], graph, node, batch_size)) return bad;
            catch_up(whole_.slots[0], node, uses[index]);
        }
        next = layer.attention + 1;
    }
    return run(graph, next, graph->n_nodes, batch_size);
}

// In the order in which they are needed, and as far ahead as there are slots.
void Pager::begin_copies(const ggml_cgraph *graph, const std::vector<Layer> &layers, const std::vector<Use> &uses) {
    copies_.clear();
    n_queued_ = n_written_ = whole_.drained = ring_.drained = 0;
    size_t turns[2] = {0, 0}, n_cut = 0; // layers in pieces
    for (size_t index = 0; index < layers.size(); index++) {
        const ggml_tensor *node = graph->nodes[layers[index].attention];
        const Use &use = uses[index];
        for (const Piece &piece : use.pieces) {
            if (piece.from != From::device) copies_.push_back({node, &use, n_cut, &piece, &ring_, turns[1]++});
        }
        n_cut += use.pieces.empty() ? 0 : 1;
        if (use.pieces.empty() && !use.whole) copies_.push_back({node, &use, 0, nullptr, &whole_, turns[0]++});
    }
    if (copies_.empty()) return;
    compute_->iface.event_record(compute_, begun_);
    copier_->iface.event_wait(copier_, begun_);
    copy_ahead();
}

// A stream waits for what an event was recorded for last, so nothing is queued before that.
void Pager::copy_ahead() {
    for (; n_queued_ < copies_.size(); n_queued_++) {
        const Copy &copy = copies_[n_queued_];
        const bool after = copy.piece && copy.piece->from == From::after;
        if (copy.turn >= copy.to->drained + 2 || (after && copy.layer >= n_written_)) return;
        const Slot &slot = copy.to->slots[copy.turn % 2];
        if (copy.turn >= 2) copier_->iface.event_wait(copier_, slot.drained);
        if (after) copier_->iface.event_wait(copier_, written_);
        fill(slot, copy.node, *copy.use, copy.piece, copier_);
        copier_->iface.event_record(copier_, slot.filled);
    }
}

ggml_status Pager::prefetching(ggml_cgraph *graph, const std::vector<Layer> &layers, const std::vector<Use> &uses,
                               int batch_size) {
    begin_copies(graph, layers, uses);
    int next = 0;
    for (size_t index = 0; index < layers.size(); index++) {
        const Layer &layer = layers[index];
        ggml_tensor *node = graph->nodes[layer.attention];
        if (uses[index].whole) {
            if (ggml_status bad = over_mirror(graph, next, layer, uses[index], batch_size)) return bad;
            next = layer.attention + 1;
            continue;
        }
        if (!uses[index].pieces.empty()) {
            if (ggml_status bad = run(graph, next, layer.attention, batch_size)) return bad;
            if (ggml_status bad = pieces_ahead(node, uses[index])) return bad;
            next = layer.attention + 1;
            continue;
        }
        const Slot &slot = whole_.slots[whole_.drained % 2];
        const int first_write = layer.writes.empty() ? layer.attention : layer.writes.front();
        if (ggml_status bad = run(graph, next, first_write, batch_size)) return bad;
        compute_->iface.event_wait(compute_, slot.filled);
        next = first_write;
        for (int write : layer.writes) {
            ggml_tensor *rows = graph->nodes[write];
            if (ggml_status bad = run(graph, next, write, batch_size)) return bad;
            const ggml_tensor place = staged(rows, root(rows) == root(node->src[1]) ? slot.k : slot.v);
            if (ggml_status bad = write_again(graph, rows, place, batch_size)) return bad;
            next = write + 1;
        }
        if (ggml_status bad = run(graph, next, layer.attention, batch_size)) return bad;
        if (ggml_status bad = attend(slot, graph, node, batch_size)) return bad;
        catch_up(slot, node, uses[index]);
        compute_->iface.event_record(compute_, slot.drained);
        whole_.drained++;
        copy_ahead();
        next = layer.attention + 1;
    }
    return run(graph, next, graph->n_nodes, batch_size);
}

// A SET_ROWS, and the same into another place. They are a graph of their own: the stock library may compute SET_ROWS
// together with what makes its rows (CUDA: ROPE, VIEW, SET_ROWS), and then the rows would be nowhere else.
ggml_status Pager::write_again(const ggml_cgraph *graph, ggml_tensor *write, ggml_tensor place, int batch_size) {
    place.op = write->op;
    std::copy(std::begin(write->src), std::end(write->src), std::begin(place.src));
    ggml_tensor *both[] = {write, &place};
    ggml_cgraph part = part_of(graph, both, 2);
    return compute_->iface.graph_compute(compute_, &part, batch_size);
}

ggml_status Pager::attend(const Slot &slot, const ggml_cgraph *graph, const ggml_tensor *node, int batch_size) {
    return attend(graph, node, staged(node->src[1], slot.k), staged(node->src[2], slot.v), batch_size);
}

ggml_status Pager::attend(const ggml_cgraph *graph, const ggml_tensor *node, ggml_tensor k, ggml_tensor v, int batch_size) {
    if (exact_takes(node)) return exact_->attend(node, k.data, v.data);
    ggml_tensor elsewhere = *node;
    elsewhere.src[1] = &k; // the query, the mask and the sinks are as they were
    elsewhere.src[2] = &v;
    ggml_tensor *one[] = {&elsewhere};
    ggml_cgraph part = part_of(graph, one, 1);
    return compute_->iface.graph_compute(compute_, &part, batch_size);
}

} // namespace shim
