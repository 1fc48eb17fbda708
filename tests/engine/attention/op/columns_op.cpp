// Multiplies weights of a patched CPU backend with one column, as for a generated token, and with several, as for a prompt.
//
//     OLLAMA_CPU_ATTENTION=exact columns_op exact   the bits of a column are the same, whatever stands beside it
//     columns_op stock                              those of f32, f16 and bf16 are not: the check above can fail
//     columns_op time [TYPE...]                     milliseconds of one column times 4096 x 4096 weights, least and median
//
// One line a type; exit code 1 and a line that says FAILED where it is not as said.
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

// exactAttnAnyCut in exactattn_order.go
constexpr ggml_type TYPES[] = {
    GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
    GGML_TYPE_Q8_0, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_MXFP4,
};

struct Weights {
    ggml_type type;
    int64_t width, rows, matrices;
    std::vector<uint8_t> bytes; // [matrices][rows] rows of `width` values

    Weights(ggml_type its_type, int64_t its_width, int64_t its_rows, int64_t its_matrices = 1)
        : type(its_type), width(its_width), rows(its_rows), matrices(its_matrices) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        std::vector<float> values((size_t) (width * rows * matrices));
        for (float & v : values) v = normal(random);
        bytes.resize(ggml_row_size(type, width) * (size_t) (rows * matrices));
        ggml_quantize_chunk(type, values.data(), bytes.data(), 0, rows * matrices, width, nullptr);
    }
};

// The product, [matrices][columns][rows], with columns [matrices][n][width]; how long the best and the middle of the turns took.
struct Product {
    std::vector<float> out;
    double least_ms, median_ms;
};

Product multiply(const Weights & w, const std::vector<float> & columns, int n_threads, int turns = 1) {
    ggml_context * ctx = ggml_init({w.bytes.size() + columns.size() * 64 + (16u << 20), nullptr, false});
    ggml_tensor * a = ggml_new_tensor_3d(ctx, w.type, w.width, w.rows, w.matrices);
    const int64_t n = (int64_t) columns.size() / w.width / w.matrices;
    ggml_tensor * b = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w.width, n, w.matrices);
    std::memcpy(a->data, w.bytes.data(), w.bytes.size());
    std::memcpy(b->data, columns.data(), columns.size() * sizeof(float));
    ggml_tensor * out = ggml_mul_mat(ctx, a, b);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_cplan plan = ggml_graph_plan(graph, n_threads, nullptr);
    std::vector<uint8_t> work(plan.work_size + 64);
    plan.work_data = work.data();
    std::vector<double> ms;
    for (int turn = 0; turn < turns; turn++) {
        const auto start = std::chrono::steady_clock::now();
        if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) std::exit(1);
        ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(ms.begin(), ms.end());
    Product product{{(const float *) out->data, (const float *) out->data + ggml_nelements(out)}, ms.front(), ms[ms.size() / 2]};
    ggml_free(ctx);
    return product;
}

std::vector<float> random_columns(int64_t width, int64_t n) {
    std::mt19937 random(8);
    std::normal_distribution<float> normal;
    std::vector<float> columns((size_t) (width * n));
    for (float & v : columns) v = normal(random);
    return columns;
}

// Values of a product of 24 columns that have other bits when they are multiplied `cut` at a time.
size_t differing(const Weights & w, int64_t cut, int n_threads) {
    constexpr int64_t n = 24;
    const std::vector<float> all = random_columns(w.width, n * w.matrices); // [matrices][n]
    const std::vector<float> whole = multiply(w, all, 1).out;
    size_t found = 0;
    for (int64_t first = 0; first < n; first += cut) {
        const int64_t some = std::min(cut, n - first);
        std::vector<float> columns;
        for (int64_t m = 0; m < w.matrices; m++) {
            const auto from = all.begin() + (m * n + first) * w.width;
            columns.insert(columns.end(), from, from + some * w.width);
        }
        const std::vector<float> part = multiply(w, columns, n_threads).out;
        for (int64_t m = 0; m < w.matrices; m++) {
            for (int64_t i = 0; i < some * w.rows; i++) {
                const size_t at = (size_t) ((m * n + first) * w.rows + i);
                found += std::memcmp(&part[(size_t) (m * some * w.rows + i)], &whole[at], sizeof(float)) != 0;
            }
        }
    }
    return found;
}

bool check(ggml_type type, bool exact) {
    const bool plain = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
    size_t found = 0;
    for (const int64_t rows : {256, 259}) { // of 259 sgemm does none
        for (const int64_t cut : {1, 2, 3, 5, 7, 16}) {
            for (const int n_threads : {1, 2, 3}) found += differing(Weights(type, 512, rows), cut, n_threads);
        }
    }
    if (type != GGML_TYPE_F32) found += differing(Weights(type, 256, 64, 3), 1, 2); // f32: exactAttnSameForAnyCut
    std::printf("%-6s %zu values differ\n", ggml_type_name(type), found);
    if ((found == 0) == (exact || !plain)) return false;
    std::printf("FAILED %s: %s\n", ggml_type_name(type), found == 0 ? "the same bits, which stock's have not" : "other bits");
    return true;
}

void time(ggml_type type) {
    const Weights w(type, 4096, 4096);
    for (const int n_threads : {1, 2}) {
        const Product p = multiply(w, random_columns(w.width, 1), n_threads, 60);
        std::printf("%-6s %d threads: least %.3f ms, median %.3f\n", ggml_type_name(type), n_threads, p.least_ms, p.median_ms);
    }
}

} // namespace

int main(int argc, char ** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode != "exact" && mode != "stock" && mode != "time") {
        std::printf("usage: columns_op exact|stock|time [TYPE...]\n");
        return 2;
    }
    ggml_cpu_init(); // tables of f16
    int bad = 0;
    for (const ggml_type type : TYPES) {
        const bool named = std::find_if(argv + 2, argv + argc, [&](const char * name) {
            return !std::strcmp(name, ggml_type_name(type));
        }) != argv + argc;
        if (argc > 2 && !named) continue;
        if (mode == "time") time(type);
        else bad += check(type, mode == "exact");
    }
    return bad ? 1 : 0;
}
