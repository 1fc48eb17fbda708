#include "tests/problem.h"

#include "src/check.h"
#include "tests/testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace {

constexpr int kBlock = 32;
constexpr int kGap = 64;          // poisoned bytes around every page
constexpr uint8_t kPoison = 0xFF; // NaN in f32, f16, bf16 and as a block's scale

void store_f16(uint8_t *at, float value) {
    const uint16_t bits = to_f16(value);
    std::memcpy(at, &bits, 2);
}

void store_row(uint8_t *row, pa_dtype type, const float *values, int d) {
    if (type == PA_F32) std::memcpy(row, values, sizeof(float) * size_t(d));
    for (int i = 0; i < d && type == PA_F16; i++) store_f16(row + 2 * i, values[i]);
    for (int i = 0; i < d && type == PA_BF16; i++) std::memcpy(row + 2 * i, reinterpret_cast<const uint8_t *>(values + i) + 2, 2);
    if (type != PA_Q8_0 && type != PA_Q4_0) return;
    const int levels = type == PA_Q8_0 ? 127 : 7;
    for (int block = 0; block < d / kBlock; block++, values += kBlock) {
        float largest = 1e-6f;
        for (int i = 0; i < kBlock; i++) largest = std::max(largest, std::fabs(values[i]));
        uint8_t *at = row + block * (type == PA_Q8_0 ? 34 : 18);
        store_f16(at, largest / float(levels));
        int quants[kBlock];
        for (int i = 0; i < kBlock; i++) quants[i] = int(std::lrint(values[i] / largest * float(levels)));
        for (int i = 0; i < kBlock && type == PA_Q8_0; i++) at[2 + i] = uint8_t(int8_t(quants[i]));
        for (int i = 0; i < 16 && type == PA_Q4_0; i++) at[2 + i] = uint8_t((quants[i] + 8) | (quants[i + 16] + 8) << 4);
    }
}

} // namespace

uint16_t to_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto sign = uint16_t(bits >> 16 & 0x8000);
    const float magnitude = std::fabs(value);
    if (!(magnitude < 65520.0f)) return uint16_t(sign | 0x7C00);
    int exponent;
    std::frexp(magnitude, &exponent);
    const int unit = std::max(exponent - 11, -24); // of the last bit
    const auto steps = long(std::nearbyint(std::ldexp(magnitude, -unit)));
    if (steps < 1024) return uint16_t(sign | steps); // subnormal
    return uint16_t(sign | (((unit + 24) << 10) + steps));
}

std::string Spec::text() const {
    char line[400];
    std::snprintf(line, sizeof line,
                  "heads %d/%d d %d/%d types %d/%d n_q %d n_cells %d pages %d/%d head_major %d padding %d/%d mask %d "
                  "window %d deviation %g softcap %g sinks %d at %g seed %llu",
                  n_head, n_kv_head, d_k, d_v, int(k_type), int(v_type), n_q, n_cells, k_page_cells, v_page_cells,
                  head_major, row_padding, query_padding, int(mask), window, query_deviation, double(softcap), sinks,
                  double(sink_level), static_cast<unsigned long long>(seed));
    return line;
}

Problem::Problem(const Spec &its_spec) : spec(its_spec), random_(its_spec.seed) {
    shape.n_head = spec.n_head;
    shape.n_kv_head = spec.n_kv_head;
    shape.d_k = spec.d_k;
    shape.d_v = spec.d_v;
    shape.max_q = spec.n_q;
    shape.max_cells = std::max(spec.n_cells, 1);
    shape.k_type = spec.k_type;
    shape.v_type = spec.v_type;
    shape.scale = float(1.0 / std::sqrt(double(spec.d_k)));
    shape.softcap = spec.softcap;

    args.n_q = spec.n_q;
    args.n_cells = spec.n_cells;
    const size_t head_values = size_t(spec.d_k + spec.query_padding);
    q_.assign(size_t(spec.n_q) * size_t(spec.n_head) * head_values, std::numeric_limits<float>::quiet_NaN());
    std::normal_distribution<float> normal(0.0f, float(spec.query_deviation));
    for (size_t row = 0; row < q_.size() / head_values; row++) {
        for (int i = 0; i < spec.d_k; i++) q_[row * head_values + size_t(i)] = normal(random_);
    }
    args.q = q_.data();
    args.q_head_stride = int64_t(sizeof(float) * head_values);
    args.q_stride = args.q_head_stride * spec.n_head;
    args.k = fill(k_, spec.k_type, spec.d_k, spec.k_page_cells, 0.0);
    args.v = fill(v_, spec.v_type, spec.d_v, spec.v_page_cells, spec.value_mean);
    make_mask();
    if (spec.sinks) {
        std::normal_distribution<float> spread(spec.sink_level, 1.0f);
        for (int h = 0; h < spec.n_head; h++) sinks_.push_back(spread(random_));
        args.sinks = sinks_.data();
    }
}

