// Runs GGML_OP_FLASH_ATTN_EXT of a patched CPU backend and compares it with attention in f64.
//
//     OLLAMA_CPU_ATTENTION=exact attention_op exact    every case within BOUND, the same bits with 1, 2 and 3 threads
//     OLLAMA_CPU_ATTENTION=exact attention_op repeat   a few of them 100 times with 1 and with 2 threads: the same bits
//     attention_op stock                               the plan's work size is upstream's, the state says stock
//
// One line a case; exit code 1 and a line that says FAILED where one does not hold.
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr double BOUND = 1e-5; // relative L2 error against f64
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Which cells a query sees, as Ollama's cache numbers them.
struct Query { int seq, pos; };
struct Cell { int seq, pos; }; // seq -1: empty

struct Case {
    std::string name;
    int d_k, d_v, n_head, n_kv_head;
    ggml_type k_type, v_type;
    std::vector<Query> queries;
    std::vector<Cell> cells;
    int window = 0;      // cells, 0: none
    bool sinks = false;
    float softcap = 0.0f;
    float sharpness = 1.0f; // deviation of the logits, about
    bool has_mask = true;
    bool served = true;
    bool positions = false; // of the cells are given
};

bool sees(const Case & c, const Query & q, const Cell & cell) {
    return !c.has_mask || (cell.seq == q.seq && cell.pos <= q.pos && (c.window == 0 || q.pos - cell.pos < c.window));
}

std::vector<Query> queries(int seq, int first, int count) {
    std::vector<Query> out;
    for (int i = 0; i < count; i++) out.push_back({seq, first + i});
    return out;
}

// `used` cells of one sequence from position 0 on, then empty ones: the cache's length is a multiple of 256.
std::vector<Cell> cells(int used, int total) {
    std::vector<Cell> out;
    for (int i = 0; i < total; i++) out.push_back(i < used ? Cell{0, i} : Cell{-1, 0});
    return out;
}

// Bytes of rows of n values each, from floats of the given mean and deviation.
std::vector<uint8_t> rows(ggml_type type, int64_t n, int64_t count, float mean, float deviation, std::mt19937 & random) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> values((size_t) (n * count));
    for (float & v : values) v = normal(random);
    std::vector<uint8_t> out(ggml_row_size(type, n) * (size_t) count);
    ggml_quantize_chunk(type, values.data(), out.data(), 0, count, n, nullptr);
    return out;
}

void widen(ggml_type type, const uint8_t * from, int64_t n, float * to) {
    if (type == GGML_TYPE_F32) {
        std::memcpy(to, from, (size_t) n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(from, to, n);
    }
}

struct Data {
    std::vector<float> q, sinks;
    std::vector<uint8_t> k, v; // [cells][heads] rows, as in Ollama's cache
    std::vector<ggml_fp16_t> mask;
};

Data make(const Case & c) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    Data d;
    d.q.resize(c.queries.size() * (size_t) (c.n_head * c.d_k));
    for (float & x : d.q) x = c.sharpness * normal(random);
    d.k = rows(c.k_type, c.d_k, (int64_t) c.cells.size() * c.n_kv_head, 0.0f, 1.0f, random);
    d.v = rows(c.v_type, c.d_v, (int64_t) c.cells.size() * c.n_kv_head, 0.3f, 1.0f, random); // a mean shows lost sums
    d.sinks.resize((size_t) c.n_head);
    for (float & x : d.sinks) x = 2.0f * normal(random);
    d.mask.resize(c.queries.size() * c.cells.size());
    for (size_t i = 0; i < c.queries.size(); i++) {
        for (size_t j = 0; j < c.cells.size(); j++) {
            d.mask[i * c.cells.size() + j] = ggml_fp32_to_fp16(sees(c, c.queries[i], c.cells[j]) ? 0.0f : HIDDEN);
        }
    }
    return d;
}

