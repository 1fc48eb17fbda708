// The library that is tested, opened beside a recorder; graphs as a model's; and what was recorded of them.
#pragma once
#include "recorder.h"
#include "tests/testing.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <dlfcn.h>
#include <memory>

namespace {

using Lines = std::vector<std::string>;

constexpr int64_t kDim = 8, kHeads = 2, kCells = 64;
constexpr size_t kRowBytes = kDim * kHeads * 2; // f16

std::string said; // by GGML's log

struct Library {
    ggml_backend_reg_t reg = nullptr;
    Recorder *recorder = nullptr;
    int (*score)(void) = nullptr;
} library;

bool open(const std::string &folder) {
    setenv("OLLAMA_PAGED_ATTN", "1", 1);
    void *stock = dlopen((folder + "/libggml-cuda.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    void *shim = dlopen((folder + "/libggml-cuda-tiering.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!stock || !shim) {
        std::printf("%s\n", dlerror());
        return false;
    }
    library.recorder = reinterpret_cast<recorder_t>(dlsym(stock, "recorder"))();
    library.score = reinterpret_cast<int (*)(void)>(dlsym(shim, "ggml_backend_score"));
    library.reg = reinterpret_cast<ggml_backend_init_t>(dlsym(shim, "ggml_backend_init"))();
    return library.reg != nullptr;
}

ggml_backend_dev_t device(size_t index = 0) { return library.reg->iface.get_device(library.reg, index); }

ggml_backend_buffer_type_t paged_type(size_t index = 0, bool no_alloc = false, bool ahead = true) {
    void *function = library.reg->iface.get_proc_address(library.reg, "kvpaged_buffer_type");
    using Type = ggml_backend_buffer_type_t (*)(ggml_backend_dev_t, bool, bool);
    return reinterpret_cast<Type>(function)(device(index), no_alloc, ahead);
}

std::string join(const Lines &lines) {
    std::string text;
    for (const std::string &line : lines) text += "      " + line + "\n";
    return text;
}

// A model's graphs: for each layer rows are made (ROPE), written and attended.
struct Model {
    Model() {
        context = ggml_init({400 * ggml_tensor_overhead() + 8 * ggml_graph_overhead(), nullptr, true});
        graph = ggml_new_graph(context);
        rows = ggml_new_tensor_3d(context, GGML_TYPE_F32, kDim, kHeads, 1);
        positions = ggml_new_tensor_1d(context, GGML_TYPE_I32, 1);
        query = ggml_new_tensor_3d(context, GGML_TYPE_F32, kDim, 1, kHeads);
        mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, kCells, 1);
    }
    ~Model() {
        for (ggml_backend_buffer_t buffer : buffers) ggml_backend_buffer_free(buffer);
        ggml_free(context);
    }
    Model(const Model &) = delete;
    Model &operator=(const Model &) = delete;

    ggml_tensor *cache(const std::string &name, ggml_backend_buffer_type_t type, int64_t cells = kCells) {
        ggml_tensor *made = ggml_new_tensor_3d(context, GGML_TYPE_F16, kDim, kHeads, cells);
        ggml_set_name(made, name.c_str());
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, ggml_nbytes(made));
        buffers.push_back(buffer);
        ggml_backend_tensor_alloc(buffer, made, ggml_backend_buffer_get_base(buffer));
        return made;
    }
    ggml_tensor *add(ggml_tensor *node, const std::string &name) {
        ggml_set_name(node, name.c_str());
        ggml_build_forward_expand(graph, node);
        return node;
    }
    void write(ggml_tensor *into, const std::string &name) {
        ggml_tensor *made = add(ggml_rope(context, rows, positions, kDim, 0), name + "rows");
        ggml_tensor *flat = ggml_reshape_2d(context, made, kDim * kHeads, 1);
        add(ggml_set_rows(context, ggml_reshape_2d(context, into, kDim * kHeads, into->ne[2]), flat, positions), name);
    }
    ggml_tensor *view(ggml_tensor *of, int64_t first = 16, int64_t count = 32) {
        ggml_tensor *seen = ggml_view_3d(context, of, kDim, kHeads, count, of->nb[1], of->nb[2],
                                         static_cast<size_t>(first) * of->nb[2]);
        seen = ggml_permute(context, seen, 0, 2, 1, 3);
        ggml_set_name(seen, of->name);
        return seen;
    }
    ggml_tensor *attention(ggml_tensor *k, ggml_tensor *v, const std::string &name) {
        return add(ggml_flash_attn_ext(context, query, view(k), view(v), nullptr, 1.0f, 0, 0), name);
    }
    void layer(int number, ggml_backend_buffer_type_t type) {
        const std::string n = std::to_string(number);
        ggml_tensor *k = cache("k" + n, type), *v = cache("v" + n, type);
        write(k, "k" + n);
        write(v, "v" + n);
        attention(k, v, "a" + n);
    }

