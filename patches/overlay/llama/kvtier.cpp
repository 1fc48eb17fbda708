#include "kvtier.h"

#include "ggml.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-hparams.h"
#include "llama-io.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-model.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <stdexcept>
#include <typeinfo>
#include <vector>

namespace {

// Exactly these types: one that derives from them may have rows of its own beside those that are known here.
std::vector<llama_kv_cache *> children_of(llama_context * ctx) {
    llama_memory_i * memory = llama_get_memory(ctx);
    if (memory == nullptr) {
        return {};
    }
    const std::type_info & type = typeid(*memory);
    if (type == typeid(llama_kv_cache)) {
        return {static_cast<llama_kv_cache *>(memory)};
    }
    if (type == typeid(llama_kv_cache_iswa)) {
        auto * cache = static_cast<llama_kv_cache_iswa *>(memory);
        return {cache->get_base(), cache->get_swa()};
    }
    return {};
}

llama_kv_cache * child_of(llama_context * ctx, int child) { return children_of(ctx).at(child); }

const llama_hparams & hparams_of(llama_context * ctx) { return llama_get_model(ctx)->hparams; }

// The only public way to learn which cell holds which position: what llama.cpp writes when it saves a sequence. For every
// stream the number of cells; for each of them, in ascending order, its position, how many sequences (one) and which; then
// whether V is transposed, the number of layers, and of the first layer's K its type, the size of a row, and ranges of rows,
// whose offsets are the cells. Nothing is read beyond that.
class cell_reader : public llama_io_write_i {
  public:
    struct complete {};

    std::vector<int32_t> cells, positions;

    void write(const void * source, size_t size) override {
        switch (state) {
            case streams:
                state = cell_count;
                break;
            case cell_count:
                count = number(source, size);
                if (count > 0) {
                    state = position;
                }
                break;
            case position:
                positions.push_back((int32_t) number(source, size));
                state = sequences;
                break;
            case sequences:
                if (number(source, size) != 1) {
                    throw std::runtime_error("a cell of several sequences");
                }
                state = sequence;
                break;
            case sequence:
                state = positions.size() < count ? position : transposed;
                break;
            case transposed:
                state = layers;
                break;
            case layers:
                state = type;
                break;
            case type:
                state = row_bytes;
                break;
            case row_bytes:
                if (size != sizeof(row)) {
                    throw std::runtime_error("not the size of a row");
                }
                memcpy(&row, source, size);
                state = ranges;
                break;
            default:
                throw complete();
        }
    }

    void write_tensor(const ggml_tensor *, size_t offset, size_t size) override {
        if (state != ranges || row == 0 || offset % row || size % row) {
            throw std::runtime_error("not a range of rows");
        }
        for (size_t i = 0; i < size / row; ++i) {
            cells.push_back((int32_t) (offset / row + i));
        }
        if (cells.size() >= count) {
            throw complete();
        }
    }

    size_t n_bytes() override { return 0; }

  private:
    enum { streams, cell_count, position, sequences, sequence, transposed, layers, type, row_bytes, ranges } state = streams;
    uint32_t count = 0;
    uint64_t row = 0;

    static uint32_t number(const void * source, size_t size) {
        uint32_t value;
        if (size != sizeof(value)) {
            throw std::runtime_error("not a number of 4 bytes");
        }
        memcpy(&value, source, size);
        return value;
    }
};

void read_cells(llama_kv_cache * cache, int32_t seq, cell_reader & reader) {
    try {
        cache->state_write(reader, seq, 0);
    } catch (const cell_reader::complete &) {
    }
    if (reader.cells.size() != reader.positions.size()) {
        throw std::runtime_error("another number of cells than of positions");
    }
}

// A batch of positions without tokens, and where llama.cpp puts it: as when it loads a saved sequence (state_read_meta).
struct placement {
    llama_batch_allocr allocator;
    llama_seq_id       seq;
    llama_ubatch       batch;
    llama_kv_cache::slot_info slot;