std::vector<double> reference(const Case & c, const Data & d) {
    const int group = c.n_head / c.n_kv_head;
    const size_t n = c.cells.size();
    std::vector<float> k(n * (size_t) (c.n_kv_head * c.d_k)), v(n * (size_t) (c.n_kv_head * c.d_v));
    for (size_t row = 0; row < n * (size_t) c.n_kv_head; row++) {
        widen(c.k_type, &d.k[row * ggml_row_size(c.k_type, c.d_k)], c.d_k, &k[row * (size_t) c.d_k]);
        widen(c.v_type, &d.v[row * ggml_row_size(c.v_type, c.d_v)], c.d_v, &v[row * (size_t) c.d_v]);
    }
    std::vector<double> out(c.queries.size() * (size_t) (c.n_head * c.d_v), 0.0), s(n);
    for (size_t i = 0; i < c.queries.size(); i++) {
        for (int h = 0; h < c.n_head; h++) {
            const size_t kv = (size_t) (h / group);
            const float * q = &d.q[(i * (size_t) c.n_head + (size_t) h) * (size_t) c.d_k];
            double top = c.sinks ? (double) d.sinks[(size_t) h] : -INFINITY;
            for (size_t j = 0; j < n; j++) {
                s[j] = -INFINITY;
                if (!sees(c, c.queries[i], c.cells[j])) continue;
                double dot = 0;
                for (int x = 0; x < c.d_k; x++) {
                    dot += (double) q[x] * k[(j * (size_t) c.n_kv_head + kv) * (size_t) c.d_k + (size_t) x];
                }
                dot /= std::sqrt((double) c.d_k);
                s[j] = c.softcap != 0.0f ? c.softcap * std::tanh(dot / c.softcap) : dot;
                top = std::max(top, s[j]);
            }
            double sum = c.sinks ? std::exp((double) d.sinks[(size_t) h] - top) : 0.0;
            double * o = &out[(i * (size_t) c.n_head + (size_t) h) * (size_t) c.d_v];
            for (size_t j = 0; j < n; j++) {
                if (s[j] == -INFINITY) continue;
                const double w = std::exp(s[j] - top);
                sum += w;
                for (int x = 0; x < c.d_v; x++) o[x] += w * v[(j * (size_t) c.n_kv_head + kv) * (size_t) c.d_v + (size_t) x];
            }
            for (int x = 0; x < c.d_v; x++) o[x] = sum > 0 ? o[x] / sum : 0.0;
        }
    }
    return out;
}

struct Ran {
    std::vector<float> out;
    size_t work_size, stock_size;
};

Ran run(const Case & c, const Data & d, int n_threads) {
    const size_t bytes = d.k.size() + d.v.size() + d.mask.size() * 2 + d.q.size() * 4 +
                         c.queries.size() * (size_t) (c.n_head * c.d_v) * 4 + (4u << 20);
    ggml_context * ctx = ggml_init({bytes, nullptr, false});
    const int64_t n = (int64_t) c.cells.size(), n_q = (int64_t) c.queries.size();
    ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.d_k, c.n_head, n_q);
    ggml_tensor * k = ggml_new_tensor_3d(ctx, c.k_type, c.d_k, c.n_kv_head, n);
    ggml_tensor * v = ggml_new_tensor_3d(ctx, c.v_type, c.d_v, c.n_kv_head, n);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n, n_q);
    ggml_tensor * sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.n_head);
    std::memcpy(q->data, d.q.data(), d.q.size() * sizeof(float));
    std::memcpy(k->data, d.k.data(), d.k.size());
    std::memcpy(v->data, d.v.data(), d.v.size());
    std::memcpy(mask->data, d.mask.data(), d.mask.size() * sizeof(ggml_fp16_t));
    std::memcpy(sinks->data, d.sinks.data(), d.sinks.size() * sizeof(float));
    ggml_tensor * out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3),
        ggml_permute(ctx, v, 0, 2, 1, 3), c.has_mask ? mask : nullptr, 1.0f / std::sqrt((float) c.d_k), 0.0f, c.softcap);
    if (c.sinks) ggml_flash_attn_ext_add_sinks(out, sinks);
    if (c.positions) {
        out->src[5] = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n); // EXACTATTN_POSITIONS
        for (int64_t i = 0; i < n; i++) {
            const Cell & cell = c.cells[(size_t) i];
            static_cast<int32_t *>(out->src[5]->data)[i] = cell.seq < 0 ? -1 : cell.pos;
        }
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_cplan plan = ggml_graph_plan(graph, n_threads, nullptr);
    std::vector<uint8_t> work(plan.work_size + 8);
    plan.work_data = work.data() + 8; // as little alignment as ggml promises
    if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) {
        std::printf("FAILED %s: the graph was not computed\n", c.name.c_str());
        std::exit(1);
    }
    Ran ran;
    ran.out.assign((const float *) out->data, (const float *) out->data + ggml_nelements(out));
    ran.work_size = plan.work_size;
    // v0.16.3 ggml-cpu.c:2869, and a cache line a thread
    ran.stock_size = sizeof(float) * (size_t) (c.d_k + 2 * c.d_v) * (size_t) n_threads + 64 * (size_t) n_threads;
    ggml_free(ctx);
    return ran;
}