    ggml_context *context;
    ggml_cgraph *graph;
    ggml_tensor *rows, *positions, *query, *mask;
    std::vector<ggml_backend_buffer_t> buffers;
};

struct FreeBackend {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};
using Backend = std::unique_ptr<ggml_backend, FreeBackend>;

// A new backend: of the streams that are made from here on the first computes, and the second, if there is one, copies.
Backend new_backend(const char *prefetch = "1", size_t index = 0) {
    setenv("OLLAMA_PAGED_PREFETCH", prefetch, 1);
    return Backend(device(index)->iface.init_backend(device(index), nullptr));
}

// The lines that `does` leads to. Streams, events and buffers that were first used in it are numbered anew: S0, E0, D0.
template <typename Does> Lines recorded(Does does) {
    library.recorder->lines.clear();
    does();
    Lines lines = std::move(library.recorder->lines);
    library.recorder->lines.clear();
    const std::pair<const char *, const char *> kinds[] = {{"s", "S"}, {" e", " E"}, {"device", "D"}};
    for (const auto &[prefix, other] : kinds) {
        std::vector<std::string> seen;
        for (std::string &line : lines) {
            for (size_t from = 0; (from = line.find(prefix, from)) != std::string::npos;) {
                const size_t digits = from + std::string(prefix).size();
                size_t end = digits;
                while (end < line.size() && std::isdigit(static_cast<unsigned char>(line[end]))) end++;
                const bool starts = prefix[0] != 's' || from == 0;
                if (end == digits || !starts) {
                    from = digits;
                    continue;
                }
                const std::string old = line.substr(digits, end - digits);
                auto found = std::find(seen.begin(), seen.end(), old);
                if (found == seen.end()) found = seen.insert(seen.end(), old);
                const std::string fresh = other + std::to_string(found - seen.begin());
                line.replace(from, end - from, fresh);
                from += fresh.size();
            }
        }
    }
    return lines;
}

Lines computed(Model &model, ggml_backend_t backend) {
    return recorded([&] { backend->iface.graph_compute(backend, model.graph, 7); });
}

[[maybe_unused]] void expect_lines(const Lines &found, const Lines &wanted, int line) {
    EXPECT(found == wanted, "line %d:\n%s    instead of\n%s", line, join(found).c_str(), join(wanted).c_str());
}
#define EXPECT_LINES(found, ...) expect_lines(found, __VA_ARGS__, __LINE__)

// Without what is said while staging memory is taken: the streams are synchronised.
[[maybe_unused]] Lines warm(Model &model, ggml_backend_t backend) {
    computed(model, backend);
    return computed(model, backend);
}

// testing.cpp has main, which runs them all.
struct Opened {
    Opened() {
        ggml_log_set([](ggml_log_level, const char *text, void *) { said += text; }, nullptr);
        const char *folder = std::getenv("SHIM_TEST_FOLDER");
        if (!folder || !open(folder)) {
            std::printf("FAILED: SHIM_TEST_FOLDER has no libraries\n");
            std::exit(1);
        }
    }
} opened;

} // namespace
