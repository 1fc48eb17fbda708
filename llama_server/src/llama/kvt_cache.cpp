#include "kvt_cache.h"

#include "kvt_cells.h"
#include "kvt_exactly.h"
#include "kvt_images.h"

#include "ggml.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama.h"

#include <algorithm>
#include <memory>
#include <tuple>

namespace kvt {

namespace {

constexpr uint32_t missing = UINT32_MAX;

using views = std::unique_ptr<ggml_context, void (*)(ggml_context *)>;

views make_views() { return views(ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }), ggml_free); }

// One view of get_k or get_v with all cells of the stream, as llama.cpp's graphs see them.
bool describe(const ggml_tensor * view, bool is_v, int32_t layer, plane & out) {
    if (view == nullptr || view->view_src == nullptr) {
        return false;
    }
    out.layer         = layer;
    out.is_v          = is_v;
    out.transposed    = is_v && view->nb[1] > view->nb[2];
    out.tensor        = view->view_src;
    out.offset        = view->view_offs;
    out.element_bytes = ggml_type_size(view->type);
    out.kv_heads      = (uint32_t) view->ne[1];
    out.head_dim      = (uint32_t) (out.transposed ? view->ne[2] : view->ne[0]);
    out.row_bytes     = ggml_row_size(view->type, (int64_t) out.kv_heads*out.head_dim);
    if (!out.transposed) {
        return view->nb[2] == out.row_bytes; // else other bytes lie between the rows
    }
    out.column_bytes = view->nb[2];
    // Quantised elements have no bytes of their own.
    return ggml_blck_size(view->type) == 1 && (out.element_bytes == 2 || out.element_bytes == 4) && view->nb[0] == out.element_bytes &&
           view->nb[1] == out.head_dim*out.column_bytes;
}

// `first` and what follows are all text, or all of images.
llama_ubatch batch_of(llama_batch_allocr & allocator, const int32_t & seq, uint32_t first, uint32_t count, const std::vector<int32_t> & tokens) {
    llama_ubatch batch = allocator.ubatch_reserve(count, 1);
    const uint32_t dimensions = batch.n_pos;
    const auto places = places_of(tokens, first, count);
    batch.seq_id_unq[0] = seq;
    for (uint32_t i = 0; i < count; ++i) {
        const llama_pos axes[] = { places[i].t, places[i].y, places[i].x };
        for (uint32_t d = 0; d < dimensions; ++d) { // M-RoPE: a text's tokens have the same position in the first three
            batch.pos[i + d*count] = d < 3 ? axes[d] : 0;
        }
        batch.token[i]    = tokens[first + i]; // cells remember it, for models that look at the tokens before one
        batch.n_seq_id[i] = 1;
        batch.seq_id[i]   = const_cast<llama_seq_id *>(&seq);
    }
    if (tokens[first] < 0) {
        batch.token = nullptr; // as llama.cpp has it for an image
    }
    return batch;
}

// Puts the rows into these cells, runs of text and of images each for itself.
void apply(llama_context * ctx, llama_kv_cache & cache, const llama_kv_cache::slot_info & places, int32_t seq, uint32_t first,
           const std::vector<int32_t> & tokens) {
    const auto & cells = places.idxs[0];
    for (size_t i = 0; i < cells.size();) {
        size_t end = i + 1;
        while (end < cells.size() && (tokens[first + end] < 0) == (tokens[first + i] < 0)) {
            ++end;
        }
        auto part = places;
        part.idxs[0].assign(cells.begin() + (std::ptrdiff_t) i, cells.begin() + (std::ptrdiff_t) end);
        llama_batch_allocr allocator(llama_get_model(ctx)->hparams.n_pos_per_embd());
        cache.apply_ubatch(part, batch_of(allocator, seq, first + (uint32_t) i, (uint32_t) (end - i), tokens));
        i = end;
    }
}

// Which of some rows a cell holds.
class row_finder {
public:
    explicit row_finder(const std::vector<place> & places) : first_(places.front().t), count_((uint32_t) places.size()) {
        for (uint32_t i = 0; i < count_; ++i) {
            if (places[i].t != first_ + (int32_t) i) {
                apart_ = true;
            }
        }
        for (uint32_t i = 0; apart_ && i < count_; ++i) {
            sorted_.emplace_back(places[i].t, places[i].y, places[i].x, i);
        }
        std::sort(sorted_.begin(), sorted_.end());
    }

    // UINT32_MAX for none. Where positions follow one another the first number says it: without M-RoPE a cell has no others.
    uint32_t find(const place & of) const {
        if (!apart_) {
            const int32_t at = of.t - first_;
            return at >= 0 && (uint32_t) at < count_ ? (uint32_t) at : missing;
        }
        const auto found = std::lower_bound(sorted_.begin(), sorted_.end(), std::make_tuple(of.t, of.y, of.x, 0u));
        const bool same = found != sorted_.end() && std::get<0>(*found) == of.t && std::get<1>(*found) == of.y && std::get<2>(*found) == of.x;
        return same ? std::get<3>(*found) : missing;
    }

private:
    int32_t first_ = 0;
    uint32_t count_ = 0;
    bool apart_ = false;
    std::vector<std::tuple<int32_t, int32_t, int32_t, uint32_t>> sorted_;
};

} // namespace

