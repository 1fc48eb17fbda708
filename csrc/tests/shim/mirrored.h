// A model whose backend has mirrors of its paged K/V.
#pragma once
#include "rig.h"
#include "shim/mirror.h"

#include <cstring>

namespace {

constexpr size_t kAll = kCells * kRowBytes;

// One layer of a model whose backend has mirrors of `cells` cells.
struct Mirrored {
    explicit Mirrored(const char *cells, const char *prefetch = "1", int layers = 1, int64_t all_cells = kCells) {
        setenv("OLLAMA_PAGED_MIRROR", cells, 1);
        void *function = library.reg->iface.get_proc_address(library.reg, "kvpaged_mirror_bytes");
        reinterpret_cast<void (*)(ggml_backend_dev_t, size_t)>(function)(device(), room);
        backend = new_backend(prefetch);
        for (int i = 0; i < layers; i++) {
            const std::string n = std::to_string(i);
            k.push_back(model.cache("k" + n, paged_type(), all_cells));
            v.push_back(model.cache("v" + n, paged_type(), all_cells));
            model.write(k[i], "k" + n);
            model.write(v[i], "v" + n);
            model.attention(k[i], v[i], "a" + n);
        }
        backend->iface.graph_reserve(backend.get(), model.graph, true);
    }
    ~Mirrored() { unsetenv("OLLAMA_PAGED_MIRROR"); }

    // A graph of its own that writes these cells and attends to [first, first + count).
    struct Step {
        int lowest = 0, highest = 0;
        int64_t first = 0, count = 32;
        bool tagged = true;
        bool turned = false; // K is turned between its write and the attention
    };
    Lines step(const Step &s) {
        return graph([&] {
            number++;
            for (size_t i = 0; i < k.size(); i++) {
                for (ggml_tensor *rows : {k[i], v[i]}) {
                    model.write(rows, rows->name);
                    if (s.tagged) tag(last(), s.lowest, s.highest);
                    if (s.turned && rows == k[i]) model.add(ggml_cpy(model.context, model.view(rows), model.view(rows)), "turn");
                }
                attend("a" + std::to_string(i), s.first, s.count, i);
            }
        });
    }
    template <typename Makes> Lines graph(Makes makes) {
        ggml_cgraph *made = ggml_new_graph(model.context);
        std::swap(model.graph, made);
        makes();
        const Lines lines = computed(model, backend.get());
        std::swap(model.graph, made);
        return lines;
    }
    void write_tagged(int lowest, int highest) {
        number++;
        for (ggml_tensor *rows : {k[0], v[0]}) {
            model.write(rows, rows->name);
            tag(last(), lowest, highest);
        }
    }
    void attend(const std::string &name, int64_t first, int64_t count, size_t i = 0) {
        model.add(ggml_flash_attn_ext(model.context, model.query, model.view(k[i], first, count),
                                      model.view(v[i], first, count), nullptr, 1.0f, 0, 0), name);
    }
    ggml_tensor *last() const { return model.graph->nodes[model.graph->n_nodes - 1]; }
    void tag(ggml_tensor *node, int lowest, int highest) const {
        const shim::Tag tag = {shim::kTagMagic, number, lowest, highest};
        std::memcpy(node->op_params, &tag, sizeof tag);
    }

    static size_t room;
    Model model;
    Backend backend;
    std::vector<ggml_tensor *> k, v;
    uint32_t number = 0;
};
size_t Mirrored::room = 1 << 20;

bool crosses(const Lines &lines) { // anything of K/V over the bus, beside what is written
    return std::any_of(lines.begin(), lines.end(), [](const std::string &line) { return line.find(": copy") != std::string::npos; });
}

} // namespace
