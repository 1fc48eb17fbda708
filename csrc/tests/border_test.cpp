// Bad input: every kind of it is answered with a status and a sentence, and nothing is written.
#include "tests/problem.h"
#include "tests/testing.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace {

void expect_refused(pa_status status, pa_status wanted, const char *says, const char *what) {
    EXPECT(status == wanted, "%s: status %d, not %d", what, int(status), int(wanted));
    EXPECT(std::strstr(pa_last_error(), says), "%s: \"%s\" does not say \"%s\"", what, pa_last_error(), says);
}

void expect_no_plan(const std::function<void(pa_shape &)> &spoil, pa_status wanted, const char *says) {
    const Problem problem{Spec()};
    pa_shape shape = problem.shape;
    spoil(shape);
    auto *plan = reinterpret_cast<pa_cpu_plan *>(&shape);
    expect_refused(pa_cpu_plan_create(&shape, 2, "auto", &plan), wanted, says, "plan");
    EXPECT(!plan, "%s: a plan was given all the same", says);
    double out = 0.0;
    if (wanted == PA_BAD_ARGUMENT) expect_refused(pa_reference(&shape, &problem.args, &out), wanted, says, "reference");
}

void expect_no_run(const std::function<void(pa_args &)> &spoil, const char *says, Spec spec = Spec()) {
    spec.n_q = 2;
    const Problem problem(spec);
    const Plan plan(problem.shape, 2, "auto");
    std::vector<float> out(problem.n_out(), 7.0f);
    std::vector<double> exact(problem.n_out(), 7.0);
    pa_args args = problem.args;
    args.out = out.data();
    spoil(args);
    expect_refused(pa_cpu_run(plan.get(), &args), PA_BAD_ARGUMENT, says, "run");
    for (const float value : out) EXPECT(value == 7.0f, "%s: the output was written", says);
    if (args.out != out.data() || args.state_m || args.state_l) return; // the reference has no such output
    expect_refused(pa_reference(&problem.shape, &args, exact.data()), PA_BAD_ARGUMENT, says, "reference");
    for (const double value : exact) EXPECT(value == 7.0, "%s: the reference was written", says);
}

void set(pa_dtype &type, int value) { std::memcpy(&type, &value, sizeof type); } // as C can

Spec paged() {
    Spec spec;
    spec.k_page_cells = spec.v_page_cells = 32; // of 100 cells: 4 pages
    return spec;
}

} // namespace

TEST(shapes_that_cannot_be_meant) {
    expect_no_plan([](pa_shape &s) { s.n_kv_head = 3; }, PA_BAD_ARGUMENT, "4 query heads over 3 K/V heads");
    expect_no_plan([](pa_shape &s) { s.n_kv_head = 0; }, PA_BAD_ARGUMENT, "query heads");
    expect_no_plan([](pa_shape &s) { s.n_head = -4; }, PA_BAD_ARGUMENT, "query heads");
    expect_no_plan([](pa_shape &s) { s.n_head = 2, s.n_kv_head = 4; }, PA_BAD_ARGUMENT, "query heads");
    expect_no_plan([](pa_shape &s) { s.d_k = 0; }, PA_BAD_ARGUMENT, "d_k is 0");
    expect_no_plan([](pa_shape &s) { s.d_v = -64; }, PA_BAD_ARGUMENT, "d_v is -64");
    expect_no_plan([](pa_shape &s) { s.max_q = 0; }, PA_BAD_ARGUMENT, "max_q is 0");
    expect_no_plan([](pa_shape &s) { s.max_cells = -1; }, PA_BAD_ARGUMENT, "max_cells -1");
    expect_no_plan([](pa_shape &s) { s.scale = NAN; }, PA_BAD_ARGUMENT, "scale");
    expect_no_plan([](pa_shape &s) { s.scale = INFINITY; }, PA_BAD_ARGUMENT, "scale");
    expect_no_plan([](pa_shape &s) { s.softcap = -1.0f; }, PA_BAD_ARGUMENT, "softcap");
    expect_no_plan([](pa_shape &s) { s.softcap = NAN; }, PA_BAD_ARGUMENT, "softcap");
}

