#include "launch.h"
#include "memory.h"
#include "settings.h"

#include "ggml-backend.h"

namespace fakegpu {
namespace {

// It names memory and computes nothing.
bool is_view(const ggml_tensor *node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

constexpr int kSourcesOfAttention = 5; // Q, K, V, mask, sinks

} // namespace

Launch::Launch(const ggml_cgraph &launched, int device) : device_(device) {
    for (int i = 0; i < launched.n_nodes; i++) {
        const ggml_tensor *node = launched.nodes[i];
        if (node->op == GGML_OP_FLASH_ATTN_EXT) {
            attention_nodes++;
            for (int source = kSourcesOfAttention; source < GGML_MAX_SRC; source++)
                if (node->src[source]) say("device %d: attention has a source %d, which no device reads", device, source);
        }
        written_rows_nodes += node->op == GGML_OP_SET_ROWS;
        if (!is_view(node)) {
            check(node, node, "result");
            for (const ggml_tensor *source : node->src)
                if (source) check(node, source, "source");
        }
        ggml_tensor *copy = take(node);
        for (ggml_tensor *&source : copy->src)
            if (source) source = take(source);
        nodes_.push_back(copy);
    }
    graph.size = graph.n_nodes = launched.n_nodes;
    graph.nodes = nodes_.data();
    graph.order = launched.order;
}

ggml_tensor *Launch::take(const ggml_tensor *tensor) {
    ggml_tensor *&copy = taken_[tensor];
    if (!copy) {
        tensors_.push_back(*tensor);
        copy = &tensors_.back();
        Place place;
        if (tensor->data && find(tensor->data, 0, &place)) copy->data = place.bytes;
    }
    return copy;
}

void Launch::check(const ggml_tensor *node, const ggml_tensor *used, const char *as) const {
    const size_t bytes = ggml_nbytes(used);
    Place place;
    if (bytes == 0) return;
    if (!find(used->data, bytes, &place))
        fault("device %d: %s %s of %s %s lies in no memory of a device (%s, %zu bytes at %p)", device_, as, used->name,
              ggml_op_name(node->op), node->name, used->buffer ? ggml_backend_buffer_name(used->buffer) : "no buffer",
              bytes, used->data);
    if (place.owner != device_ && place.owner != kPinned)
        fault("device %d: %s %s of %s %s lies in memory of device %d", device_, as, used->name, ggml_op_name(node->op),
              node->name, place.owner);
}

} // namespace fakegpu
