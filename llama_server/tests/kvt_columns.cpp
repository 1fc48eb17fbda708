// Columns of tensors by GGML's own copies, as kvt_columns.h has them, on GGML's CPU backend: for that file its memory is a device's.
// What is written lies where it belongs and all else is as it was, what is read is what lies there, in one piece and in many.
// WRONG_COPY names what the backend does wrong, and then the device must be turned down.
#define KVT_STAGING_BYTES ((size_t) 1200)
#define KVT_SPAN_BYTES ((size_t) 9000)

#include "ggml-backend.h"
#include "ggml.h"

// GGML's CPU memory names no device.
#define ggml_backend_buft_get_device(type) ((void) (type), ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU))

#ifdef WRONG_COPY
static ggml_status wrong_compute(ggml_backend_t queue, ggml_cgraph * graph);
#define ggml_backend_graph_compute wrong_compute
#endif
#include "kvt_columns.h"
#undef ggml_backend_graph_compute
#undef ggml_backend_buft_get_device

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#ifdef WRONG_COPY
static ggml_status wrong_compute(ggml_backend_t queue, ggml_cgraph * graph) {
    enum { lost, shifted, flushed, packed };
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * copy = ggml_graph_node(graph, i);
        if (copy->op != GGML_OP_CPY) {
            continue;
        }
        const ggml_tensor * from = copy->src[0];
        if (WRONG_COPY == lost) {
            copy->op = GGML_OP_NONE;
        }
        if (WRONG_COPY == shifted) { // a cell too far
            copy->data = static_cast<char *>(copy->data) + ggml_type_size(copy->type);
        }
        for (int64_t element = 0; element < from->ne[2]; ++element) {
            for (int64_t cell = 0; cell < from->ne[0]; ++cell) {
                auto * bits = reinterpret_cast<uint16_t *>(static_cast<char *>(from->data) + element*(int64_t) from->nb[2] + cell*(int64_t) from->nb[0]);
                if (WRONG_COPY == flushed && (*bits & 0x7c00) == 0) { // what is too small for a normal number becomes 0
                    *bits &= 0x8000;
                } else if (WRONG_COPY == packed && from->ne[0] == 1) { // without gaps, as CUDA does with what it takes for transposed
                    static_cast<uint16_t *>(copy->data)[element] = *bits;
                    copy->op = GGML_OP_NONE;
                }
            }
        }
    }
    return ggml_backend_graph_compute(queue, graph);
}
#endif

struct made {
    ggml_context * context = ggml_init({ 4*ggml_tensor_overhead(), nullptr, true });
    ggml_tensor * tensor;
    ggml_backend_buffer_t buffer;

    made(ggml_backend_t backend, ggml_type type, int64_t cells, int64_t elements) : tensor(ggml_new_tensor_2d(context, type, cells, elements)) {
        buffer = ggml_backend_alloc_buffer(backend, ggml_nbytes(tensor) + 4096);
        ggml_backend_tensor_alloc(buffer, tensor, ggml_backend_buffer_get_base(buffer));
    }
    made(const made &) = delete;
    made & operator=(const made &) = delete;
    ~made() {
        ggml_backend_buffer_free(buffer);
        ggml_free(context);
    }
};

[[maybe_unused]] static bool same(ggml_backend_t backend, ggml_type type, std::mt19937 & random) {
    const auto pick = [&random](size_t from, size_t to) { return std::uniform_int_distribution<size_t>(from, to)(random); };
    const size_t size = ggml_type_size(type), cells = pick(1, 300), elements = pick(1, 200);
    const size_t before = pick(0, elements - 1), some = elements - before; // as the stream of a slot begins within a tensor
    const made of(backend, type, (int64_t) cells, (int64_t) elements);
    std::vector<kvt_run> runs;
    size_t moved = 0;
    for (size_t cell = pick(0, 3); cell < cells; cell += pick(1, 3)) { // one alone, and many
        const size_t count = std::min(cells - cell, pick(1, random() % 4 == 0 ? 120 : 3));
        runs.push_back({ (before*cells + cell)*size, count });
        moved += count;
        cell += count;
    }
    std::vector<char> wanted(cells*elements*size), rows(moved*some*size), got(rows.size()), now(wanted.size());
    for (auto * bytes : { &wanted, &rows }) {
        std::generate(bytes->begin(), bytes->end(), [&random] { return (char) (random() & 0x3f); }); // no bits that are no number
    }
    ggml_backend_tensor_set(of.tensor, wanted.data(), 0, wanted.size());
    const kvt_columns columns { cells*size, some };
    const bool done = kvt_get_columns(of.tensor, columns, runs.data(), runs.size(), got.data());
    size_t at = 0;
    for (const auto & run : runs) {
        for (size_t element = 0; element < some; ++element, at += run.cells*size) {
            char * there = wanted.data() + run.first_byte + element*cells*size;
            if (std::memcmp(there, got.data() + at, run.cells*size) != 0) {
                std::printf("read: element %zu of %zu differs\n", element, some);
                return false;
            }
            std::memcpy(there, rows.data() + at, run.cells*size);
        }
    }
    const bool written = kvt_set_columns(of.tensor, columns, runs.data(), runs.size(), rows.data());
    ggml_backend_tensor_get(of.tensor, now.data(), 0, now.size());
    if (!done || !written || now != wanted) {
        std::printf("written: done %d %d, %zu runs in %zu cells, %zu elements of %zu\n", done, written, runs.size(), cells, some, elements);
        return false;
    }
    return true;
}

int main() {
    ggml_backend_load_all();
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    std::mt19937 random(1);
#ifdef WRONG_COPY
    const made of(backend, GGML_TYPE_F16, 8, 8);
    const bool passed = kvt_device_of_columns(of.tensor) == nullptr;
#else
    bool passed = true;
    for (int i = 0; i < 60 && passed; ++i) {
        passed = same(backend, i % 3 == 0 ? GGML_TYPE_F32 : i % 3 == 1 ? GGML_TYPE_BF16 : GGML_TYPE_F16, random);
    }
    const made quantised(backend, GGML_TYPE_Q8_0, 32, 8);
    passed = passed && kvt_device_of_columns(quantised.tensor) == nullptr;
#endif
    ggml_backend_free(backend);
    std::puts(passed ? "passed" : "failed");
    return passed ? 0 : 1;
}
