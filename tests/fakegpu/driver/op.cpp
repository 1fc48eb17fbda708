// Attention of a few layers through libggml-cuda-tiering.so on the fake GPU, without Ollama. As in a model each layer's
// graph writes the rows of new cells, attends, and goes on with what came out: the next layer's queries need it.
//
//     op LIBRARY PLACES n_q n_head n_kv_head d n_cells n_new type scale softcap has_mask has_sinks < INPUT > OUTPUT
//
// PLACES: a letter for each layer, p paged or h on the device. type: ggml's number, of K and V. INPUT, f32: queries
// [n_q][n_head][d]; K and V [n_cells][n_kv_head][d], of which the last n_new are written in the graph; a mask
// [n_q][n_cells]; sinks [n_head]. OUTPUT, f32: [n_q][n_head][d] of each layer. Exit code 3: the graph failed.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <vector>

namespace {

struct Spec {
    std::string places;
    int64_t n_q, n_head, n_kv_head, d, n_cells, n_new;
    ggml_type type;
    float scale, softcap;
    bool has_mask, has_sinks;
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
        context_ = ggml_init({2000 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
        graph_ = ggml_new_graph(context_);
    }

    int run() {
        const Spec &s = spec_;
        const auto queries = read_floats(s.n_q * s.n_head * s.d), keys = read_floats(s.n_cells * s.n_kv_head * s.d);
        const auto values = read_floats(s.n_cells * s.n_kv_head * s.d), seen = read_floats(s.n_q * s.n_cells);
        const auto sink_logits = read_floats(s.n_head);
        ggml_tensor *rows = ggml_new_tensor_1d(context_, GGML_TYPE_I64, s.n_new);
        std::vector<int64_t> numbers;
        for (int64_t i = s.n_cells - s.n_new; i < s.n_cells; i++) numbers.push_back(i);
        set(rows, hot_, numbers.data());
        ggml_tensor *q = ggml_new_tensor_3d(context_, GGML_TYPE_F32, s.d, s.n_head, s.n_q);
        set(q, hot_, queries.data());
        ggml_tensor *mask = ggml_new_tensor_2d(context_, GGML_TYPE_F16, s.n_cells, s.n_q);
        std::vector<ggml_fp16_t> half(seen.size());
        ggml_fp32_to_fp16_row(seen.data(), half.data(), static_cast<int64_t>(half.size()));
        set(mask, hot_, half.data());
        ggml_tensor *sinks = ggml_new_tensor_1d(context_, GGML_TYPE_F32, s.n_head);
        set(sinks, hot_, sink_logits.data());

        std::vector<ggml_tensor *> results;
        for (char place : s.places) {
            ggml_backend_buffer_type_t type = place == 'p' ? paged_ : hot_;
            ggml_tensor *k = cache(type, keys, rows), *v = cache(type, values, rows);
            ggml_tensor *out = ggml_flash_attn_ext(context_, ggml_permute(context_, q, 0, 2, 1, 3), view(k), view(v),
                                                   s.has_mask ? mask : nullptr, s.scale, 0.0f, s.softcap);
            if (s.has_sinks) ggml_flash_attn_ext_add_sinks(out, sinks);
            results.push_back(node(out));
            q = node(ggml_add(context_, q, node(ggml_scale(context_, out, 0.0f))));
        }
        // the last one, too, is read by the stock library
        for (ggml_tensor *&result : results) result = node(ggml_scale(context_, result, 1.0f));

        ggml_backend_t backend = device_->iface.init_backend(device_, nullptr);
        if (backend->iface.graph_compute(backend, graph_, 1) != GGML_STATUS_SUCCESS) return 3;
        backend->iface.synchronize(backend);
        for (ggml_tensor *result : results) {
            std::vector<float> bits(static_cast<size_t>(ggml_nelements(result)));
            ggml_backend_tensor_get(result, bits.data(), 0, ggml_nbytes(result));
            std::fwrite(bits.data(), sizeof(float), bits.size(), stdout);
        }
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
    ggml_tensor *cache(ggml_backend_buffer_type_t type, const std::vector<float> &values, ggml_tensor *rows) {
        const Spec &s = spec_;
        const int64_t width = s.d * s.n_kv_head, old = s.n_cells - s.n_new;
        ggml_tensor *cells = ggml_new_tensor_3d(context_, s.type, s.d, s.n_kv_head, s.n_cells);
        std::vector<char> bytes(ggml_nbytes(cells), 0);
        if (old) ggml_quantize_chunk(s.type, values.data(), bytes.data(), 0, old, width, nullptr);
        set(cells, type, bytes.data());
        ggml_tensor *fresh = ggml_new_tensor_2d(context_, GGML_TYPE_F32, width, s.n_new);
        set(fresh, hot_, values.data() + old * width);
        ggml_tensor *written = ggml_set_rows(context_, ggml_reshape_2d(context_, cells, width, s.n_cells), fresh, rows);
        ggml_build_forward_expand(graph_, written);
        return cells;
    }

    const Spec spec_;
    ggml_backend_reg_t reg_;
    ggml_backend_dev_t device_;
    ggml_backend_buffer_type_t paged_, hot_;
    ggml_context *context_;
    ggml_cgraph *graph_;
};

} // namespace

int main(int count, char **words) {
    if (count != 14) {
        std::fprintf(stderr, "see the top of op.cpp\n");
        return 2;
    }
    const auto number = [words](int at) { return std::atoll(words[at]); };
    const Spec spec = {words[2],  number(3),  number(4), number(5), number(6), number(7), number(8), static_cast<ggml_type>(number(9)),
                       std::strtof(words[10], nullptr), std::strtof(words[11], nullptr), number(12) != 0, number(13) != 0};
    return Rig(words[1], spec).run();
}
