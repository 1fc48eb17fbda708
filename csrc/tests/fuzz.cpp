// Random problems against the reference: fuzz [count] [first seed]. Shapes, strides, page tables, lengths, masks and
// types all vary; one in eight is spoilt first and has to be refused, or answered, without a crash. A failure prints
// its seed; `fuzz 1 SEED` runs it alone.
#include "tests/problem.h"
#include "tests/testing.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdlib>

namespace {

using Random = std::mt19937_64;

int among(Random &random, std::initializer_list<int> values) {
    return values.begin()[random() % values.size()];
}

int up_to(Random &random, int largest) { return int(random() % uint64_t(largest + 1)); }

Spec random_spec(uint64_t seed) {
    Random random(seed);
    Spec spec;
    spec.seed = seed;
    spec.k_type = pa_dtype(up_to(random, 4));
    spec.v_type = pa_dtype(up_to(random, 4));
    spec.n_kv_head = 1 + up_to(random, 3);
    spec.n_head = spec.n_kv_head * among(random, {1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16});
    spec.d_k = 32 * (1 + up_to(random, 5));
    spec.d_v = up_to(random, 3) ? spec.d_k : 32 * (1 + up_to(random, 5));
    if (spec.k_type <= PA_BF16 && up_to(random, 3) == 0) spec.d_k -= 16;
    if (spec.v_type <= PA_BF16 && up_to(random, 3) == 0) spec.d_v -= 16;
    spec.n_q = up_to(random, 1) ? 1 + up_to(random, 4) : 1 + up_to(random, 60);
    spec.n_cells = up_to(random, 3) ? up_to(random, 150) : among(random, {0, 1, 2, 31, 32, 33, 600});
    spec.k_page_cells = up_to(random, 2) ? 1 + up_to(random, 70) : 0;
    spec.v_page_cells = up_to(random, 2) ? spec.k_page_cells : 1 + up_to(random, 70);
    spec.head_major = up_to(random, 1);
    spec.row_padding = 4 * up_to(random, 3);
    spec.query_padding = up_to(random, 5);
    spec.mask = MaskKind(up_to(random, int(MaskKind::hidden)));
    spec.window = 1 + up_to(random, 50);
    spec.query_deviation = std::pow(10.0, up_to(random, 3) / 2.0); // 1 to 32
    spec.softcap = up_to(random, 3) ? 0.0f : float(5 + up_to(random, 50));
    spec.sinks = up_to(random, 2) == 0;
    spec.sink_level = float(up_to(random, 40) - 20);
    return spec;
}

// Something a caller could get wrong. What comes back is its business; that something does is ours.
void spoil(Random &random, pa_args &args) {
    const int values[] = {0, -1, 1, 3, INT_MAX, INT_MIN, up_to(random, 1000)};
    const int value = values[random() % 7];
    switch (up_to(random, 11)) {
    case 0: args.n_q = value; break;
    case 1: args.n_cells = value; break;
    case 2: args.k.n_pages = std::min(value, args.k.n_pages); break; // never more than there are
    case 3: args.v.n_pages = std::min(value, args.v.n_pages); break;
    case 4: args.k.page_cells = std::min(value, 0); break;
    case 5: args.v.cell_stride = std::min(int64_t{value}, int64_t{1}); break;
    case 6: args.k.head_stride = std::min(int64_t{value}, int64_t{1}); break;
    case 7: args.q_stride = std::min(value, 3); break;
    case 8: args.q = nullptr; break;
    case 9: args.v.pages = nullptr; break;
    case 10: args.out = nullptr; break;
    default: args.mask.window = -1; break;
    }
}

bool expect_answer(const Problem &problem, Random &random, const char *isa) {
    const Plan plan(problem.shape, 1 + up_to(random, 3), isa);
    std::vector<float> out(problem.n_out(), NAN);
    pa_args args = problem.args;
    args.out = out.data();
    spoil(random, args);
    const pa_status status = pa_cpu_run(plan.get(), &args);
    return plan.get() && (status == PA_OK || (status == PA_BAD_ARGUMENT && *pa_last_error()));
}

bool expect_right(const Problem &problem, Random &random, const char *isa, double &worst) {
    const std::vector<double> expected = problem.reference();
    const std::vector<float> out = attend(problem, 1 + up_to(random, 3), isa);
    if (out.empty()) return false;
    const double error = relative_error(out, expected);
    worst = std::max(worst, error);
    if (error <= 3e-5) return true;
    std::printf("%s: error %.3g\n", isa, error);
    return false;
}

} // namespace

namespace testing { // this program has no TESTs; what helpers EXPECT is a failure like any other
static int failures = 0;
bool failed(const char *file, int line, const char *condition) {
    std::printf("%s:%d: not so: %s\n", file, line, condition);
    return ++failures > 0;
}
} // namespace testing

int main(int argc, char **argv) {
    const long count = argc > 1 ? std::atol(argv[1]) : 1000;
    const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const std::vector<const char *> isas = usable_isas();
    long wrong = 0;
    double worst = 0.0;
    for (uint64_t seed = first; seed < first + uint64_t(count); seed++) {
        Random random(seed * 0x9E3779B97F4A7C15ull + 1);
        const Problem problem(random_spec(seed));
        const char *isa = isas[random() % isas.size()];
        const bool spoilt = up_to(random, 7) == 0;
        if (spoilt ? expect_answer(problem, random, isa) : expect_right(problem, random, isa, worst)) continue;
        std::printf("seed %llu%s: %s\n", static_cast<unsigned long long>(seed), spoilt ? ", spoilt" : "",
                    problem.spec.text().c_str());
        wrong++;
    }
    std::printf("%ld problems from seed %llu, %ld wrong, largest error %.3g\n", count,
                static_cast<unsigned long long>(first), wrong, worst);
    return wrong > 0 || testing::failures > 0;
}