TEST(shapes_that_no_kernel_serves) {
    expect_no_plan([](pa_shape &s) { set(s.k_type, 17); }, PA_UNSUPPORTED, "17 is no data type");
    expect_no_plan([](pa_shape &s) { set(s.v_type, -1); }, PA_UNSUPPORTED, "-1 is no data type");
    expect_no_plan([](pa_shape &s) { s.d_k = 72; }, PA_UNSUPPORTED, "multiple of 16");
    expect_no_plan([](pa_shape &s) { s.v_type = PA_Q4_0, s.d_v = 80; }, PA_UNSUPPORTED, "multiple of 32");
    expect_no_plan([](pa_shape &s) { s.d_v = 2048; }, PA_UNSUPPORTED, "at most 1024");
    expect_no_plan([](pa_shape &s) { s.max_q = INT32_MAX; }, PA_UNSUPPORTED, "too many for one run");
    expect_no_plan([](pa_shape &s) { s.max_q = 1 << 20, s.n_head = 1 << 12; }, PA_UNSUPPORTED, "too many for one run");
    expect_no_plan([](pa_shape &s) { s.max_cells = INT32_MAX; }, PA_UNSUPPORTED, "too many for one run");
    expect_no_plan([](pa_shape &s) { s.max_q = 1 << 20, s.max_cells = 1 << 20; }, PA_UNSUPPORTED, "too many for one run");
}

TEST(a_plan_that_fits_into_no_memory) { // 2^48 bytes
    expect_no_plan([](pa_shape &s) {
        s.n_head = 1 << 30, s.n_kv_head = s.max_q = s.max_cells = 1;
        s.d_k = s.d_v = 1024;
    }, PA_OUT_OF_MEMORY, "no memory for a plan of");
}

TEST(plans_that_cannot_be_made) {
    const Problem problem{Spec()};
    pa_cpu_plan *plan = nullptr;
    expect_refused(pa_cpu_plan_create(nullptr, 1, "auto", &plan), PA_BAD_ARGUMENT, "shape is null", "no shape");
    expect_refused(pa_cpu_plan_create(&problem.shape, 1, "auto", nullptr), PA_BAD_ARGUMENT, "null", "no address");
    for (const int threads : {0, -1, 1025, INT32_MAX}) {
        expect_refused(pa_cpu_plan_create(&problem.shape, threads, "auto", &plan), PA_BAD_ARGUMENT, "threads", "threads");
    }
    expect_refused(pa_cpu_plan_create(&problem.shape, 1, "mmx", &plan), PA_BAD_ARGUMENT, "mmx is no instruction", "mmx");
    expect_refused(pa_cpu_plan_create(&problem.shape, 1, "", &plan), PA_BAD_ARGUMENT, "instruction set", "empty name");
#if defined(__x86_64__)
    expect_refused(pa_cpu_plan_create(&problem.shape, 1, "neon", &plan), PA_UNSUPPORTED, "no neon", "neon");
#else
    expect_refused(pa_cpu_plan_create(&problem.shape, 1, "avx2", &plan), PA_UNSUPPORTED, "no avx2", "avx2");
#endif
    EXPECT(!plan, "a plan was given all the same");
}

TEST(a_null_plan) {
    const Problem problem{Spec()};
    expect_refused(pa_cpu_run(nullptr, &problem.args), PA_BAD_ARGUMENT, "plan is null", "run");
    pa_cpu_plan_destroy(nullptr);
    EXPECT(pa_cpu_plan_bytes(nullptr) == 0, "it has memory");
    EXPECT(!*pa_cpu_plan_isa(nullptr), "it has an instruction set");
}