double relative_error(const std::vector<float> & got, const std::vector<double> & want) {
    double off = 0, all = 0;
    for (size_t i = 0; i < want.size(); i++) {
        off += (got[i] - want[i]) * (got[i] - want[i]);
        all += want[i] * want[i];
    }
    return std::sqrt(off / all);
}

std::vector<Case> cases() {
    const ggml_type F16 = GGML_TYPE_F16, F32 = GGML_TYPE_F32, BF16 = GGML_TYPE_BF16, Q8 = GGML_TYPE_Q8_0, Q4 = GGML_TYPE_Q4_0;
    std::vector<Case> all;
    auto add = [&](Case c) { all.push_back(std::move(c)); };
    // qwen3-0.6B's heads; a batch in the middle of a prompt, and the first one
    add({"prefill", 128, 128, 16, 8, F16, F16, queries(0, 700, 128), cells(828, 1024)});
    add({"prefill from nothing", 128, 128, 16, 8, F16, F16, queries(0, 0, 200), cells(200, 256)});
    add({"decode", 128, 128, 16, 8, F16, F16, queries(0, 3000, 1), cells(3001, 3072)});
    add({"decode, group of 5", 128, 128, 40, 8, F16, F16, queries(0, 1000, 1), cells(1001, 1024)});
    add({"decode, peaked", 128, 128, 16, 8, F16, F16, queries(0, 3000, 1), cells(3001, 3072), 0, false, 0.0f, 300.0f});
    // peaked: most weights underflow
    add({"prefill, peaked", 128, 128, 16, 8, F16, F16, queries(0, 500, 64), cells(564, 768), 0, false, 0.0f, 300.0f});

    Case slots{"several slots", 128, 128, 16, 8, F16, F16, {}, {}};
    for (int i = 0; i < 1024; i++) slots.cells.push_back({i / 7 % 4, i / 28 * 7 + i % 7});
    slots.queries = {{0, 180}, {1, 100}, {2, 255}, {3, 0}};
    add(slots);
    slots.name = "several slots, one of them with a prompt";
    for (int i = 0; i < 60; i++) slots.queries.push_back({2, 40 + i});
    add(slots);

    Case holes{"holes", 128, 128, 16, 8, F16, F16, queries(0, 850, 40), cells(890, 1024)};
    for (size_t i = 0; i < holes.cells.size(); i++) if (i % 3 == 1 || (i > 300 && i < 420)) holes.cells[i].seq = -1;
    add(holes);
    // after a shift the positions of the cells that stay are less by what was dropped, and new ones fill the gap
    Case shifted{"context shift", 128, 128, 16, 8, F16, F16, queries(0, 700, 30), cells(768, 768)};
    for (int i = 0; i < 768; i++) shifted.cells[(size_t) i].pos = i < 4 ? i : i < 142 ? 626 + i : i - 138;
    add(shifted);
    Case unseen{"a query that sees nothing", 128, 128, 16, 8, F16, F16, {{0, 100}, {5, 100}, {0, 3}}, cells(200, 256)};
    add(unseen);
    add({"no mask", 64, 64, 12, 12, F16, F16, queries(0, 0, 50), cells(50, 50), 0, false, 0.0f, 1.0f, false});

    add({"sliding window, gemma3's heads", 256, 256, 4, 1, F16, F16, queries(0, 1500, 20), cells(1520, 1536), 512});
    add({"sliding window, decode", 256, 256, 8, 4, F16, F16, queries(0, 1500, 1), cells(1501, 1536), 512});
    add({"sinks, gpt-oss's heads", 64, 64, 64, 8, F16, F16, queries(0, 500, 20), cells(520, 768), 128, true});
    add({"sinks, decode", 64, 64, 64, 8, F16, F16, queries(0, 700, 1), cells(701, 768), 0, true});
    add({"softcap", 128, 128, 8, 4, F16, F16, queries(0, 300, 33), cells(333, 512), 0, false, 30.0f, 20.0f});

    for (int n_q : {1, 70}) {
        const std::string what = n_q == 1 ? ", decode" : ", prefill";
        const auto q = queries(0, 900, n_q);
        const auto c = cells(900 + n_q, 1024);
        add({"q8_0" + what, 128, 128, 16, 8, Q8, Q8, q, c});
        add({"q4_0" + what, 128, 128, 16, 8, Q4, Q4, q, c});
        add({"K q8_0, V q4_0" + what, 128, 128, 16, 8, Q8, Q4, q, c});
        add({"K f16, V q8_0" + what, 64, 64, 10, 2, F16, Q8, q, c});
        add({"bf16" + what, 128, 128, 16, 8, BF16, BF16, q, c});
        add({"f32" + what, 128, 128, 4, 4, F32, F32, q, c});
        add({"head sizes 192 and 128" + what, 192, 128, 8, 8, F16, F16, q, c});
        add({"head size 80" + what, 80, 80, 8, 4, F16, F16, q, c});
    }
    slots.name += ", by position";
    slots.positions = true;
    add(slots);
    // the last ones: from here on the state names the reason
    Case stock{"head size 72 is stock's", 72, 72, 4, 4, F32, F32, queries(0, 100, 10), cells(110, 256)};
    stock.served = false;
    add(stock);
    stock.name += ", which knows no positions";
    stock.positions = true;
    add(stock);
    return all;
}