pa_rows Problem::fill(Store &store, pa_dtype type, int d, int page_cells, double mean) {
    if (page_cells == 0) page_cells = std::max(spec.n_cells, 1);
    const int64_t row = (paged_attn::row_bytes(type, d) + 3) / 4 * 4 + spec.row_padding; // so that f32 stays aligned
    const int n_pages = (spec.n_cells + page_cells - 1) / page_cells;
    const int64_t page_bytes = (row * page_cells * spec.n_kv_head + 2 * kGap + 63) / 64 * 64;
    pa_rows rows{};
    rows.page_cells = page_cells;
    rows.n_pages = n_pages;
    rows.cell_stride = spec.head_major ? row : row * spec.n_kv_head;
    rows.head_stride = spec.head_major ? row * page_cells : row;

    store.bytes.assign(size_t(page_bytes * n_pages), kPoison);
    std::vector<int> slots(size_t(n_pages), 0);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    std::normal_distribution<float> normal(float(mean), 1.0f);
    std::vector<float> values(size_t(d), 0.0f);
    for (int page = 0; page < n_pages; page++) {
        uint8_t *at = store.bytes.data() + slots[size_t(page)] * page_bytes + kGap;
        store.pages.push_back(at);
        for (int cell = 0; cell < page_cells && page * page_cells + cell < spec.n_cells; cell++) {
            for (int head = 0; head < spec.n_kv_head; head++) {
                for (float &value : values) value = normal(random_);
                store_row(at + cell * rows.cell_stride + head * rows.head_stride, type, values.data(), d);
            }
        }
    }
    rows.pages = store.pages.data();
    return rows;
}

void Problem::make_mask() {
    const auto cells = size_t(spec.n_cells), queries = size_t(spec.n_q);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    if (spec.mask == MaskKind::holes || spec.mask == MaskKind::bias || spec.mask == MaskKind::hidden) {
        const size_t stride = cells + 3; // rows that do not follow each other, for the stride's sake
        const uint16_t minus_infinity = 0xFC00, lowest = 0xFBFF;
        dense_.assign(queries * stride, 0x7E00); // NaN
        for (size_t i = 0; i < queries; i++) {
            const bool blind = spec.mask == MaskKind::hidden && i % 2 == 0; // sees nothing
            for (size_t c = 0; c < cells; c++) {
                const bool seen = !blind && uniform(random_) < 0.7f;
                const float bias = spec.mask == MaskKind::bias ? 4.0f * uniform(random_) - 2.0f : 0.0f;
                dense_[i * stride + c] = seen ? to_f16(bias) : c % 5 ? minus_infinity : lowest;
            }
        }
        args.mask.dense = dense_.data();
        args.mask.dense_stride = int64_t(2 * stride);
        return;
    }
    if (spec.mask == MaskKind::none) return;
    const bool several = spec.mask == MaskKind::sequences;
    const int n_seq = several ? 3 : 1;
    for (int c = 0; c < spec.n_cells; c++) {
        const bool empty = several && uniform(random_) < 0.1f;
        cell_pos_.push_back(empty ? -1 : c / n_seq);
        cell_seq_.push_back(c % n_seq);
    }
    if (several) { // cells out of order, as after many requests
        for (size_t c = cells; c > 1; c--) {
            const size_t other = size_t(random_() % c);
            std::swap(cell_pos_[c - 1], cell_pos_[other]);
            std::swap(cell_seq_[c - 1], cell_seq_[other]);
        }
    }
    for (int i = 0; i < spec.n_q; i++) {
        query_pos_.push_back(several ? spec.n_cells / n_seq - 1 - i / n_seq : spec.n_cells - spec.n_q + i);
        query_seq_.push_back(i % n_seq);
    }
    args.mask.cell_pos = cell_pos_.data();
    args.mask.query_pos = query_pos_.data();
    if (several) args.mask.cell_seq = cell_seq_.data(), args.mask.query_seq = query_seq_.data();
    if (spec.mask == MaskKind::window) args.mask.window = spec.window;
}