    placement(llama_context * ctx, llama_kv_cache * cache, int32_t seq, int32_t from, int n)
        : allocator(hparams_of(ctx).n_pos_per_embd()), seq(seq), batch(allocator.ubatch_reserve(n, 1)) {
        batch.seq_id_unq[0] = seq;
        for (int i = 0; i < n; ++i) {
            batch.pos[i]      = from + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i]   = &this->seq;
        }
        slot = cache->find_slot(batch, false);
    }

    bool is(const int32_t * cells, int n) const {
        if (slot.empty() || slot.idxs[0].size() != (size_t) n) {
            return false;
        }
        for (int i = 0; i < n; ++i) {
            if (slot.idxs[0][i] != (uint32_t) cells[i]) {
                return false;
            }
        }
        return true;
    }
};

const char * describe(llama_context * ctx, kvtier_context * info) {
    const auto            children = children_of(ctx);
    const llama_hparams & hparams  = hparams_of(ctx);
    const llama_cparams & cparams  = ctx->get_cparams();
    if (llama_get_memory(ctx) == nullptr) {
        return "the model has no K/V cache";
    }
    if (children.empty()) {
        return "recurrent or hybrid model of the llama.cpp engine";
    }
    if (cparams.pooling_type != LLAMA_POOLING_TYPE_NONE || !cparams.causal_attn) {
        return "embedding model";
    }
    if (hparams.n_pos_per_embd() != 1) {
        return "positions of several dimensions (M-RoPE)";
    }
    if (hparams.swa_type == LLAMA_SWA_TYPE_SYMMETRIC) {
        return "sliding windows that look ahead";
    }
    info->children        = (int32_t) children.size();
    info->streams         = (int32_t) children[0]->get_n_stream();
    info->cells           = (int32_t) children[0]->get_size();
    info->flash_attention = cparams.flash_attn;
    info->threads         = cparams.n_threads_batch;
    for (llama_kv_cache * child : children) {
        // A cache of the window only drops rows; Ollama's contexts keep all of them (swa_full).
        if (child->get_size() != children[0]->get_size() || child->get_n_stream() != children[0]->get_n_stream()) {
            return "sliding windows that drop rows";
        }
    }
    if (info->streams > 1 && info->streams != (int32_t) cparams.n_seq_max) {
        return "sequences that share streams";
    }
    if (info->streams == 1 && cparams.n_seq_max > 1) {
        return "sequences that share cells";
    }
    // A shift rotates the cells of all sequences, most by an angle of 0. RoPE multiplies by this factor whatever the angle.
    info->exact_shift = cparams.yarn_attn_factor == 1.0f;
    // Which of LongRoPE's two tables is used follows from the size of the context (llama_model::get_rope_factors).
    snprintf(info->rope, sizeof(info->rope), "%s base %a scale %a yarn %u %a %a %a %a",
             cparams.n_ctx_seq > hparams.n_ctx_orig_yarn ? "long" : "short", cparams.rope_freq_base, cparams.rope_freq_scale,
             cparams.n_ctx_orig_yarn, cparams.yarn_ext_factor, cparams.yarn_attn_factor, cparams.yarn_beta_fast,
             cparams.yarn_beta_slow);
    return nullptr;
}