memory_parts parts_of(llama_context * ctx, std::string & why) {
    llama_memory_i * memory = llama_get_memory(ctx);
    const bool has_v = !llama_get_model(ctx)->hparams.is_mla();
    if (memory == nullptr) {
        why = "the model has no K/V cache";
    } else if (auto * plain = exactly<llama_kv_cache>(memory)) {
        return { plain, nullptr, false, has_v };
    } else if (auto * windows = exactly<llama_kv_cache_iswa>(memory)) {
        return { windows->get_base(), windows->get_swa(), true, has_v };
    } else if (auto * hybrid = exactly<llama_memory_hybrid>(memory)) {
        return { hybrid->get_mem_attn(), nullptr, true, has_v };
    } else if (exactly<llama_memory_hybrid_iswa>(memory) != nullptr) {
        why = "recurrent layers beside sliding windows";
    } else if (exactly<llama_memory_recurrent>(memory) != nullptr) {
        why = "recurrent layers alone";
    } else {
        why = "a kind of cache that is not known here";
    }
    return {};
}

bool share_cells(llama_context * ctx, const memory_parts & parts) {
    return parts.rows->get_n_stream() == 1 && ctx->get_cparams().n_seq_max > 1;
}

std::vector<plane> planes_of(const llama_kv_cache & cache, int32_t seq, bool has_v, std::string & why) {
    llama_kv_cache::slot_info stream {};
    stream.s0 = stream.s1 = cache.get_n_stream() == 1 ? 0 : (uint32_t) seq;
    std::vector<plane> planes;
    for (const uint32_t layer : cache.get_layer_ids()) {
        const views own = make_views();
        for (int i = 0; i < (has_v ? 2 : 1); ++i) {
            const bool is_v = i == 1;
            const auto * view = is_v ? cache.get_v(own.get(), (int32_t) layer, cache.get_size(), stream)
                                     : cache.get_k(own.get(), (int32_t) layer, cache.get_size(), stream);
            plane one;
            if (!describe(view, is_v, (int32_t) layer, one)) {
                why = "rows of an unexpected size";
                return {};
            }
            planes.push_back(one);
        }
    }
    return planes;
}

std::vector<uint32_t> cells_of(const llama_kv_cache & cache, int32_t seq, uint32_t first, uint32_t count, const std::vector<int32_t> & tokens) {
    if (cache.get_has_shift() || count == 0) {
        return {};
    }
    const row_finder rows(places_of(tokens, first, count));
    std::vector<uint32_t> found(count, missing);
    uint32_t left = count;
    for (const auto & one : held_cells(cache, seq)) {
        const uint32_t at = rows.find({ one.position, one.y, one.x });
        if (at == missing) {
            continue;
        }
        if (found[at] != missing) {
            return {};
        }
        found[at] = one.index;
        --left;
    }
    return left == 0 ? found : std::vector<uint32_t>();
}

std::vector<uint32_t> take_cells(llama_context * ctx, llama_kv_cache & cache, int32_t seq, uint32_t first, uint32_t count,
                                 const std::vector<int32_t> & tokens) {
    if (count == 0) {
        return {};
    }
    llama_batch_allocr allocator(llama_get_model(ctx)->hparams.n_pos_per_embd());
    const auto found = cache.find_slot(batch_of(allocator, seq, first, count, tokens), false);
    if (found.empty() || found.idxs[0].size() != count) {
        return {};
    }
    apply(ctx, cache, found, seq, first, tokens);
    return found.idxs[0];
}

// Tokens of a window's cache lie one behind the other, and the first cell follows the last.
std::vector<uint32_t> window_cells(llama_context * ctx, llama_kv_cache & cache, int32_t seq, uint32_t first, uint32_t count,
                                 const std::vector<int32_t> & tokens) {
    const uint32_t size = cache.get_size();
    if (count == 0 || count > size) {
        return {};
    }
    cache.seq_rm(seq, -1, -1);
    llama_kv_cache::slot_info places {};
    places.s0 = places.s1 = cache.get_n_stream() == 1 ? 0 : (uint32_t) seq;
    places.resize(1);
    places.strm[0] = (llama_seq_id) places.s0;
    for (uint32_t i = 0; i < count; ++i) {
        places.idxs[0].push_back((first + i) % size);
        if (!cell_is_free(cache, seq, places.idxs[0].back())) {
            return {};
        }
    }
    apply(ctx, cache, places, seq, first, tokens);
    return places.idxs[0];
}

void settle(llama_context * ctx) {
    llama_synchronize(ctx);
    if (ctx->memory_update(false)) {
        llama_synchronize(ctx);
    }
}

void drop_rows(llama_kv_cache & cache, int32_t seq, int32_t position) { cache.seq_rm(seq, position, -1); }

bool has_axes(llama_context * ctx) { return llama_get_model(ctx)->hparams.n_pos_per_embd() > 1; }

} // namespace kvt