TEST(counts_beyond_the_plan) {
    expect_no_run([](pa_args &a) { a.n_q = 0; }, "n_q is 0");
    expect_no_run([](pa_args &a) { a.n_q = -1; }, "n_q is -1");
    expect_no_run([](pa_args &a) { a.n_q = 3; }, "n_q is 3, the plan is for 1 to 2");
    expect_no_run([](pa_args &a) { a.n_cells = -1; }, "n_cells is -1");
    expect_no_run([](pa_args &a) { a.n_cells = 101; }, "n_cells is 101");
}

TEST(addresses_that_are_null) {
    const Problem problem{Spec()};
    const Plan plan(problem.shape, 1, "auto");
    expect_refused(pa_cpu_run(plan.get(), nullptr), PA_BAD_ARGUMENT, "arguments are null", "run");
    expect_no_run([](pa_args &a) { a.q = nullptr; }, "q is null");
    expect_no_run([](pa_args &a) { a.k.pages = nullptr; }, "K: there is no page table");
    expect_no_run([](pa_args &a) { a.v.pages = nullptr; }, "V: there is no page table");
    expect_no_run([](pa_args &a) { a.out = nullptr; }, "out is null");
    static const void *pages[4];
    expect_no_run([](pa_args &a) {
        for (int i = 0; i < 4; i++) pages[i] = i == 2 ? nullptr : a.v.pages[i];
        a.v.pages = pages;
    }, "V: page 2 of 4 is null", paged());
}

TEST(pages_out_of_range) {
    expect_no_run([](pa_args &a) { a.k.n_pages = 3; }, "K: cell 99 is out of range: 3 pages of 32 cells", paged());
    expect_no_run([](pa_args &a) { a.v.n_pages = -1; }, "V: cell 99 is out of range", paged());
    expect_no_run([](pa_args &a) { a.v.page_cells = 0; }, "V: page_cells is 0", paged());
    expect_no_run([](pa_args &a) { a.k.page_cells = -32; }, "K: page_cells is -32", paged());
    expect_no_run([](pa_args &a) { a.k.page_cells = 24; }, "K: cell 99 is out of range", paged());
}

TEST(strides_and_alignment) {
    expect_no_run([](pa_args &a) { a.k.cell_stride = 126; }, "K: cell_stride is 126 bytes, less than the 128 of a row");
    expect_no_run([](pa_args &a) { a.k.cell_stride = -256; }, "K: cell_stride");
    expect_no_run([](pa_args &a) { a.v.head_stride = 0; }, "V: head_stride is 0");
    expect_no_run([](pa_args &a) { a.v.head_stride = 129; }, "not a multiple of 2");
    expect_no_run([](pa_args &a) { a.v.cell_stride = int64_t{1} << 62; }, "do not fit into memory");
    expect_no_run([](pa_args &a) { a.q_stride = 6; }, "q: q_stride");
    expect_no_run([](pa_args &a) { a.q_head_stride = 258; }, "q: q_head_stride");
    static const void *odd;
    expect_no_run([](pa_args &a) {
        odd = static_cast<const char *>(a.k.pages[0]) + 1;
        a.k.pages = &odd;
    }, "K: page 0 does not lie at a multiple of 2");
    expect_no_run([](pa_args &a) { a.q = reinterpret_cast<const float *>(reinterpret_cast<const char *>(a.q) + 2); },
                  "q does not lie at a multiple of 4");
}