// One layer of one cache; false if the cache does not have it.
bool layer_of(llama_context * ctx, llama_kv_cache * cache, int layer, ggml_context * views, kvtier_layer & out) {
    const llama_hparams &     hparams = hparams_of(ctx);
    llama_kv_cache::slot_info all;
    all.s0 = 0;
    all.s1 = cache->get_n_stream() - 1;
    const ggml_tensor *k, *v;
    try {
        k = cache->get_k(views, layer, cache->get_size(), all);
        v = cache->get_v(views, layer, cache->get_size(), all);
    } catch (const std::out_of_range &) { // filtered out, or a layer without K/V
        return false;
    }
    const uint32_t heads = hparams.n_head_kv(layer);
    const bool     swa   = hparams.is_swa(layer);
    out.layer          = layer;
    out.window         = swa ? (int32_t) hparams.n_swa : 0;
    out.chunked        = swa && hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED;
    out.device         = llama_get_model(ctx)->dev_layer(layer);
    out.kv_heads       = (int32_t) heads;
    out.k_dim          = (int32_t) (hparams.n_embd_k_gqa(layer) / heads);
    out.v_dim          = (int32_t) (hparams.n_embd_v_gqa(layer) / heads);
    out.k              = k->view_src;
    out.v              = v->view_src;
    out.v_transposed   = v->nb[1] > v->nb[2]; // what the cache was built with; flash attention may be off nevertheless
    out.k_row_bytes    = ggml_row_size(out.k->type, hparams.n_embd_k_gqa(layer));
    out.v_row_bytes    = ggml_row_size(out.v->type, hparams.n_embd_v_gqa(layer));
    out.k_stream_bytes = k->nb[3];
    out.v_stream_bytes = v->nb[3];
    const bool apart = !out.v_transposed && v->nb[2] != out.v_row_bytes;
    if (k->nb[2] != out.k_row_bytes || apart || (out.v_transposed && v->nb[0] != 2)) {
        throw std::runtime_error("rows of an unexpected size");
    }
    return true;
}

int layers_of(llama_context * ctx, kvtier_layer * layers, int max) {
    const auto                    children = children_of(ctx);
    std::set<const ggml_tensor *> seen; // several layers may share one
    int                           n = 0;
    for (size_t child = 0; child < children.size(); ++child) { // the order of a block's segments
        for (int layer = 0; layer < (int) hparams_of(ctx).n_layer; ++layer) {
            std::unique_ptr<ggml_context, void (*)(ggml_context *)> views(
                ggml_init({4 * ggml_tensor_overhead(), nullptr, true}), ggml_free);
            kvtier_layer found = {};
            if (!views || !layer_of(ctx, children[child], layer, views.get(), found) || !seen.insert(found.k).second) {
                continue;
            }
            if (n == max) {
                return -1;
            }
            found.child = (int32_t) child;
            layers[n++] = found;
        }
    }
    return n;
}

} // namespace

const char * kvtier_describe(llama_context * ctx, kvtier_context * info) {
    try {
        return describe(ctx, info);
    } catch (...) {
        return "a cache that is not understood";
    }
}

int kvtier_layers(llama_context * ctx, kvtier_layer * layers, int max) {
    try {
        return layers_of(ctx, layers, max);
    } catch (...) {
        return -1;
    }
}

int kvtier_cells(llama_context * ctx, int child, int32_t seq, int32_t * cells, int32_t * positions, int max) {
    try {
        cell_reader reader;
        read_cells(child_of(ctx, child), seq, reader);
        if (reader.cells.size() > (size_t) max) {
            return -1;
        }
        std::copy(reader.cells.begin(), reader.cells.end(), cells);
        std::copy(reader.positions.begin(), reader.positions.end(), positions);
        return (int) reader.cells.size();
    } catch (...) {
        return -1;
    }
}

bool kvtier_find(llama_context * ctx, int child, int32_t seq, int32_t from, int n, int32_t * cells) {
    try {
        const placement place(ctx, child_of(ctx, child), seq, from, n);
        if (place.slot.empty() || place.slot.idxs[0].size() != (size_t) n) {
            return false;
        }
        std::copy(place.slot.idxs[0].begin(), place.slot.idxs[0].end(), cells);
        return true;
    } catch (...) {
        return false;
    }
}

bool kvtier_occupy(llama_context * ctx, int child, int32_t seq, int32_t from, int n, const int32_t * cells) {
    try {
        llama_kv_cache * cache = child_of(ctx, child);
        const placement  place(ctx, cache, seq, from, n);
        if (!place.is(cells, n)) {
            return false;
        }
        cache->apply_ubatch(place.slot, place.batch);
        return true;
    } catch (...) {
        return false;
    }
}
