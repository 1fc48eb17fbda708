// Attention of a few layers through libggml-cuda-tiering.so on the fake GPU, without Ollama. As in a model each layer's
// graph writes the rows of new cells, attends, and goes on with what came out: the next layer's queries need it.
//
//     op LIBRARY PLACES n_q n_head n_kv_head d_k d_v n_cells n_new k_type v_type scale softcap has_mask has_sinks
//        n_reserved n_runs first_new < INPUT > OUTPUT
//
// PLACES: a letter for each layer, p paged or h on the device; a capital: with K/V in f16, whatever the types; u: paged, and
// its writes do not say which cells they write, as all others of paged rows do (overlay ml/backend/ggml/kvpaged_writes.go).
// Mirrors may take 64 MiB; with OLLAMA_PAGED_MIRROR=0 there are none. Types: ggml's numbers. INPUT, f32: queries [n_q][n_head][d_k]; K [n_cells][n_kv_head][d_k] and V [..][d_v], of which n_new from
// first_new on are written in the graph; a mask [n_q][n_cells]; sinks [n_head]. n_reserved: queries of a batch that memory is taken for
// first; 0: none. n_runs: how often the graph is computed; with mirrors other rows are written before the last time, so that
// what was not brought up to date shows. OUTPUT, f32: [n_q][n_head][d_v] of each layer, then K and V of the
// last one as they are stored. Exit code 3: the graph failed.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <vector>

namespace {

struct Spec {
    std::string places;
    int64_t n_q, n_head, n_kv_head, d_k, d_v, n_cells, n_new;
    ggml_type k_type, v_type;
    float scale, softcap;
    bool has_mask, has_sinks;
    int64_t n_reserved, n_runs, first_new;
};

std::vector<float> read_floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    if (std::fread(values.data(), sizeof(float), values.size(), stdin) != values.size()) {
        std::fprintf(stderr, "the input is too short\n");
        std::exit(2);
    }
    return values;
}

