// Multiplies weights that lie in GGML's AMX buffers, as llama.cpp has them, and compares with the same weights in plain buffers.
//
//     products TYPE ROWS WIDTH
//
// One line a number of columns and a number of threads: both numbers, the largest difference by what it may be, the products of
// tiles that were made, and whether the columns have the bits that they have among MOST columns with one thread.
//
// What a difference may be. Both sides round each column's values in the same way (to blocks of q8_0, q8_1 or q8_K; the values are
// such as f16 has, too), and the sums of whole numbers are exact. So the two differ only by roundings of f32: one for each block of
// 32 values, of 2^-24 of what was added, without signs, and as likely up as down: together they are as the square root of their
// number. A weight is d q + m with |m| <= the largest one of its block, so its parts add up to at most three times that. One
// quantum of one weight, among thousands that are right, is more.
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int COLUMNS[] = {100, 1, 2, 3, 16, 17, 33};
constexpr int MOST = 100;
constexpr int BLOCK = 32;

using Values = std::vector<float>;

[[noreturn]] void fail(const char * why) {
    std::fprintf(stderr, "%s\n", why);
    std::exit(1);
}

ggml_type type_of(const std::string & name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * its = ggml_type_name((ggml_type) t);
        if (its != nullptr && name == its) return (ggml_type) t;
    }
    fail("no such type");
}

// GGML's own way to it, which llama.cpp takes.
ggml_backend_buffer_type_t amx_buffers() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * one = extra(cpu); one != nullptr && *one != nullptr; one++) {
        if (std::strcmp(ggml_backend_buft_name(*one), "AMX") == 0) return *one;
    }
    fail("GGML offers no AMX buffers");
}

struct Weights {
    ggml_type type;
    int64_t rows, width;
    std::vector<uint8_t> bytes;
    Values largest; // of each block of BLOCK values

    Weights(ggml_type its_type, int64_t its_rows, int64_t its_width) : type(its_type), rows(its_rows), width(its_width) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal(0.25f); // so that the least value of a block counts
        Values values((size_t) (rows * width));
        for (float & v : values) v = normal(random);
        bytes.resize(ggml_row_size(type, width) * (size_t) rows);
        ggml_quantize_chunk(type, values.data(), bytes.data(), 0, rows, width, nullptr);
        ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), rows * width);
        for (size_t i = 0; i < values.size(); i++) {
            if (i % BLOCK == 0) largest.push_back(0);
            largest.back() = std::max(largest.back(), std::fabs(values[i]));
        }
    }
};

// Columns whose sizes differ, so that one with another's scale is far off.
Values columns_of(int64_t width) {
    std::mt19937 random(8);
    std::normal_distribution<float> normal(0.5f);
    Values columns((size_t) (width * MOST));
    for (size_t i = 0; i < columns.size(); i++) {
        const float value = std::ldexp(normal(random), (int) (i / (size_t) width) % 7 - 3);
        columns[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(value));
    }
    return columns;
}

// The product of the first `n` columns, with weights in buffers of type `place`.
Values multiply(const Weights & w, const Values & columns, int n, int threads, ggml_backend_buffer_type_t place) {
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, threads);
    ggml_context * held = ggml_init({ggml_tensor_overhead(), nullptr, true});
    ggml_context * ctx = ggml_init({8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    ggml_tensor * a = ggml_new_tensor_2d(held, w.type, w.width, w.rows);
    ggml_tensor * b = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, w.width, n);
    ggml_tensor * out = ggml_mul_mat(ctx, a, b);
    ggml_backend_buffer_t weights = ggml_backend_alloc_ctx_tensors_from_buft(held, place);
    ggml_backend_buffer_t others = ggml_backend_alloc_ctx_tensors(ctx, cpu);
    ggml_backend_tensor_set(a, w.bytes.data(), 0, w.bytes.size());
    ggml_backend_tensor_set(b, columns.data(), 0, ggml_nbytes(b));
    if (!ggml_backend_supports_op(cpu, out)) fail("GGML does not compute it from such a buffer");
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) fail("the graph failed");
    Values result((size_t) ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_buffer_free(weights);
    ggml_backend_buffer_free(others);
    ggml_free(held);
    ggml_free(ctx);
    ggml_backend_free(cpu);
    return result;
}

// The largest difference, divided by what it may be.
double worst_of(const Weights & w, const Values & columns, const Values & got, const Values & wanted) {
    const int64_t blocks = w.width / BLOCK;
    const double rounding = std::ldexp(std::sqrt((double) blocks), -24);
    double worst = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        const int64_t row = (int64_t) i % w.rows, column = (int64_t) i / w.rows;
        double sum = 0; // of what is added, without signs
        for (int64_t block = 0; block < blocks; block++) {
            double values = 0;
            for (int64_t k = 0; k < BLOCK; k++) values += std::fabs(columns[(size_t) (column * w.width + block * BLOCK + k)]);
            sum += values * w.largest[(size_t) (row * blocks + block)];
        }
        const double by = std::fabs((double) got[i] - (double) wanted[i]) / (3 * sum * rounding);
        if (!std::isfinite(by)) return INFINITY;
        worst = std::max(worst, by);
    }
    return worst;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 4) fail("products TYPE ROWS WIDTH");
    const Weights w(type_of(argv[1]), std::atoll(argv[2]), std::atoll(argv[3]));
    const Values columns = columns_of(w.width);
    ggml_backend_buffer_type_t amx = amx_buffers(), plain = ggml_backend_cpu_buffer_type();
    const Values all = multiply(w, columns, MOST, 1, amx);
    for (int n : COLUMNS) {
        const Values wanted = multiply(w, columns, n, 1, plain);
        for (int threads : {1, 3}) {
            const uint64_t before = emulated_amx::products;
            const Values got = multiply(w, columns, n, threads, amx);
            const uint64_t made = emulated_amx::products - before;
            const bool same = std::memcmp(got.data(), all.data(), got.size() * sizeof(float)) == 0;
            std::printf("%d %d %.6f %" PRIu64 " %d\n", n, threads, worst_of(w, columns, got, wanted), made, same);
        }
    }
    return 0;
}
