// Attention of engine 2 over K/V in pinned memory in pieces (exact.h): through a ring of two slots, which are as large as a
// piece and not as a layer.
//
// A layer's pieces are attended one after the other, and merged as the splits of a whole run are. Cells that a mirror has
// are attended there. The others are copied, in turn or ahead of their launch; ahead, these events order them, besides
// those of attention.cpp:
//   filled   a launch, in the stream of our kernels, comes after its copy
//   drained  the copy of the piece after next comes after the launch that reads the same slot
//   written  the copy of a piece that has rows of this graph comes after they were written
// Which rows a graph writes is what its writes say (mirror.h): pieces below them may be copied while the layers before
// compute. Those of a layer whose writes say nothing all wait.
#include "exact.h"
#include "mirror.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace shim {

// OLLAMA_PAGED_RING=0 is for comparisons.
bool ring_wanted() {
    const char *wanted = std::getenv("OLLAMA_PAGED_RING");
    return !wanted || std::strcmp(wanted, "0");
}

// A slot for the pieces of every layer: a split at the least, and no more than there is.
void Pager::note_pieces(const ggml_tensor *node) {
    const ggml_tensor *k = node->src[1], *v = node->src[2];
    const size_t room = slot_cells(k->nb[1] + v->nb[1]);
    const auto bytes = [room](const ggml_tensor *rows) { return std::min(room * rows->nb[1], ggml_nbytes(root(rows))); };
    ring_.k_bytes = std::max(ring_.k_bytes, bytes(k));
    ring_.v_bytes = std::max(ring_.v_bytes, bytes(v));
}

std::vector<Piece> Pager::pieces_of(const ggml_cgraph *graph, const Layer &layer, const Use &use) {
    const ggml_tensor *node = graph->nodes[layer.attention], *k = node->src[1], *v = node->src[2];
    if (use.whole || !in_pieces(node)) return {};
    const size_t n_cells = static_cast<size_t>(k->ne[1]);
    Reach reach;
    reach.slot = std::min(ring_.k_bytes / k->nb[1], ring_.v_bytes / v->nb[1]);
    reach.settled = std::min(settled_cells(graph, layer, k), settled_cells(graph, layer, v));
    if (use.mirrored) reach.on_device = std::min(mirrored_cells(use.k, k), mirrored_cells(use.v, v));
    std::vector<Piece> pieces = shim::pieces_of(exact_->cut(node), n_cells, reach);
    for (const Piece &piece : pieces) {
        const bool copied = piece.from != From::device;
        GGML_ASSERT(!copied || piece.end_cell - piece.first_cell <= reach.slot);
    }
    return pieces;
}

// A piece that the mirrors have, where it lies there.
ggml_status Pager::attend_mirror(const ggml_tensor *node, const Use &use, const Piece &piece) {
    const auto from = [&](const Part &part, const ggml_tensor *rows) {
        return static_cast<const char *>(mirrors_->in_mirror(part, rows).data) + piece.first_cell * rows->nb[1];
    };
    return exact_->attend(piece, from(use.k, node->src[1]), from(use.v, node->src[2]));
}

namespace {

ggml_status attend_slot(Exact &exact, const Slot &slot, const Piece &piece) {
    return exact.attend(piece, ggml_backend_buffer_get_base(slot.k), ggml_backend_buffer_get_base(slot.v));
}

} // namespace

ggml_status Pager::pieces_in_turn(const ggml_tensor *node, const Use &use) {
    catch_up(node, use);
    if (ggml_status bad = exact_->begin(node)) return bad;
    const Slot &slot = ring_.slots[0];
    for (const Piece &piece : use.pieces) {
        if (piece.from == From::device) {
            if (ggml_status bad = attend_mirror(node, use, piece)) return bad;
            continue;
        }
        if (ggml_status bad = exact_->lead()) return bad; // the piece before has been read
        fill(slot, node, use, &piece, compute_);
        if (ggml_status bad = exact_->follow()) return bad;
        if (ggml_status bad = attend_slot(*exact_, slot, piece)) return bad;
    }
    return exact_->end();
}

ggml_status Pager::pieces_ahead(const ggml_tensor *node, const Use &use) {
    catch_up(node, use);
    compute_->iface.event_record(compute_, written_);
    n_written_++;
    copy_ahead();
    if (ggml_status bad = exact_->begin(node)) return bad;
    for (const Piece &piece : use.pieces) {
        if (piece.from == From::device) {
            if (ggml_status bad = attend_mirror(node, use, piece)) return bad;
            continue;
        }
        const Slot &slot = ring_.slots[ring_.drained % 2];
        if (ggml_status bad = exact_->wait(slot.filled)) return bad;
        if (ggml_status bad = attend_slot(*exact_, slot, piece)) return bad;
        if (ggml_status bad = exact_->record(slot.drained)) return bad;
        ring_.drained++;
        copy_ahead();
    }
    return exact_->end();
}

} // namespace shim
