// Which cells have a mirror, and what a graph leaves of it (mirror.h).
#include "mirror.h"

#include <algorithm>
#include <cstring>

namespace shim {

namespace {

bool tag_of(const ggml_tensor *write, Tag *tag) {
    std::memcpy(tag, write->op_params, sizeof *tag);
    return write->op == GGML_OP_SET_ROWS && tag->magic == kTagMagic;
}

bool writes(const ggml_tensor *node) {
    return lies_paged(node) && node->op != GGML_OP_NONE && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE &&
           node->op != GGML_OP_PERMUTE && node->op != GGML_OP_TRANSPOSE;
}

} // namespace

size_t begin_of(const ggml_tensor *view) {
    return static_cast<size_t>(static_cast<const char *>(view->data) - static_cast<const char *>(root(view)->data));
}

size_t settled_cells(const ggml_cgraph *graph, const Layer &layer, const ggml_tensor *seen) {
    size_t cells = static_cast<size_t>(seen->ne[1]);
    const size_t before = begin_of(seen) / row_bytes(seen); // what is seen
    for (int index : layer.writes) {
        const ggml_tensor *write = graph->nodes[index];
        if (root(write) != root(seen)) continue;
        Tag tag;
        if (!tag_of(write, &tag) || write->nb[1] != row_bytes(seen)) return 0;
        const size_t lowest = static_cast<size_t>(tag.lowest);
        cells = std::min(cells, lowest > before ? lowest - before : 0);
    }
    return cells;
}

size_t mirrored_cells(const Part &part, const ggml_tensor *seen) {
    const size_t end = std::min(part.end, part.mirror->size);
    return end > part.start ? (end - part.start) / row_bytes(seen) : 0;
}

ggml_tensor bytes_in(ggml_backend_buffer_t buffer, size_t offset, size_t size) {
    ggml_tensor bytes = {};
    bytes.type = GGML_TYPE_I8;
    bytes.ne[0] = static_cast<int64_t>(size);
    bytes.ne[1] = bytes.ne[2] = bytes.ne[3] = 1;
    bytes.nb[0] = 1;
    bytes.nb[1] = bytes.nb[2] = bytes.nb[3] = size;
    bytes.buffer = buffer;
    bytes.data = static_cast<char *>(ggml_backend_buffer_get_base(buffer)) + offset;
    return bytes;
}

void Mirrors::distrust() {
    for (Mirror &mirror : mirrors_) mirror.valid = 0;
}

Mirror *Mirrors::mirror_of(const ggml_tensor *whole) {
    const auto is = [whole](const Mirror &mirror) { return mirror.root == whole; };
    const auto found = std::find_if(mirrors_.begin(), mirrors_.end(), is);
    return found == mirrors_.end() ? nullptr : &*found;
}

// What one side of a layer's attention has of its mirror; false: nothing. Where two layers share K or V, the second does
// not come behind its only write, and is staged.
bool Mirrors::look_at(const ggml_cgraph *graph, const Layer &layer, int side, Part &part) {
    const ggml_tensor *seen = graph->nodes[layer.attention]->src[side];
    Mirror *mirror = mirror_of(root(seen));
    if (!mirror || !layer.ahead) return false;
    const auto is_ours = [&](int write) { return root(graph->nodes[write]) == mirror->root; };
    if (std::count_if(layer.writes.begin(), layer.writes.end(), is_ours) != 1) return false;
    part.write = *std::find_if(layer.writes.begin(), layer.writes.end(), is_ours);
    const ggml_tensor *write = graph->nodes[part.write];
    Tag tag;
    if (!tag_of(write, &tag) || write->nb[1] != row_bytes(seen)) return false;
    if (begin_of(write) != 0) return false; // a view: its cells are counted from there, and end further on than it says
    part.mirror = mirror;
    part.start = begin_of(seen);
    part.end = part.start + ggml_nbytes(seen);
    part.trusted = tag.number == mirror->number + 1 ? mirror->valid : 0;
    part.kept = std::min(part.trusted, static_cast<size_t>(tag.lowest) * write->nb[1]);
    part.high = (static_cast<size_t>(tag.highest) + 1) * write->nb[1];
    part.number = tag.number;
    return true;
}

std::vector<Use> Mirrors::look(const ggml_cgraph *graph, const std::vector<Layer> &layers) {
    std::vector<Use> uses(layers.size());
    if (!buffer_) return uses;
    std::vector<int> known; // writes after which a mirror is right again
    for (size_t i = 0; i < layers.size(); i++) {
        Use &use = uses[i];
        use.mirrored = look_at(graph, layers[i], 1, use.k) && look_at(graph, layers[i], 2, use.v);
        if (!use.mirrored) continue;
        const auto has = [](const Part &part) { return std::max(part.end, part.high) <= part.mirror->size; };
        use.whole = has(use.k) && has(use.v);
        known.insert(known.end(), {use.k.write, use.v.write});
    }
    for (const Use &use : uses) {
        for (const Part *part : {&use.k, &use.v}) {
            if (use.mirrored) settle(use, *part);
        }
    }
    // last: such a write may come after the attention that its mirror caught up for
    for (int i = 0; i < graph->n_nodes; i++) {
        if (!writes(graph->nodes[i]) || std::find(known.begin(), known.end(), i) != known.end()) continue;
        if (Mirror *mirror = mirror_of(root(graph->nodes[i]))) mirror->valid = 0;
    }
    return uses;
}

// What the mirror has after the graph: what is seen is brought into it, behind what it kept; and a write outside of what
// is seen reaches it only where the write is repeated in it.
void Mirrors::settle(const Use &use, const Part &part) {
    Mirror &mirror = *mirror_of(part.mirror->root);
    const size_t caught_up = std::min(part.end, mirror.size);
    mirror.number = part.number;
    mirror.valid = use.whole || part.high <= part.end ? std::max(part.trusted, caught_up) : std::max(part.kept, caught_up);
}

ggml_tensor Mirrors::in_mirror(const Part &part, const ggml_tensor *view) const {
    ggml_tensor shown = staged(view, buffer_);
    shown.data = static_cast<char *>(shown.data) + part.mirror->offset;
    return shown;
}

ggml_tensor Mirrors::bytes_of(const Part &part, size_t from, size_t to) const {
    return bytes_in(buffer_, part.mirror->offset + from, to - from);
}

} // namespace shim
