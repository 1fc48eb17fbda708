// The kernels against docs/attention/exact.md's own program, bit for bit. The `scalar` kernels round products by themselves and are
// left out.
#include "tests/exact_model.h"
#include "tests/problem.h"
#include "tests/testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace {

std::vector<const char *> exact_isas() {
    std::vector<const char *> isas = usable_isas();
    isas.erase(std::remove_if(isas.begin(), isas.end(), [](const char *isa) { return !std::strcmp(isa, "scalar"); }), isas.end());
    return isas;
}

size_t differing(const std::vector<float> &a, const std::vector<float> &b) {
    size_t n = 0;
    for (size_t i = 0; i < a.size(); i++) n += std::memcmp(&a[i], &b[i], sizeof a[i]) != 0;
    return n;
}

void expect_model(const Problem &problem, int threads = 2) {
    std::vector<float> expected(problem.n_out());
    exact_model(problem.shape, problem.args, expected.data());
    for (const char *isa : exact_isas()) {
        const std::vector<float> out = attend(problem, threads, isa);
        if (out.empty()) continue; // reported
        EXPECT(differing(out, expected) == 0, "%s: %zu of %zu values differ: %s", isa, differing(out, expected), out.size(),
               problem.spec.text().c_str());
    }
}

float *values_of(const pa_rows &rows, int cell, int head) { // of f32 rows that lie in one page
    return reinterpret_cast<float *>(static_cast<uint8_t *>(const_cast<void *>(rows.pages[0])) + cell * rows.cell_stride +
                                     head * rows.head_stride);
}

// Dense masks with positions: shuffled cells, and the kinds of disorder a cache may show.
enum class Disorder { none, twice, unknown };
struct Placed {
    std::vector<int32_t> pos;
    explicit Placed(Problem &problem, Disorder disorder, int first) {
        const int n = problem.spec.n_cells;
        pos.resize(size_t(n));
        std::iota(pos.begin(), pos.end(), first);
        std::shuffle(pos.begin(), pos.end(), std::mt19937_64(problem.spec.seed + 1));
        if (disorder == Disorder::twice) pos[0] = pos[size_t(n / 2)];
        if (disorder == Disorder::unknown) pos[size_t(n / 3)] = -1;
        problem.args.mask.cell_pos = pos.data();
    }
};

} // namespace

TEST(every_type_size_group_and_mask) {
    uint64_t seed = 0;
    for (const pa_dtype type : {PA_F32, PA_F16, PA_BF16, PA_Q8_0, PA_Q4_0}) {
        for (const int d : {16, 64, 80, 96, 128, 256, 576}) {
            if (type >= PA_Q8_0 && d % 32 != 0) continue;
            for (const int n_q : {1, 5, 40}) {
                Spec spec;
                spec.seed = ++seed;
                spec.k_type = spec.v_type = type;
                spec.d_k = spec.d_v = d;
                spec.n_kv_head = 1;
                spec.n_head = 1 + int(seed % 8);
                spec.n_q = n_q;
                spec.n_cells = seed % 3 == 0 ? 1700 : 200 + int(seed);
                if (n_q * spec.n_cells > 20000) spec.n_cells = 300;
                spec.mask = MaskKind(seed % 7);
                spec.softcap = seed % 4 == 1 ? 20.0f : 0.0f;
                spec.sinks = seed % 5 == 2;
                spec.query_deviation = seed % 6 == 3 ? 100.0 : 1.0;
                spec.window = 70;
                expect_model(Problem(spec));
            }
        }
    }
}

TEST(across_the_borders_of_tiles_and_chunks) {
    for (const int n_cells : {0, 1, 15, 16, 17, 47, 48, 49, 767, 768, 769, 1535, 1537, 2400}) {
        for (const int n_q : {1, 17}) {
            Spec spec;
            spec.n_cells = n_cells;
            spec.n_q = n_q;
            spec.n_head = 2;
            spec.d_k = spec.d_v = 32;
            expect_model(Problem(spec));
        }
    }
}

TEST(positions_beside_a_dense_mask) {
    for (const Disorder disorder : {Disorder::none, Disorder::twice, Disorder::unknown}) {
        for (const int first : {0, 31, 100000}) {
            for (const int n_q : {1, 3, 40}) {
                Spec spec;
                spec.mask = MaskKind::holes;
                spec.n_cells = 400;
                spec.n_q = n_q;
                spec.seed = uint64_t(first + n_q);
                Problem problem(spec);
                const Placed placed(problem, disorder, first);
                expect_model(problem, 3);
            }
        }
    }
}

TEST(positions_far_apart) { // more tiles than cells / kTile
    for (const int n_q : {1, 16, 50}) {
        Spec spec;
        spec.mask = MaskKind::holes;
        spec.n_cells = 300;
        spec.n_q = n_q;
        Problem problem(spec);
        Placed placed(problem, Disorder::none, 0);
        for (int32_t &at : placed.pos) at = at * 7000000 + 1000;
        expect_model(problem);
    }
}

TEST(references_that_rise_from_tile_to_tile) {
    for (const int n_q : {1, 20}) {
        Spec spec;
        spec.k_type = spec.v_type = PA_F32;
        spec.n_cells = 1000;
        spec.n_q = n_q;
        spec.sinks = true;
        const Problem problem(spec);
        for (int cell = 0; cell < spec.n_cells; cell++)
            for (int head = 0; head < spec.n_kv_head; head++)
                for (int i = 0; i < spec.d_k; i++) values_of(problem.args.k, cell, head)[i] *= float(cell % 331) * 0.5f;
        expect_model(problem);
    }
}

// V of one cell has an infinity, a NaN or the largest number in some column, K of another one is not finite.
TEST(values_that_are_not_finite) {
    for (const float odd : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
        for (const bool in_k : {false, true}) {
            for (const int n_q : {1, 3, 50}) {
                Spec spec;
                spec.k_type = spec.v_type = PA_F32;
                spec.n_cells = 900;
                spec.n_q = n_q;
                spec.mask = n_q == 3 ? MaskKind::holes : MaskKind::causal;
                const Problem problem(spec);
                values_of(in_k ? problem.args.k : problem.args.v, 880, 0)[5] = odd;
                values_of(in_k ? problem.args.k : problem.args.v, 30, 1)[7] = odd;
                expect_model(problem);
            }
        }
    }
}

TEST(sinks_of_every_size) {
    for (const float level : {-std::numeric_limits<float>::infinity(), -500.0f, 0.0f, 30.0f, 1000.0f}) {
        for (const int n_q : {1, 24}) {
            Spec spec;
            spec.n_q = n_q;
            spec.mask = MaskKind::hidden;
            spec.sinks = true;
            spec.sink_level = level;
            expect_model(Problem(spec));
        }
    }
}

// In the order of places cells 0, 7, 2 are not a run, though the first and the last are as far apart as if they were.
TEST(cells_that_only_look_like_a_run) {
    Spec spec;
    spec.n_q = 2;
    spec.n_cells = 8;
    Problem problem(spec);
    constexpr uint16_t sees = 0, hidden = 0xFC00; // 0 and -inf in f16
    std::vector<uint16_t> mask(16, hidden);
    for (const int cell : {0, 1, 2}) mask[size_t(cell)] = sees;     // the first query
    for (const int cell : {0, 7, 2}) mask[8 + size_t(cell)] = sees; // the second
    const std::vector<int32_t> pos = {0, 100, 2, 3, 4, 5, 6, 1};
    problem.args.mask.dense = mask.data();
    problem.args.mask.dense_stride = 16; // bytes
    problem.args.mask.cell_pos = pos.data();
    expect_model(problem);
}
