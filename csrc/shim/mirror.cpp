// Which cells have a mirror, and what a graph leaves of it (mirror.h).
#include "mirror.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace shim {

namespace {

constexpr size_t kStep = 256;      // cells: what an attention sees ends at a multiple of so many
constexpr size_t kAlignment = 512; // of a mirror, in bytes

// 0: no mirrors, for comparisons and for who does not want them.
size_t most_cells() {
    const char *text = std::getenv("OLLAMA_PAGED_MIRROR");
    if (!text || !*text) return SIZE_MAX;
    char *end = nullptr;
    const unsigned long cells = std::strtoul(text, &end, 10);
    if (!*end && *text != '-') return cells;
    GGML_LOG_WARN("paged attention: OLLAMA_PAGED_MIRROR=%s is not a number of cells: as many as fit have a mirror\n", text);
    return SIZE_MAX;
}

size_t row_bytes(const ggml_tensor *seen) { return seen->nb[1]; } // of a cell

size_t cells_of(const ggml_tensor *seen) { return ggml_nbytes(root(seen)) / row_bytes(seen); }

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Whole cells, one after the other from the tensor's beginning on.
bool can_mirror(const ggml_tensor *seen) {
    const ggml_tensor *whole = root(seen);
    return ggml_is_contiguous(whole) && row_bytes(seen) > 0 && ggml_nbytes(whole) % row_bytes(seen) == 0;
}

// K and V that the layers see, each once.
std::vector<const ggml_tensor *> seen_by(const ggml_cgraph *graph, const std::vector<Layer> &layers) {
    std::vector<const ggml_tensor *> all;
    for (const Layer &layer : layers) {
        for (int side : {1, 2}) {
            const ggml_tensor *seen = graph->nodes[layer.attention]->src[side];
            const auto same = [seen](const ggml_tensor *other) { return root(other) == root(seen); };
            if (can_mirror(seen) && std::none_of(all.begin(), all.end(), same)) all.push_back(seen);
        }
    }
    return all;
}

size_t bytes_for(const std::vector<const ggml_tensor *> &all, size_t cells) {
    size_t sum = 0;
    for (const ggml_tensor *seen : all) sum += aligned(std::min(cells, cells_of(seen)) * row_bytes(seen));
    return sum;
}

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

Mirrors::Mirrors(const Device &device) : device_(device), most_cells_(most_cells()) {}

Mirrors::~Mirrors() { reset(); }

void Mirrors::plan(const ggml_cgraph *graph, const std::vector<Layer> &layers) {
    if (layers.empty()) return; // a graph of something else
    const std::vector<const ggml_tensor *> all = seen_by(graph, layers);
    size_t cells = 0, longest = 0;
    for (const ggml_tensor *seen : all) longest = std::max(longest, cells_of(seen));
    longest = std::min(longest, most_cells_);
    while (cells < longest && bytes_for(all, std::min(cells + kStep, longest)) <= device_.mirror_bytes) {
        cells = std::min(cells + kStep, longest);
    }
    std::vector<Mirror> planned;
    for (const ggml_tensor *seen : all) {
        const size_t size = std::min(cells, cells_of(seen)) * row_bytes(seen);
        if (size > 0) planned.push_back({root(seen), 0, row_bytes(seen), size, size, 0, 0});
    }
    const auto same = [](const Mirror &a, const Mirror &b) { return a.root == b.root && a.wanted == b.wanted; };
    if (planned.size() == mirrors_.size() && std::equal(planned.begin(), planned.end(), mirrors_.begin(), same)) {
        distrust(); // it may be another tensor at the same place
        return;
    }
    reset();
    mirrors_ = std::move(planned);
    lay_out(cells);
}

void Mirrors::lay_out(size_t cells) {
    cells_ = cells;
    bytes_ = 0;
    for (Mirror &mirror : mirrors_) {
        mirror.offset = bytes_;
        mirror.size = std::min(mirror.wanted, cells * mirror.cell);
        bytes_ += aligned(mirror.size);
    }
}

void Mirrors::provide() {
    if (buffer_ || refused_ || mirrors_.empty()) return;
    ggml_backend_dev_t inner = device_.inner;
    const char *name = inner->iface.get_name(inner);
    ggml_backend_buffer_type_t type = inner->iface.get_buffer_type(inner);
    // all paged layers gave up their place on the device for this: half of it is far better than nothing
    while (!(buffer_ = ggml_backend_buft_alloc_buffer(type, bytes_)) && cells_ / 2 >= kStep) lay_out(cells_ / 2 / kStep * kStep);
    distrust();
    if (buffer_) {
        device_.mirrored += bytes_;
        GGML_LOG_INFO("paged attention: the first cells of %zu K and V of layers have a mirror on %s: %.1f MiB\n",
                      mirrors_.size(), name, static_cast<double>(bytes_) / 1048576.0);
    } else {
        refuse();
    }
}

void Mirrors::refuse() {
    GGML_LOG_WARN("paged attention: no memory on %s for mirrors of %.1f MiB: all paged K/V there come over the bus\n",
                  device_.inner->iface.get_name(device_.inner), static_cast<double>(bytes_) / 1048576.0);
    give_back();
    refused_ = true;
}

void Mirrors::reset() {
    give_back();
    mirrors_.clear();
    cells_ = bytes_ = 0;
    refused_ = false;
}

void Mirrors::give_back() {
    if (buffer_) device_.mirrored -= bytes_;
    ggml_backend_buffer_free(buffer_);
    buffer_ = nullptr;
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