class Rig {
public:
    Rig(const char *path, const Spec &s) : spec_(s) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) std::fprintf(stderr, "%s\n", dlerror());
        if (!library) std::exit(2);
        reg_ = reinterpret_cast<ggml_backend_init_t>(dlsym(library, "ggml_backend_init"))();
        device_ = reg_->iface.get_device(reg_, 0);
        using Type = ggml_backend_buffer_type_t (*)(ggml_backend_dev_t, bool, bool);
        paged_ = reinterpret_cast<Type>(proc("kvpaged_buffer_type"))(device_, false, true);
        using Name = const char *(*)(ggml_backend_dev_t);
        std::fprintf(stderr, "engine: %s\n", reinterpret_cast<Name>(proc("kvpaged_engine"))(device_));
        hot_ = device_->iface.get_buffer_type(device_);
        context_ = ggml_init({2000 * ggml_tensor_overhead() + 2 * ggml_graph_overhead(), nullptr, true});
        graph_ = ggml_new_graph(context_);
    }

    int run() {
        const Spec &s = spec_;
        const auto queries = read_floats(s.n_q * s.n_head * s.d_k);
        const auto keys = read_floats(s.n_cells * s.n_kv_head * s.d_k);
        const auto values = read_floats(s.n_cells * s.n_kv_head * s.d_v), seen = read_floats(s.n_q * s.n_cells);
        const auto sink_logits = read_floats(s.n_head);
        ggml_tensor *rows = ggml_new_tensor_1d(context_, GGML_TYPE_I64, s.n_new);
        std::vector<int64_t> numbers;
        for (int64_t i = 0; i < s.n_new; i++) numbers.push_back(s.first_new + i);
        set(rows, hot_, numbers.data());
        ggml_tensor *q = ggml_new_tensor_3d(context_, GGML_TYPE_F32, s.d_k, s.n_head, s.n_q);
        set(q, hot_, queries.data());
        ggml_tensor *mask = ggml_new_tensor_2d(context_, GGML_TYPE_F16, s.n_cells, s.n_q);
        std::vector<ggml_fp16_t> half(seen.size());
        ggml_fp32_to_fp16_row(seen.data(), half.data(), static_cast<int64_t>(half.size()));
        set(mask, hot_, half.data());
        ggml_tensor *sinks = ggml_new_tensor_1d(context_, GGML_TYPE_F32, s.n_head);
        set(sinks, hot_, sink_logits.data());

        std::vector<ggml_tensor *> results;
        ggml_tensor *k = nullptr, *v = nullptr;
        for (char place : s.places) {
            const bool plain = std::isupper(place);
            ggml_backend_buffer_type_t type = std::tolower(place) == 'h' ? hot_ : paged_;
            k = cache(type, plain ? GGML_TYPE_F16 : s.k_type, s.d_k, keys, rows);
            v = cache(type, plain ? GGML_TYPE_F16 : s.v_type, s.d_v, values, rows);
            if (std::tolower(place) == 'p') tagged_.insert(tagged_.end(), {written_[0], written_[1]});
            written_.clear();
            ggml_tensor *out = ggml_flash_attn_ext(context_, ggml_permute(context_, q, 0, 2, 1, 3), view(k), view(v),
                                                   s.has_mask ? mask : nullptr, s.scale, 0.0f, s.softcap);
            if (s.has_sinks) ggml_flash_attn_ext_add_sinks(out, sinks);
            results.push_back(node(out));
            q = node(ggml_add(context_, q, node(ggml_scale(context_, node(ggml_sum(context_, out)), 0.0f))));
        }
        // the last one, too, is read by the stock library
        for (ggml_tensor *&result : results) result = node(ggml_scale(context_, result, 1.0f));

        reinterpret_cast<void (*)(ggml_backend_dev_t, size_t)>(proc("kvpaged_mirror_bytes"))(device_, 64 << 20);
        ggml_backend_t backend = device_->iface.init_backend(device_, nullptr);
        bool failed = s.n_reserved && reserve(backend, k, v) != GGML_STATUS_SUCCESS;
        const char *mirrors = std::getenv("OLLAMA_PAGED_MIRROR");
        const bool mirrored = mirrors && std::strcmp(mirrors, "0");
        if (mirrored && !failed) {
            failed = backend->iface.graph_reserve(backend, graph_, true) != GGML_STATUS_SUCCESS;
        }
        for (int64_t i = 0; !failed && i < s.n_runs; i++) {
            tag(static_cast<int32_t>(i + 1));
            if (mirrored) {
                backend->iface.synchronize(backend);
                for (const auto &[fresh, bits] : fresh_) set_sign(fresh, bits, i + 1 < s.n_runs ? -1.0f : 1.0f);
            }
            failed = backend->iface.graph_compute(backend, graph_, 1) != GGML_STATUS_SUCCESS;
        }
        if (failed) {
            backend->iface.free(backend); // what was queued before has run, when the process ends
            return 3;
        }
        backend->iface.synchronize(backend);
        for (ggml_tensor *result : results) {
            std::vector<float> bits(static_cast<size_t>(ggml_nelements(result)));
            ggml_backend_tensor_get(result, bits.data(), 0, ggml_nbytes(result));
            std::fwrite(bits.data(), sizeof(float), bits.size(), stdout);
        }
        for (const ggml_tensor *cells : {k, v}) write_stored(cells);
        backend->iface.free(backend);
        return 0;
    }

