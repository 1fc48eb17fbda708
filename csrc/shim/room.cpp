// How many cells have a mirror, and the memory of all mirrors of a backend (mirror.h).
#include "mirror.h"

#include <algorithm>
#include <cstdlib>

namespace shim {

namespace {

constexpr size_t kStep = 256;      // cells: what an attention sees ends at a multiple of this
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

size_t bytes_for(const Mirror &mirror, size_t cells) { return std::min(cells * mirror.cell, mirror.all); }

size_t bytes_for(const std::vector<Mirror> &mirrors, size_t cells) {
    size_t sum = 0;
    for (const Mirror &mirror : mirrors) sum += aligned(bytes_for(mirror, cells));
    return sum;
}

} // namespace

Mirrors::Mirrors(const Device &device) : device_(device), most_cells_(most_cells()) {}

Mirrors::~Mirrors() { reset(); }

// Of all graphs since the last reset: a backend is asked for each part of a model's graph that it computes, one after the
// other, and none of them may lose its mirrors to the next. Where their tensors are is only compared, never looked at.
void Mirrors::plan(const ggml_cgraph *graph, const std::vector<Layer> &layers) {
    if (layers.empty()) return; // a graph of something else
    std::vector<Mirror> planned = mirrors_;
    for (const ggml_tensor *seen : seen_by(graph, layers)) {
        Mirror mirror;
        mirror.root = root(seen);
        mirror.cell = row_bytes(seen);
        mirror.all = ggml_nbytes(mirror.root);
        const auto is = [&](const Mirror &other) { return other.root == mirror.root; };
        const auto known = std::find_if(planned.begin(), planned.end(), is);
        if (known == planned.end()) planned.push_back(mirror);
        else if (known->cell != mirror.cell || known->all != mirror.all) *known = mirror; // another tensor at the same place
    }
    size_t cells = 0, longest = 0;
    for (const Mirror &mirror : planned) longest = std::max(longest, mirror.all / mirror.cell);
    longest = std::min(longest, most_cells_);
    while (cells < longest && bytes_for(planned, std::min(cells + kStep, longest)) <= device_.mirror_bytes) {
        cells = std::min(cells + kStep, longest);
    }
    for (Mirror &mirror : planned) mirror.wanted = bytes_for(mirror, cells);
    const auto same = [](const Mirror &a, const Mirror &b) {
        return a.root == b.root && a.cell == b.cell && a.wanted == b.wanted;
    };
    if (planned.size() == mirrors_.size() && std::equal(planned.begin(), planned.end(), mirrors_.begin(), same)) {
        distrust(); // it may be another tensor at the same place
        return;
    }
    reset();
    mirrors_ = std::move(planned);
    lay_out(cells);
    distrust();
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
    if (buffer_ || refused_ || bytes_ == 0) return;
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

} // namespace shim
