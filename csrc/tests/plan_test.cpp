// What a plan promises beside the result: the same bits for any number of threads, states that merge, a processor left
// as it was found, no time lost to tiny numbers.
#include "tests/problem.h"
#include "tests/testing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
static unsigned long float_mode() { return _mm_getcsr(); }
static void set_float_mode(unsigned long mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
constexpr unsigned long kOtherMode = 0x3F80; // the default, rounding downwards
#elif defined(__aarch64__)
static unsigned long float_mode() {
    unsigned long mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_float_mode(unsigned long mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
constexpr unsigned long kOtherMode = 2ul << 22; // the default, rounding downwards
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

namespace {

bool same_bits(const std::vector<float> &a, const std::vector<float> &b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<Spec> typical() {
    std::vector<Spec> specs;
    for (const int n_q : {1, 2, 33, 200}) {
        for (const pa_dtype type : {PA_F16, PA_Q8_0}) {
            Spec spec;
            spec.n_head = 10;
            spec.k_type = spec.v_type = type;
            spec.n_q = n_q;
            spec.n_cells = 3000;
            spec.mask = MaskKind::causal;
            spec.k_page_cells = spec.v_page_cells = 128;
            specs.push_back(spec);
        }
    }
    return specs;
}

} // namespace

TEST(the_bits_do_not_depend_on_the_number_of_threads) {
    for (const Spec &spec : typical()) {
        const Problem problem(spec);
        for (const char *isa : usable_isas()) {
            const std::vector<float> alone = attend(problem, 1, isa);
            for (const int threads : {2, 3, 5}) {
                EXPECT(same_bits(attend(problem, threads, isa), alone), "%s, %d threads: %s", isa, threads,
                       spec.text().c_str());
            }
        }
    }
}

TEST(a_plan_gives_the_same_bits_every_time) {
    for (const Spec &spec : typical()) {
        const Problem problem(spec);
        const Plan plan(problem.shape, 2, "auto");
        std::vector<float> first(problem.n_out()), again(problem.n_out());
        pa_args args = problem.args;
        args.out = first.data();
        EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
        args.out = again.data();
        for (int round = 0; round < 20; round++) {
            std::fill(again.begin(), again.end(), NAN);
            EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
            EXPECT(same_bits(first, again), "round %d: %s", round, spec.text().c_str());
        }
    }
}

TEST(a_plan_serves_smaller_runs_than_it_was_made_for) {
    Spec spec;
    spec.n_q = 64;
    spec.n_cells = 500;
    const Problem large(spec);
    for (const char *isa : usable_isas()) {
        const Plan plan(large.shape, 2, isa);
        for (const int n_q : {1, 2, 33}) {
            for (const int n_cells : {0, 1, 77, 500}) {
                pa_args args = large.args;
                args.n_q = n_q;
                args.n_cells = n_cells;
                std::vector<float> out(size_t(n_q * spec.n_head * spec.d_v), NAN);
                std::vector<double> expected(out.size());
                args.out = out.data();
                EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
                EXPECT(pa_reference(&large.shape, &args, expected.data()) == PA_OK, "%s", pa_last_error());
                EXPECT(relative_error(out, expected) <= 1e-5, "%s: n_q %d, n_cells %d", isa, n_q, n_cells);
            }
        }
    }
}

TEST(states_over_the_parts_merge_into_the_whole) {
    for (const int n_q : {1, 40}) {
        Spec spec;
        spec.n_head = 8;
        spec.n_q = n_q;
        spec.n_cells = 320;
        spec.k_page_cells = spec.v_page_cells = 32;
        spec.sinks = true;
        const Problem problem(spec);
        const std::vector<double> expected = problem.reference();
        const auto n = size_t(n_q * spec.n_head);
        for (const char *isa : usable_isas()) {
            const Plan plan(problem.shape, 2, isa);
            std::vector<float> m[2], l[2], o[2];
            for (int part = 0; part < 2; part++) { // pages 0 to 2, then the rest
                pa_args args = problem.args;
                args.sinks = nullptr;
                args.n_cells = part == 0 ? 96 : 224;
                for (pa_rows *rows : {&args.k, &args.v}) rows->pages += part * 3, rows->n_pages -= part * 3;
                m[part].assign(n, NAN), l[part].assign(n, NAN), o[part].assign(n * size_t(spec.d_v), NAN);
                args.state_m = m[part].data(), args.state_l = l[part].data(), args.state_o = o[part].data();
                EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
            }
            EXPECT(pa_state_merge(int64_t(n), spec.d_v, m[0].data(), l[0].data(), o[0].data(), m[1].data(), l[1].data(),
                                  o[1].data()) == PA_OK, "%s", pa_last_error());
            std::vector<float> sinks(n), out(problem.n_out());
            for (size_t i = 0; i < n; i++) sinks[i] = problem.args.sinks[i % size_t(spec.n_head)];
            EXPECT(pa_state_finish(int64_t(n), spec.d_v, m[0].data(), l[0].data(), o[0].data(), sinks.data(),
                                   out.data()) == PA_OK, "%s", pa_last_error());
            EXPECT(relative_error(out, expected) <= 1e-5, "%s, n_q %d: %g", isa, n_q, relative_error(out, expected));
        }
    }
}

TEST(the_state_over_nothing_is_empty) {
    for (const bool hidden : {false, true}) {
        Spec spec;
        spec.n_cells = hidden ? 50 : 0;
        spec.n_q = 1;
        spec.mask = hidden ? MaskKind::hidden : MaskKind::none;
        const Problem problem(spec);
        for (const char *isa : usable_isas()) {
            const Plan plan(problem.shape, 2, isa);
            std::vector<float> m(4, NAN), l(4, NAN), o(size_t(4 * spec.d_v), NAN);
            pa_args args = problem.args;
            args.state_m = m.data(), args.state_l = l.data(), args.state_o = o.data();
            EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
            for (const float value : m) EXPECT(value == -INFINITY, "%s: m %g", isa, double(value));
            for (const float value : l) EXPECT(value == 0.0f, "%s: l %g", isa, double(value));
            for (const float value : o) EXPECT(value == 0.0f, "%s: o %g", isa, double(value));
        }
    }
}

TEST(the_float_mode_is_left_as_it_was) {
    const unsigned long before = float_mode();
    for (const int n_q : {1, 40}) {
        Spec spec;
        spec.n_q = n_q;
        const Problem problem(spec);
        for (const char *isa : usable_isas()) {
            const Plan plan(problem.shape, 2, isa);
            std::vector<float> out(problem.n_out());
            pa_args args = problem.args;
            args.out = out.data();
            set_float_mode(kOtherMode);
            const pa_status status = pa_cpu_run(plan.get(), &args);
            const unsigned long after = float_mode();
            set_float_mode(before);
            EXPECT(status == PA_OK, "%s", pa_last_error());
            EXPECT((after & ~0x3Ful) == kOtherMode, "%s: %lx", isa, after); // without x86's sticky exception flags
        }
    }
}

TEST(plans_of_several_threads_run_beside_each_other) {
    Spec spec;
    spec.n_q = 4;
    spec.n_cells = 700;
    const Problem problem(spec);
    const std::vector<float> expected = attend(problem, 1, "auto");
    std::vector<std::thread> threads;
    std::vector<int> wrong(3, 0);
    for (int &count : wrong) {
        threads.emplace_back([&problem, &expected, &count] {
            for (int round = 0; round < 30; round++) count += !same_bits(attend(problem, 2, "auto"), expected);
        });
    }
    for (std::thread &thread : threads) thread.join();
    for (const int count : wrong) EXPECT(count == 0, "%d of 30 differ", count);
}

TEST(runs_after_a_pause_wake_the_threads) {
    Spec spec;
    const Problem problem(spec);
    const Plan plan(problem.shape, 3, "auto");
    const std::vector<double> expected = problem.reference();
    for (int round = 0; round < 50; round++) {
        std::vector<float> out(problem.n_out(), NAN);
        pa_args args = problem.args;
        args.out = out.data();
        EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
        EXPECT(relative_error(out, expected) <= 1e-5, "round %d", round);
        std::this_thread::sleep_for(std::chrono::microseconds(round * 20)); // around the end of the spinning
    }
}

// Weights that underflow become denormal numbers, and arithmetic with those costs 15 to 100 times as much.
TEST(peaked_logits_cost_no_more_than_diffuse_ones) {
    if (kSanitized) return;
    for (const int n_q : {1, 128}) {
        for (const char *isa : usable_isas()) {
            double best[2] = {1e9, 1e9};
            for (int round = 0; round < 15; round++) {
                for (int peaked = 0; peaked < 2; peaked++) {
                    Spec spec;
                    spec.n_head = 8;
                    spec.d_k = spec.d_v = 128;
                    spec.n_q = n_q;
                    spec.n_cells = n_q == 1 ? 8192 : 512;
                    spec.query_deviation = peaked ? 300.0 : 1.0;
                    static const Problem *kept[2][2];
                    const Problem *&problem = kept[n_q == 1][peaked];
                    if (!problem) problem = new Problem(spec);
                    const Plan plan(problem->shape, 1, isa);
                    std::vector<float> out(problem->n_out());
                    pa_args args = problem->args;
                    args.out = out.data();
                    const auto start = std::chrono::steady_clock::now();
                    EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
                    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
                    best[peaked] = std::min(best[peaked], took.count());
                }
            }
            std::printf("    %s, n_q %d: peaked / diffuse %.2f\n", isa, n_q, best[1] / best[0]);
            EXPECT(best[1] <= 1.5 * best[0], "%s, n_q %d: %.2f times", isa, n_q, best[1] / best[0]);
        }
    }
}