private:
    void *proc(const char *name) { return reg_->iface.get_proc_address(reg_, name); }

    void put(ggml_tensor *tensor, ggml_backend_buffer_type_t type) {
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, tensor));
        ggml_backend_tensor_alloc(buffer, tensor, ggml_backend_buffer_get_base(buffer));
    }
    void set(ggml_tensor *tensor, ggml_backend_buffer_type_t type, const void *bytes) {
        put(tensor, type);
        ggml_backend_tensor_set(tensor, bytes, 0, ggml_nbytes(tensor));
    }
    ggml_tensor *node(ggml_tensor *made) { // with memory, after what it is made of
        put(made, hot_);
        ggml_build_forward_expand(graph_, made);
        return made;
    }
    ggml_tensor *view(ggml_tensor *cells) { return ggml_permute(context_, cells, 0, 2, 1, 3); }

    // The cells with all rows but the new ones, which a node of the graph writes.
    ggml_tensor *cache(ggml_backend_buffer_type_t buffer, ggml_type type, int64_t d, const std::vector<float> &values,
                       ggml_tensor *rows) {
        const Spec &s = spec_;
        const int64_t width = d * s.n_kv_head, behind = s.first_new + s.n_new;
        ggml_tensor *cells = ggml_new_tensor_3d(context_, type, d, s.n_kv_head, s.n_cells);
        std::vector<char> bytes(ggml_nbytes(cells), 0);
        const auto old = [&](int64_t first, int64_t end) {
            if (first < end) ggml_quantize_chunk(type, values.data(), bytes.data(), first * width, end - first, width, nullptr);
        };
        old(0, s.first_new);
        old(behind, s.n_cells);
        set(cells, buffer, bytes.data());
        ggml_tensor *fresh = ggml_new_tensor_2d(context_, GGML_TYPE_F32, width, s.n_new);
        set(fresh, hot_, values.data() + s.first_new * width);
        fresh_.push_back({fresh, values.data() + s.first_new * width});
        ggml_tensor *written = ggml_set_rows(context_, ggml_reshape_2d(context_, cells, width, s.n_cells), fresh, rows);
        ggml_build_forward_expand(graph_, written);
        written_.push_back(written);
        return cells;
    }

    // struct Tag of csrc/shim/mirror.h.
    void tag(int32_t number) {
        const int32_t lowest = static_cast<int32_t>(spec_.first_new);
        const int32_t tag[4] = {0x6d70766b, number, lowest, static_cast<int32_t>(spec_.first_new + spec_.n_new - 1)};
        for (ggml_tensor *write : tagged_) std::memcpy(write->op_params, tag, sizeof tag);
    }
    static void set_sign(ggml_tensor *rows, const float *bits, float sign) {
        std::vector<float> values(bits, bits + ggml_nelements(rows));
        for (float &value : values) value *= sign;
        ggml_backend_tensor_set(rows, values.data(), 0, ggml_nbytes(rows));
    }

    // As for the largest batch that there may be.
    ggml_status reserve(ggml_backend_t backend, ggml_tensor *k, ggml_tensor *v) {
        const Spec &s = spec_;
        ggml_cgraph *graph = ggml_new_graph(context_);
        ggml_tensor *q = ggml_new_tensor_3d(context_, GGML_TYPE_F32, s.d_k, s.n_reserved, s.n_head);
        ggml_build_forward_expand(graph, ggml_flash_attn_ext(context_, q, view(k), view(v), nullptr, s.scale, 0.0f, s.softcap));
        return backend->iface.graph_reserve(backend, graph, true);
    }
    static void write_stored(const ggml_tensor *cells) {
        std::vector<char> bytes(ggml_nbytes(cells));
        ggml_backend_tensor_get(cells, bytes.data(), 0, bytes.size());
        std::vector<float> values(static_cast<size_t>(ggml_nelements(cells)));
        ggml_get_type_traits(cells->type)->to_float(bytes.data(), values.data(), ggml_nelements(cells));
        std::fwrite(values.data(), sizeof(float), values.size(), stdout);
    }

    const Spec spec_;
    ggml_backend_reg_t reg_;
    ggml_backend_dev_t device_;
    ggml_backend_buffer_type_t paged_, hot_;
    ggml_context *context_;
    ggml_cgraph *graph_;
    std::vector<ggml_tensor *> written_, tagged_; // SET_ROWS: of the layer at hand; of all whose writes say what they write
    std::vector<std::pair<ggml_tensor *, const float *>> fresh_; // what they write
};

} // namespace

int main(int count, char **words) {
    if (count != 19) {
        std::fprintf(stderr, "see the top of op.cpp\n");
        return 2;
    }
    const auto number = [words](int at) { return std::atoll(words[at]); };
    const auto type = [number](int at) { return static_cast<ggml_type>(number(at)); };
    const auto real = [words](int at) { return std::strtof(words[at], nullptr); };
    const Spec spec = {words[2],  number(3), number(4), number(5), number(6), number(7),       number(8),      number(9),
                       type(10), type(11),  real(12),  real(13),  number(14) != 0, number(15) != 0,
                       number(16), number(17), number(18)};
    return Rig(words[1], spec).run();
}