std::string state() {
    void * found = ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "exactattn_state");
    return found ? ((const char * (*)(void)) found)() : "(none)";
}

// Attentions with positions that stock's kernel has computed.
uint64_t refused() {
    void * found = ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "exactattn_refused");
    return found ? ((uint64_t (*)(void)) found)() : UINT64_MAX;
}

bool failed(const Case & c, const char * why) {
    std::printf("FAILED %s: %s\n", c.name.c_str(), why);
    return true;
}

bool check_exact(const Case & c) {
    const Data d = make(c);
    const uint64_t before = refused();
    const Ran ran = run(c, d, 2);
    if (refused() - before != (c.positions && !c.served ? 1u : 0u)) return failed(c, "refused, or not, against what was expected");
    const double error = relative_error(ran.out, reference(c, d));
    std::printf("%-45s error %.1e\n", c.name.c_str(), error);
    if (c.served != (state().find("stock where") == std::string::npos)) {
        return failed(c, ("served or not, against what was expected: " + state()).c_str());
    }
    if (!(error <= BOUND)) return failed(c, "too far from f64");
    for (int n_threads : {1, 2, 3}) {
        const Ran again = run(c, d, n_threads);
        if (std::memcmp(again.out.data(), ran.out.data(), ran.out.size() * sizeof(float)) != 0) {
            return failed(c, "other bits with another number of threads");
        }
    }
    return false;
}

bool check_repeat(const Case & c) {
    const Data d = make(c);
    const Ran first = run(c, d, 1);
    for (int i = 0; i < 200; i++) {
        const Ran again = run(c, d, 1 + i % 2);
        if (std::memcmp(again.out.data(), first.out.data(), first.out.size() * sizeof(float)) != 0) {
            return failed(c, "other bits when it was done again");
        }
    }
    std::printf("%-45s 200 times the same\n", c.name.c_str());
    return false;
}

bool check_stock(const Case & c) {
    const Ran ran = run(c, make(c), 2);
    return ran.work_size != ran.stock_size && failed(c, "the plan's work size is not upstream's");
}

} // namespace

int main(int argc, char ** argv) {
    const std::string mode = argc == 2 ? argv[1] : "";
    if (mode != "exact" && mode != "repeat" && mode != "stock") {
        std::printf("usage: attention_op exact|repeat|stock\n");
        return 2;
    }
    ggml_cpu_init(); // tables of f16
    int bad = 0;
    for (const Case & c : cases()) {
        if (mode == "exact") bad += check_exact(c);
        if (mode == "stock") bad += check_stock(c);
        const bool chosen = c.name == "prefill from nothing" || c.name == "decode" || c.name == "several slots";
        if (mode == "repeat" && chosen) bad += check_repeat(c);
    }
    std::printf("state: %s\n", state().c_str());
    const std::string wanted = mode == "stock" ? "stock" : "exact (";
    if (state().compare(0, wanted.size(), wanted) != 0) {
        std::printf("FAILED state: not %s\n", wanted.c_str());
        bad++;
    }
    return bad ? 1 : 0;
}
