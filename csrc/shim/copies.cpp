// Copies of K/V in pinned memory: into staging memory, and between that and the mirrors. All are in the order of a stream.
#include "mirror.h"

#include <algorithm>

namespace shim {

// The bytes from `from` to `end` of a K or V go to `to`. A device has few units that copy: what another stream needs (an
// input, a mask) may come between two chunks.
void Pager::copy_pinned(const ggml_tensor *rows, size_t from, size_t end, ggml_tensor to, ggml_backend_t stream) {
    const char *data = static_cast<const char *>(root(rows)->data) + from;
    const size_t all = end - from, cells = all / rows->nb[1];
    const size_t chunk = chunk_cells_ < cells ? chunk_cells_ * rows->nb[1] : all;
    if (!stream->iface.set_tensor_async) wait_for(stream);
    for (size_t done = 0; done < all; done += chunk) {
        const size_t size = std::min(chunk, all - done);
        if (stream->iface.set_tensor_async) {
            stream->iface.set_tensor_async(stream, &to, data + done, done, size);
        } else {
            to.buffer->iface.set_tensor(to.buffer, &to, data + done, done, size);
        }
    }
}

// Within the device; false where the stock library does not.
bool Pager::copy_within(ggml_tensor from, ggml_tensor to, ggml_backend_t stream) {
    return stream->iface.cpy_tensor_async && stream->iface.cpy_tensor_async(stream, stream, &from, &to);
}

// Copies the rows that the attention sees, or a piece of them: what its mirrors have out of them, and the rest over the
// bus. All rows go to their place in the tensor, and a piece to the beginning of its slot. What the graph writes itself is
// written again into all of them, but not into a piece: one with such rows is copied when the mirror has caught up.
void Pager::fill(const Slot &slot, const ggml_tensor *node, const Use &use, const Piece *piece, ggml_backend_t stream) {
    for (int side : {1, 2}) {
        const ggml_tensor *rows = node->src[side];
        ggml_backend_buffer_t to = side == 1 ? slot.k : slot.v;
        const Part &part = side == 1 ? use.k : use.v;
        const size_t seen = begin_of(rows);
        const size_t start = seen + (piece ? piece->first_cell * rows->nb[1] : 0);
        const size_t end = seen + (piece ? piece->end_cell * rows->nb[1] : ggml_nbytes(rows));
        const size_t base = piece ? start : 0;
        size_t from = start, right = 0; // of the mirror
        if (use.mirrored) right = piece && piece->from == From::after ? std::min(part.end, part.mirror->size) : part.trusted;
        if (right > start) {
            const size_t until = std::min(right, end);
            if (copy_within(mirrors_->bytes_of(part, start, until), bytes_in(to, start - base, until - start), stream)) from = until;
        }
        if (from < end) {
            ggml_tensor rest = bytes_in(to, from - base, end - from);
            ggml_set_name(&rest, rows->name);
            copy_pinned(rows, from, end, rest, stream);
        }
    }
}

// Brings mirrors up to what was attended, out of staging memory where that has it.
void Pager::catch_up(const Slot &slot, const ggml_tensor *node, const Use &use) {
    if (!use.mirrored) return;
    for (int side : {1, 2}) {
        const ggml_tensor *rows = node->src[side];
        const Part &part = side == 1 ? use.k : use.v;
        const size_t end = std::min(part.end, part.mirror->size), seen = std::min(std::max(part.kept, part.start), end);
        if (part.kept < seen) copy_pinned(rows, part.kept, seen, mirrors_->bytes_of(part, part.kept, seen), compute_);
        if (seen >= end) continue;
        const ggml_tensor staged_rows = bytes_in(side == 1 ? slot.k : slot.v, seen, end - seen);
        const ggml_tensor to = mirrors_->bytes_of(part, seen, end);
        if (!copy_within(staged_rows, to, compute_)) copy_pinned(rows, seen, end, to, compute_);
    }
}

// Brings mirrors up to what an attention in pieces sees, over the bus, after its rows were written: to what these may have
// changed, and to what the mirrors did not have before.
void Pager::catch_up(const ggml_tensor *node, const Use &use) {
    if (!use.mirrored) return;
    for (int side : {1, 2}) {
        const Part &part = side == 1 ? use.k : use.v;
        const size_t end = std::min(part.end, part.mirror->size);
        const size_t until = part.trusted < end ? end : std::min(part.high, end);
        if (part.kept >= until) continue;
        copy_pinned(node->src[side], part.kept, until, mirrors_->bytes_of(part, part.kept, until), compute_);
    }
}

// A layer whose mirrors have all that it sees and writes, up to what they have not caught up with yet.
ggml_status Pager::over_mirror(ggml_cgraph *graph, int next, const Layer &layer, const Use &use, int batch_size) {
    const ggml_tensor *node = graph->nodes[layer.attention];
    for (int write : layer.writes) {
        ggml_tensor *rows = graph->nodes[write];
        const Part &part = write == use.k.write ? use.k : use.v;
        if (ggml_status bad = run(graph, next, write, batch_size)) return bad;
        ggml_tensor place = mirrors_->in_mirror(part, rows);
        place.ne[1] = static_cast<int64_t>(part.mirror->size / rows->nb[1]); // it has no more cells
        if (ggml_status bad = write_again(graph, rows, place, batch_size)) return bad;
        next = write + 1;
    }
    if (ggml_status bad = run(graph, next, layer.attention, batch_size)) return bad;
    for (int side : {1, 2}) {
        const Part &part = side == 1 ? use.k : use.v;
        if (part.trusted >= part.end) continue;
        copy_pinned(node->src[side], part.trusted, part.end, mirrors_->bytes_of(part, part.trusted, part.end), compute_);
    }
    return attend(graph, node, mirrors_->in_mirror(use.k, node->src[1]), mirrors_->in_mirror(use.v, node->src[2]), batch_size);
}

} // namespace shim