TEST(masks_that_disagree) {
    static const int32_t positions[100] = {};
    static const uint16_t dense[200] = {};
    expect_no_run([](pa_args &a) { a.mask.window = -1; }, "window is -1");
    expect_no_run([](pa_args &a) { a.mask.window = 5; }, "cell_pos is missing");
    expect_no_run([](pa_args &a) { a.mask.cell_pos = positions; }, "query_pos is missing");
    expect_no_run([](pa_args &a) { a.mask.query_pos = positions; }, "cell_pos is missing");
    expect_no_run([](pa_args &a) { a.mask.cell_seq = positions; }, "cell_pos is missing");
    expect_no_run([](pa_args &a) { a.mask.cell_pos = a.mask.query_pos = a.mask.cell_seq = positions; }, "query_seq is missing");
    expect_no_run([](pa_args &a) { a.mask.cell_pos = a.mask.query_pos = a.mask.query_seq = positions; }, "cell_seq is missing");
    expect_no_run([](pa_args &a) { a.mask.dense = dense, a.mask.dense_stride = 200, a.mask.query_pos = positions; }, "not both");
    expect_no_run([](pa_args &a) {
        a.mask.dense = dense, a.mask.dense_stride = 200;
        a.mask.cell_pos = reinterpret_cast<const int32_t *>(reinterpret_cast<const char *>(positions) + 2);
    }, "is not aligned");
    expect_no_run([](pa_args &a) { a.mask.dense = dense, a.mask.dense_stride = 198; }, "mask: dense_stride is 198");
    expect_no_run([](pa_args &a) { a.mask.dense = dense, a.mask.dense_stride = 201; }, "not a multiple of 2");
}

TEST(outputs_that_disagree) {
    static float somewhere[4 * 2 * 64];
    expect_no_run([](pa_args &a) { a.state_m = a.state_l = a.state_o = somewhere; }, "both an output and a state");
    expect_no_run([](pa_args &a) { a.out = nullptr, a.state_m = somewhere; }, "some are null");
    expect_no_run([](pa_args &a) {
        a.out = nullptr;
        a.state_m = a.state_l = a.state_o = somewhere;
        a.sinks = somewhere;
    }, "sinks join when states are finished");
}

TEST(states_that_are_null) {
    float x[4] = {};
    expect_refused(pa_state_merge(1, 4, x, x, x, x, nullptr, x), PA_BAD_ARGUMENT, "null", "merge");
    expect_refused(pa_state_merge(-1, 4, x, x, x, x, x, x), PA_BAD_ARGUMENT, "-1 states", "merge");
    expect_refused(pa_state_merge(1, 0, x, x, x, x, x, x), PA_BAD_ARGUMENT, "0 values", "merge");
    expect_refused(pa_state_finish(1, 4, x, x, nullptr, nullptr, x), PA_BAD_ARGUMENT, "null", "finish");
    expect_refused(pa_state_finish(1, -4, x, x, x, nullptr, x), PA_BAD_ARGUMENT, "-4 values", "finish");
    EXPECT(pa_state_merge(0, 4, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) == PA_OK, "no states at all");
}

TEST(no_cells_need_no_pages) {
    Spec spec;
    const Problem problem(spec);
    const Plan plan(problem.shape, 2, "auto");
    std::vector<float> out(problem.n_out(), NAN);
    pa_args args = problem.args;
    args.n_cells = 0;
    args.k = args.v = pa_rows{};
    args.out = out.data();
    EXPECT(pa_cpu_run(plan.get(), &args) == PA_OK, "%s", pa_last_error());
    for (const float value : out) EXPECT(value == 0.0f, "%g", double(value));
}

TEST(errors_belong_to_their_thread_and_are_never_null) {
    EXPECT(pa_last_error() != nullptr, "null");
    EXPECT(pa_abi_version() == PA_ABI_VERSION, "%d", pa_abi_version());
}

#if defined(__unix__) || defined(__APPLE__)
TEST(a_forked_process_is_told_that_the_threads_are_not_there) {
    const Problem problem{Spec()};
    const Plan plan(problem.shape, 2, "auto");
    const pid_t child = fork();
    if (child == 0) { // nothing but the call: the other threads are gone
        std::vector<float> out(problem.n_out());
        pa_args args = problem.args;
        args.out = out.data();
        const pa_status status = pa_cpu_run(plan.get(), &args);
        _exit(status == PA_BAD_ARGUMENT && std::strstr(pa_last_error(), "forked") ? 0 : 1);
    }
    int status = -1;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child, "no child");
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
}
#endif
