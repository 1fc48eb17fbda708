// Attention problems for the tests: random inputs of a described kind, with everything that must not be read poisoned.
#pragma once
#include "paged_attn/paged_attn.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

enum class MaskKind { none, causal, window, sequences, holes, bias, hidden };

struct Spec {
    int n_head = 4, n_kv_head = 2, d_k = 64, d_v = 64;
    pa_dtype k_type = PA_F16, v_type = PA_F16;
    int n_q = 1, n_cells = 100;
    int k_page_cells = 0, v_page_cells = 0; // 0: one page
    bool head_major = false;                // [head][cell] in a page in place of [cell][head]
    int row_padding = 0, query_padding = 0; // bytes between rows (a multiple of 4), values between a query's heads
    MaskKind mask = MaskKind::none;
    int window = 7;
    double query_deviation = 1.0, value_mean = 0.3;
    float softcap = 0.0f;
    bool sinks = false;
    float sink_level = 0.0f;
    uint64_t seed = 1;

    std::string text() const; // to find it again
};

// Owns what its arguments point to. Pages lie in shuffled order, apart from each other.
class Problem {
  public:
    explicit Problem(const Spec &spec);
    Problem(const Problem &) = delete;
    Problem &operator=(const Problem &) = delete;

    const Spec spec;
    pa_shape shape{};
    pa_args args{}; // without an output

    std::vector<double> reference() const; // [n_q][n_head][d_v]
    size_t n_out() const { return size_t(spec.n_q) * size_t(spec.n_head) * size_t(spec.d_v); }

  private:
    struct Store {
        std::vector<uint8_t> bytes;
        std::vector<const void *> pages;
    };
    pa_rows fill(Store &store, pa_dtype type, int d, int page_cells, double mean);
    void make_mask();

    std::mt19937_64 random_;
    Store k_, v_;
    std::vector<float> q_, sinks_;
    std::vector<uint16_t> dense_;
    std::vector<int32_t> cell_pos_, cell_seq_, query_pos_, query_seq_;
};

// A plan that ends with its scope. Null, when this machine lacks the instruction set.
class Plan {
  public:
    Plan(const pa_shape &shape, int threads, const char *isa);
    ~Plan() { pa_cpu_plan_destroy(plan_); }
    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;
    pa_cpu_plan *get() const { return plan_; }

  private:
    pa_cpu_plan *plan_ = nullptr;
};

// The instruction sets that this machine can run.
std::vector<const char *> usable_isas();

// The output of one run; every value is NaN before it. Empty, with a failure reported, when the run is refused.
std::vector<float> attend(const Problem &problem, int threads, const char *isa);

// ||a - b|| / ||b||, infinite if a holds a NaN; 0 for two zeros.
double relative_error(const std::vector<float> &a, const std::vector<double> &b);

// The largest error of a row (one query, one head) over the norm that its values have on the whole.
double worst_row_error(const Problem &problem, const std::vector<float> &a, const std::vector<double> &b);

// Fails the test unless every usable instruction set agrees with the reference within `bound`.
void expect_exact(const Spec &spec, double bound = 1e-5, int threads = 2);

uint16_t to_f16(float value);