std::vector<double> Problem::reference() const {
    std::vector<double> out(n_out());
    const pa_status status = pa_reference(&shape, &args, out.data());
    EXPECT(status == PA_OK, "reference: %s: %s", pa_last_error(), spec.text().c_str());
    return out;
}

Plan::Plan(const pa_shape &shape, int threads, const char *isa) {
    const pa_status status = pa_cpu_plan_create(&shape, threads, isa, &plan_);
    EXPECT(status == PA_OK, "%s: %s", isa, pa_last_error());
}

std::vector<const char *> usable_isas() {
    std::vector<const char *> usable;
    pa_shape shape{};
    shape.n_head = shape.n_kv_head = shape.max_q = shape.max_cells = 1;
    shape.d_k = shape.d_v = 64;
    shape.k_type = shape.v_type = PA_F16;
    shape.scale = 1.0f;
    for (const char *isa : {"avx512", "avx2", "neon", "scalar"}) {
        pa_cpu_plan *plan = nullptr;
        if (pa_cpu_plan_create(&shape, 1, isa, &plan) == PA_OK) usable.push_back(isa);
        pa_cpu_plan_destroy(plan);
    }
    return usable;
}

std::vector<float> attend(const Problem &problem, int threads, const char *isa) {
    const Plan plan(problem.shape, threads, isa);
    std::vector<float> out(problem.n_out(), std::numeric_limits<float>::quiet_NaN());
    pa_args args = problem.args;
    args.out = out.data();
    if (!plan.get()) return {};
    const pa_status status = pa_cpu_run(plan.get(), &args);
    EXPECT(status == PA_OK, "%s: %s: %s", isa, pa_last_error(), problem.spec.text().c_str());
    return status == PA_OK ? out : std::vector<float>();
}

double relative_error(const std::vector<float> &a, const std::vector<double> &b) {
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < b.size(); i++) {
        const double difference = double(a[i]) - b[i];
        if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
        error += difference * difference;
        norm += b[i] * b[i];
    }
    return error == 0.0 ? 0.0 : std::sqrt(error / norm);
}

double worst_row_error(const Problem &problem, const std::vector<float> &a, const std::vector<double> &b) {
    const auto d = size_t(problem.spec.d_v);
    double norm = 0.0, worst = 0.0;
    for (const double value : b) norm += value * value;
    if (norm == 0.0) return relative_error(a, b);
    norm /= double(b.size() / d); // of a row, in the mean
    for (size_t at = 0; at < b.size(); at += d) {
        double error = 0.0;
        for (size_t i = at; i < at + d; i++) error += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
        worst = std::max(worst, error);
    }
    return std::sqrt(worst / norm);
}

void expect_exact(const Spec &spec, double bound, int threads) {
    const Problem problem(spec);
    const std::vector<double> expected = problem.reference();
    for (const char *isa : usable_isas()) {
        const std::vector<float> out = attend(problem, threads, isa);
        if (out.empty()) continue; // reported
        const double error = relative_error(out, expected), row = worst_row_error(problem, out, expected);
        EXPECT(error <= bound && row <= 10 * bound, "%s: error %.3g, worst row %.3g: %s", isa, error, row,
               spec.text().c_str());
    }
}
