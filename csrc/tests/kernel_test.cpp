// Every instruction set of this machine against the f64 reference, over the shapes that models have.
#include "tests/problem.h"
#include "tests/testing.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr pa_dtype kTypes[] = {PA_F32, PA_F16, PA_BF16, PA_Q8_0, PA_Q4_0};
constexpr int kRatios[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};
constexpr int kHeadSizes[] = {64, 80, 96, 112, 128, 192, 256};

bool whole_blocks(pa_dtype type, int d) { return d % (type == PA_Q8_0 || type == PA_Q4_0 ? 32 : 16) == 0; }

} // namespace

TEST(every_pair_of_data_types) {
    for (const pa_dtype k_type : kTypes) {
        for (const pa_dtype v_type : kTypes) {
            for (const int n_q : {1, 3, 40}) {
                Spec spec;
                spec.k_type = k_type;
                spec.v_type = v_type;
                spec.d_k = spec.d_v = 128;
                spec.n_q = n_q;
                spec.n_cells = 333;
                spec.mask = MaskKind::causal;
                spec.k_page_cells = 64;
                expect_exact(spec);
            }
        }
    }
}

TEST(every_ratio_of_heads) {
    for (const int ratio : kRatios) {
        for (const int n_q : {1, 2, 3, 5, 16, 77}) {
            Spec spec;
            spec.n_head = 2 * ratio;
            spec.n_q = n_q;
            spec.n_cells = 200;
            spec.mask = MaskKind::causal;
            spec.seed = unsigned(ratio);
            expect_exact(spec);
        }
    }
}

TEST(every_head_size) {
    for (const int d : kHeadSizes) {
        for (const pa_dtype type : kTypes) {
            if (!whole_blocks(type, d)) continue;
            for (const int n_q : {1, 5, 77}) {
                Spec spec;
                spec.d_k = spec.d_v = d;
                spec.k_type = spec.v_type = type;
                spec.n_q = n_q;
                spec.n_cells = 150;
                spec.mask = MaskKind::causal;
                expect_exact(spec);
            }
        }
    }
}

TEST(k_and_v_of_different_size) {
    const int sizes[][2] = {{576, 512}, {192, 128}, {64, 256}, {256, 64}, {16, 48}, {80, 112}, {1024, 1024}};
    for (const auto &d : sizes) {
        for (const int n_q : {1, 4, 33}) {
            Spec spec;
            spec.n_head = 8;
            spec.n_kv_head = 1;
            spec.d_k = d[0];
            spec.d_v = d[1];
            spec.n_q = n_q;
            spec.n_cells = 100;
            expect_exact(spec);
        }
    }
}

TEST(lengths_around_every_border) {
    for (const int n_cells : {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 255, 256,
                              257, 511, 512, 513, 1023, 1025, 2047, 2048, 2049}) {
        for (const int n_q : {1, 9}) {
            for (const int page_cells : {0, 32, 7}) {
                Spec spec;
                spec.n_kv_head = 1;
                spec.n_head = 2;
                spec.n_cells = n_cells;
                spec.n_q = n_q;
                spec.k_page_cells = page_cells;
                spec.v_page_cells = page_cells;
                expect_exact(spec);
            }
        }
    }
}

TEST(a_batch_of_512_queries) {
    for (const pa_dtype type : {PA_F16, PA_Q8_0}) {
        Spec spec;
        spec.n_head = 5;
        spec.n_kv_head = 1;
        spec.d_k = spec.d_v = 64;
        spec.k_type = spec.v_type = type;
        spec.n_q = 512;
        spec.n_cells = 600;
        spec.mask = MaskKind::causal;
        spec.k_page_cells = spec.v_page_cells = 256;
        expect_exact(spec);
    }
}

TEST(pages_of_any_size_and_layout) {
    for (const int page_cells : {1, 5, 16, 32, 100, 256}) {
        for (const bool head_major : {false, true}) {
            for (const int n_q : {1, 20}) {
                Spec spec;
                spec.k_type = PA_Q8_0;
                spec.v_type = PA_F32;
                spec.n_cells = 333;
                spec.n_q = n_q;
                spec.k_page_cells = page_cells;
                spec.v_page_cells = page_cells == 5 ? 64 : page_cells; // K and V need not agree
                spec.head_major = head_major;
                spec.row_padding = head_major ? 12 : 0;
                spec.query_padding = 3;
                expect_exact(spec);
            }
        }
    }
}

TEST(masks_of_every_kind) {
    for (const MaskKind mask : {MaskKind::none, MaskKind::causal, MaskKind::window, MaskKind::sequences,
                                MaskKind::holes, MaskKind::bias, MaskKind::hidden}) {
        for (const int n_q : {1, 2, 17, 70}) {
            for (const int ratio : {1, 5}) {
                Spec spec;
                spec.n_head = 2 * ratio;
                spec.n_q = n_q;
                spec.n_cells = 301;
                spec.mask = mask;
                spec.window = 40;
                spec.k_page_cells = spec.v_page_cells = 32;
                expect_exact(spec);
            }
        }
    }
}

TEST(queries_that_see_nothing_give_zero) {
    Spec spec;
    spec.n_q = 9;
    spec.mask = MaskKind::hidden;
    const Problem problem(spec);
    for (const char *isa : usable_isas()) {
        const std::vector<float> out = attend(problem, 2, isa);
        if (out.empty()) continue;
        const size_t query = size_t(spec.n_head * spec.d_v);
        for (size_t i = 0; i < out.size(); i++) {
            if (i / query % 2 == 0) EXPECT(out[i] == 0.0f, "%s: value %zu is %g", isa, i, double(out[i]));
        }
    }
}

TEST(queries_before_every_cell_give_zero) { // more queries than cells: the first have no position of their own yet
    Spec spec;
    spec.n_q = 50;
    spec.n_cells = 20;
    spec.mask = MaskKind::causal;
    expect_exact(spec);
}

TEST(a_window_of_one_sees_itself) {
    Spec spec;
    spec.n_q = 30;
    spec.n_cells = 200;
    spec.mask = MaskKind::window;
    spec.window = 1;
    expect_exact(spec);
}

TEST(sinks_small_and_larger_than_every_logit) {
    for (const float level : {-50.0f, 0.0f, 8.0f, 60.0f}) {
        for (const int n_q : {1, 24}) {
            for (const MaskKind mask : {MaskKind::window, MaskKind::hidden, MaskKind::none}) {
                Spec spec;
                spec.n_head = 8;
                spec.n_q = n_q;
                spec.mask = mask;
                spec.sinks = true;
                spec.sink_level = level;
                expect_exact(spec);
            }
        }
    }
}

TEST(softcap) {
    for (const float cap : {1.0f, 20.0f, 50.0f}) {
        for (const double deviation : {1.0, 20.0}) {
            for (const int n_q : {1, 24}) {
                Spec spec;
                spec.d_k = spec.d_v = 256;
                spec.n_q = n_q;
                spec.n_cells = 400;
                spec.mask = MaskKind::causal;
                spec.softcap = cap;
                spec.query_deviation = deviation;
                expect_exact(spec);
            }
        }
    }
}

// Logits of a few hundred are rounded to f32, 2^-24 of them; that is the bound's second part.
TEST(peaked_logits) {
    for (const double deviation : {8.0, 40.0, 300.0}) {
        for (const int n_q : {1, 3, 77}) {
            for (const pa_dtype type : {PA_F16, PA_Q8_0, PA_Q4_0}) {
                Spec spec;
                spec.n_head = 5;
                spec.n_kv_head = 1;
                spec.d_k = spec.d_v = 128;
                spec.k_type = spec.v_type = type;
                spec.n_q = n_q;
                spec.n_cells = 400;
                spec.mask = MaskKind::causal;
                spec.query_deviation = deviation;
                expect_exact(spec, 1e-5 + 4e-7 * deviation);
            }
        }
    }
}

TEST(one_huge_logit_at_either_end) {
    for (const int at : {0, 499}) {
        for (const int n_q : {1, 20}) {
            Spec spec;
            spec.k_type = spec.v_type = PA_F32;
            spec.n_cells = 500;
            spec.n_q = n_q;
            Problem problem(spec);
            for (int head = 0; head < spec.n_kv_head; head++) { // K of that cell: 40 times the first query of the group
                auto *row = reinterpret_cast<float *>(static_cast<uint8_t *>(const_cast<void *>(problem.args.k.pages[0])) +
                                                      at * problem.args.k.cell_stride + head * problem.args.k.head_stride);
                const float *q = problem.args.q + head * (spec.n_head / spec.n_kv_head) * spec.d_k;
                for (int i = 0; i < spec.d_k; i++) row[i] = 40.0f * q[i];
            }
            const std::vector<double> expected = problem.reference();
            for (const char *isa : usable_isas()) {
                const std::vector<float> out = attend(problem, 2, isa);
                if (out.empty()) continue;
                EXPECT(relative_error(out, expected) <= 1e-5, "%s: cell %d, %d queries: %g", isa, at, n_q,
                       relative_error(out, expected));
            }
        }
    }
}

TEST(decode_over_64K_cells) {
    for (const pa_dtype type : {PA_F16, PA_Q8_0, PA_Q4_0}) {
        Spec spec;
        spec.n_head = 5;
        spec.n_kv_head = 1;
        spec.d_k = spec.d_v = 128;
        spec.k_type = spec.v_type = type;
        spec.n_cells = 65536;
        spec.k_page_cells = spec.v_page_cells = 512;
        expect_exact(spec);
    }
}
