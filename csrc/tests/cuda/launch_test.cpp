// The C API end to end without a GPU: a driver whose memory is the host's and whose launches run the emulation.
// Plans, launches, slots, states of the CPU and what each error says.
#include "emulated.h"
#include "check.h"
#include "cuda/host/device.h"
#include "simulated_gpu.h"

using namespace paged_attn::gpu;
using namespace paged_attn::gpu::test;

namespace {

using Narrowing = Instance<64, 64, kF16, kQ8, 4, 4, 80>; // with tensor cores
using Plain = Instance<64, 64, kF16, kQ8, 4, 4, 61>;     // without

// Gives the GPU the kernels of an instance: each launch runs them in the emulation on the addresses it is given.
template <class I> void load(SimulatedGpu &gpu, emulate::Findings &findings, const Case &c) {
    gpu.major = I::kArch / 10;
    gpu.minor = I::kArch % 10;
    const ImageInfo info = Kernels<I>::kInfo;
    const auto *bytes = reinterpret_cast<const char *>(&info);
    gpu.image_info.assign(bytes, bytes + sizeof info);
    const auto run = [&gpu, &findings, &c](auto kernel) {
        return [&gpu, &findings, &c, kernel](void **parameters) {
            int x = 0, y = 0, z = 0, threads = 0, shared = 0;
            const std::string &launch = gpu.launches.back();
            std::sscanf(launch.c_str() + launch.find(' '), " %dx%dx%d of %d, %d", &x, &y, &z, &threads, &shared);
            emulate::Launch l = {};
            l.arch = I::kArch;
            l.grid_x = x, l.grid_y = y, l.grid_z = z, l.n_threads = threads;
            l.shared_bytes = static_cast<size_t>(shared);
            l.buffers = {{nullptr, reinterpret_cast<const char *>(UINTPTR_MAX)}}; // alignment is checked, not borders
            emulate::launch(l, findings, [&] { kernel(parameters); });
        };
    };
    gpu.kernels["pa_decode"] = run([](void **p) { decode<I>(*static_cast<Problem *>(p[0])); });
    gpu.kernels["pa_wide"] = run([](void **p) { wide<I>(*static_cast<Problem *>(p[0])); });
    if (I::kHasMma) gpu.kernels["pa_narrow"] = run([](void **p) { narrow<I>(*static_cast<Problem *>(p[0])); });
    gpu.kernels["pa_combine"] = run([](void **p) { combine<I>(*static_cast<Combination *>(p[0])); });
    gpu.kernels["pa_bounds"] = run([](void **p) {
        find_bounds(*static_cast<Mask *>(p[0]), *static_cast<int *>(p[1]), 128, *static_cast<CellBounds **>(p[2]));
    });
}

pa_shape shape_of(const Case &c, RowType k, RowType v) {
    return {c.spec.n_head,
            c.spec.n_kv_head,
            c.d_k,
            c.d_v,
            c.spec.n_q,
            std::max(c.spec.n_cells, 1),
            static_cast<pa_dtype>(k),
            static_cast<pa_dtype>(v),
            c.scale,
            c.spec.softcap};
}

pa_args args_of(const Case &c, int first_page, int n_pages) {
    const int first = first_page * c.spec.page_cells;
    pa_args a = {};
    a.n_q = c.spec.n_q;
    a.n_cells = std::min(n_pages * c.spec.page_cells, c.spec.n_cells - first);
    a.q = c.q.data();
    a.q_head_stride = c.d_k * 4;
    a.q_stride = a.q_head_stride * c.spec.n_head;
    const auto rows = [&](const RowStore &r) {
        return pa_rows{reinterpret_cast<const void *const *>(r.table.data() + first_page), n_pages, c.spec.page_cells,
                       r.cell_stride, r.head_stride};
    };
    a.k = rows(c.k);
    a.v = rows(c.v);
    a.mask.cell_pos = c.cell_pos.data() + first;
    a.mask.query_pos = c.query_pos.data();
    return a;
}

// The state over some cells as the CPU gives it: o, m, l in one array.
std::vector<float> cpu_state(const Case &c, int first_cell) {
    const size_t n_rows = static_cast<size_t>(c.spec.n_q) * c.spec.n_head, d_v = static_cast<size_t>(c.d_v);
    std::vector<float> state(n_rows * (d_v + 2), 0.0f);
    for (size_t row = 0; row < n_rows; row++) {
        const int query = static_cast<int>(row) / c.spec.n_head, head = static_cast<int>(row) % c.spec.n_head;
        const double log2e = 1.4426950408889634, m = 3.0; // any reference is legal
        double l = 0.0;
        for (int cell = first_cell; cell < c.spec.n_cells; cell++) {
            if (!c.sees(query, cell)) continue;
            const double w = std::exp2(c.score(query, head, cell) * log2e - m);
            l += w;
            const size_t kv = static_cast<size_t>(head / (c.spec.n_head / c.spec.n_kv_head));
            for (size_t d = 0; d < d_v; d++)
                state[row * d_v + d] +=
                    static_cast<float>(w * c.v.values[(static_cast<size_t>(cell) * c.spec.n_kv_head + kv) * d_v + d]);
        }
        state[n_rows * d_v + row] = static_cast<float>(m);
        state[n_rows * (d_v + 1) + row] = static_cast<float>(l);
    }
    return state;
}

double difference(const std::vector<Float4> &out, const std::vector<double> &wanted) {
    const auto *got = reinterpret_cast<const float *>(out.data());
    double sum = 0.0, size = 0.0;
    for (size_t i = 0; i < wanted.size(); i++) {
        sum += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    return std::sqrt(sum / size);
}

// Which kernel a run takes is the caller's to say where there are two.
template <class I> void chosen_kernel(int most, const std::string &kernel) {
    const Case c = make_case({1, 8, 2, 100, 32, MaskKind::causal}, 64, 64, I::kK, I::kV, I::kAlign, 5);
    SimulatedGpu gpu;
    emulate::Findings findings;
    load<I>(gpu, findings, c);
    pa_cuda_device *device = nullptr;
    pa_cuda_plan *plan = nullptr;
    const pa_shape shape = shape_of(c, I::kK, I::kV);
    CHECK(open_device(gpu.driver(), 0, &device) == PA_OK);
    CHECK(pa_cuda_plan_create(device, &shape, 2, "image", 6, &plan) == PA_OK);
    CHECK_SAYS(pa_cuda_decode_rows(plan, -2), PA_BAD_ARGUMENT, "-2 rows");
    CHECK(pa_cuda_decode_rows(plan, most) == PA_OK);
    const pa_args args = args_of(c, 0, 4);
    CuStream stream = gpu.stream("compute");
    std::vector<Float4> out(8 * 64 / 4);
    CHECK(pa_cuda_attend(plan, &args, 0, 2, 0, stream) == PA_OK);
    CHECK(pa_cuda_combine(plan, 1, 2, nullptr, reinterpret_cast<float *>(out.data()), stream) == PA_OK);
    CHECK(gpu.launches[1].find(kernel) == 0 && difference(out, c.answer()) < 1e-5);
    CHECK(findings.texts.empty());
    pa_cuda_plan_destroy(plan);
    pa_cuda_close(device);
}

// Hot pages in two splits, two cold runs, and the rest as the CPU's partial; all merged with sinks.
template <class I> void hybrid(int n_q, const std::string &kernel, bool join) {
    const CaseSpec spec = {n_q, 8, 2, 250, 32, MaskKind::causal, 0, true};
    const Case c = make_case(spec, 64, 64, I::kK, I::kV, I::kAlign, 5);
    SimulatedGpu gpu;
    emulate::Findings findings;
    load<I>(gpu, findings, c);
    pa_cuda_device *device = nullptr;
    pa_cuda_plan *plan = nullptr;
    const pa_shape shape = shape_of(c, I::kK, I::kV);
    CHECK(open_device(gpu.driver(), 0, &device) == PA_OK && pa_cuda_arch(device) == I::kArch);
    CHECK(pa_cuda_plan_create(device, &shape, 5, "image", 6, &plan) == PA_OK);
    CHECK(pa_cuda_plan_bytes(plan) >= sizeof(float) * 5 * static_cast<size_t>(n_q) * 8 * 66);
    CuStream stream = gpu.stream("compute");
    const pa_args hot = args_of(c, 0, 3), cold_a = args_of(c, 3, 2), cold_b = args_of(c, 5, 1);
    CHECK(pa_cuda_attend(plan, &hot, 0, 2, 0, stream) == PA_OK);
    CHECK(gpu.launches.size() == 2 && gpu.launches[0].find("pa_bounds") == 0 && gpu.launches[1].find(kernel) == 0);
    CHECK(pa_cuda_attend(plan, &cold_a, 2, 1, 0, stream) == PA_OK);
    CHECK(pa_cuda_attend(plan, &cold_b, join ? 2 : 3, 1, join, stream) == PA_OK);
    const std::vector<float> state = cpu_state(c, 6 * 32);
    CHECK(pa_cuda_put_state(plan, join ? 3 : 4, n_q, state.data(), stream) == PA_OK);
    std::vector<Float4> out(static_cast<size_t>(n_q) * 8 * 64 / 4);
    CHECK(pa_cuda_combine(plan, n_q, join ? 4 : 5, c.sinks.data(), reinterpret_cast<float *>(out.data()), stream) ==
          PA_OK);
    const double error = difference(out, c.answer());
    std::printf("hybrid, %d queries, %s: %.1e\n", n_q, gpu.launches[1].c_str(), error);
    CHECK(error < 1e-5);
    for (const auto &text : findings.texts) CHECK(text.empty());
    CHECK(pa_cuda_slots(plan, n_q) == 5 && pa_cuda_slots(plan, 1) == 5 * n_q); // the same memory
    CHECK(pa_cuda_splits(plan, n_q, 100000, 99) <= 5 && pa_cuda_splits(plan, 1, 0, 99) == 1);
    pa_cuda_plan_destroy(plan);
    pa_cuda_close(device);
    CHECK(gpu.n_allocations == 0 && gpu.n_modules == 0 && gpu.n_contexts == 0 && gpu.n_pushed == 0);
}

// Two rounds of two splits: each state of the second joins that of the first which lies in its slot.
template <class I> void joined(int n_q, const std::string &kernel) {
    const CaseSpec spec = {n_q, 8, 2, 250, 32, MaskKind::causal, 0, true};
    const Case c = make_case(spec, 64, 64, I::kK, I::kV, I::kAlign, 5);
    SimulatedGpu gpu;
    emulate::Findings findings;
    load<I>(gpu, findings, c);
    pa_cuda_device *device = nullptr;
    pa_cuda_plan *plan = nullptr;
    const pa_shape shape = shape_of(c, I::kK, I::kV);
    CHECK(open_device(gpu.driver(), 0, &device) == PA_OK);
    CHECK(pa_cuda_plan_create(device, &shape, 2, "image", 6, &plan) == PA_OK);
    CuStream stream = gpu.stream("compute");
    const pa_args first = args_of(c, 0, 5), second = args_of(c, 5, 3);
    CHECK(pa_cuda_attend(plan, &first, 0, 2, 0, stream) == PA_OK);
    CHECK(pa_cuda_attend(plan, &second, 0, 2, 1, stream) == PA_OK);
    CHECK(gpu.launches.size() == 4 && gpu.launches[3].find(kernel) == 0);
    std::vector<Float4> out(static_cast<size_t>(n_q) * 8 * 64 / 4);
    CHECK(pa_cuda_combine(plan, n_q, 2, c.sinks.data(), reinterpret_cast<float *>(out.data()), stream) == PA_OK);
    const double error = difference(out, c.answer());
    std::printf("joined, %d queries, %s: %.1e\n", n_q, kernel.c_str(), error);
    CHECK(error < 1e-5);
    CHECK(findings.texts.empty());
    pa_cuda_plan_destroy(plan);
    pa_cuda_close(device);
}

// pa_bounds runs once for all layers that were announced, and again wherever its result would not be theirs.
void prepared() {
    const Case c = make_case({1, 8, 2, 128, 32, MaskKind::causal}, 64, 64, kF16, kQ8, 4, 5);
    SimulatedGpu gpu;
    emulate::Findings findings;
    load<Plain>(gpu, findings, c);
    pa_cuda_device *device = nullptr;
    pa_cuda_plan *plan = nullptr;
    const pa_shape shape = shape_of(c, kF16, kQ8);
    CHECK(open_device(gpu.driver(), 0, &device) == PA_OK);
    CHECK(pa_cuda_plan_create(device, &shape, 2, "image", 6, &plan) == PA_OK);
    CuStream stream = gpu.stream("compute");
    const pa_args all = args_of(c, 0, 4), half = args_of(c, 0, 2), other = args_of(c, 2, 2);
    const auto n_bounds = [&](const pa_args &args) {
        gpu.launches.clear();
        CHECK(pa_cuda_attend(plan, &args, 0, 1, 0, stream) == PA_OK);
        return gpu.launches.size() - 1;
    };
    std::vector<Float4> out(8 * 64 / 4);
    const auto error = [&] {
        CHECK(n_bounds(all) == 0);
        CHECK(pa_cuda_combine(plan, 1, 1, nullptr, reinterpret_cast<float *>(out.data()), stream) == PA_OK);
        return difference(out, c.answer());
    };
    CHECK(n_bounds(all) == 1 && n_bounds(all) == 1);
    CHECK(pa_cuda_prepare(plan, &all.mask, 128, stream) == PA_OK);
    CHECK(error() < 1e-5 && error() < 1e-5);
    CHECK(n_bounds(half) == 1); // fewer cells ...
    CHECK(n_bounds(all) == 1);  // ... and what was prepared is overwritten
    CHECK(pa_cuda_prepare(plan, &all.mask, 128, stream) == PA_OK);
    CHECK(n_bounds(other) == 1 && n_bounds(all) == 1); // other positions
    CHECK(pa_cuda_prepare(plan, &all.mask, 128, stream) == PA_OK);
    CHECK(pa_cuda_prepare(plan, nullptr, 0, stream) == PA_OK && n_bounds(all) == 1);
    CHECK_SAYS(pa_cuda_prepare(plan, &all.mask, 129, stream), PA_BAD_ARGUMENT, "129 cells; the plan is for 128");
    gpu.fail_at = "cuLaunchKernel";
    CHECK_SAYS(pa_cuda_prepare(plan, &all.mask, 128, stream), PA_DEVICE_ERROR, "cuLaunchKernel");
    CHECK(n_bounds(all) == 1); // what failed is not prepared
    CHECK(findings.texts.empty());
    pa_cuda_plan_destroy(plan);
    pa_cuda_close(device);
}

void no_device() {
    pa_cuda_device *device = nullptr;
    CHECK_SAYS(pa_cuda_open(0, nullptr), PA_BAD_ARGUMENT, "null");
    std::string why;
    Driver real;
    if (load_driver(real, why) == PA_NO_DEVICE) CHECK_SAYS(pa_cuda_open(0, &device), PA_NO_DEVICE, "libcuda.so.1");
    SimulatedGpu gpu;
    gpu.version = 11080;
    CHECK_SAYS(open_device(gpu.driver(), 0, &device), PA_UNSUPPORTED,
               "older than this code: it is for CUDA 11.8, 12.0 is needed");
    gpu.version = 12000;
    CHECK_SAYS(open_device(gpu.driver(), 1, &device), PA_NO_DEVICE, "no GPU 1: this machine has 1");
    gpu.n_gpus = 0;
    CHECK_SAYS(open_device(gpu.driver(), 0, &device), PA_NO_DEVICE, "finds no GPU (cuInit: 100)");
    gpu.n_gpus = 1;
    gpu.fail_at = "cuInit"; // a driver that is there and does not start is an error, not "no GPU"
    CHECK_SAYS(open_device(gpu.driver(), 0, &device), PA_DEVICE_ERROR, "cuInit: simulated error (719)");
    CHECK(device == nullptr && gpu.n_contexts == 0);
}

void bad_plans() {
    const Case c = make_case({1, 8, 2, 64, 32}, 64, 64, kF16, kQ8, 4, 5);
    SimulatedGpu gpu;
    emulate::Findings findings;
    load<Plain>(gpu, findings, c);
    pa_cuda_device *device = nullptr;
    pa_cuda_plan *plan = nullptr;
    CHECK(open_device(gpu.driver(), 0, &device) == PA_OK);
    const pa_shape good = shape_of(c, kF16, kQ8);
    const auto create = [&](pa_shape shape, const char *image, int n_slots = 2) {
        return pa_cuda_plan_create(device, &shape, n_slots, image, 6, &plan);
    };
    pa_shape shape = good;
    shape.n_kv_head = 3;
    CHECK_SAYS(create(shape, "image"), PA_BAD_ARGUMENT, "8 heads over 3");
    shape = good;
    shape.k_type = PA_F32;
    CHECK_SAYS(create(shape, "image"), PA_UNSUPPORTED, "f16, bf16, q8_0 and q4_0");
    shape = good;
    shape.d_k = 128;
    CHECK_SAYS(create(shape, "image"), PA_BAD_ARGUMENT, "heads of 64/64 values");
    CHECK_SAYS(create(good, "for another GPU"), PA_NO_DEVICE, "not for this GPU (compute capability 6.1)");
    CHECK_SAYS(create(good, "image", 0), PA_BAD_ARGUMENT, "0 slots");
    gpu.memory_left = 100;
    CHECK_SAYS(create(good, "image"), PA_OUT_OF_MEMORY, "cuMemAlloc_v2");
    gpu.memory_left = 1u << 30;
    shape = good;
    shape.n_head = 128, shape.n_kv_head = 1, shape.max_q = 1 << 16; // MLA's heads
    CHECK_SAYS(create(shape, "image"), PA_UNSUPPORTED, "65536 queries of groups of 128 heads are 262144 tiles");
    shape.n_head = shape.n_kv_head = 1 << 15;
    CHECK_SAYS(create(shape, "image"), PA_BAD_ARGUMENT, "at most 1073741824 rows");
    auto *info = reinterpret_cast<ImageInfo *>(gpu.image_info.data());
    info->problem_bytes += 8;
    CHECK_SAYS(create(good, "image"), PA_BAD_ARGUMENT, "lays out its arguments in");
    info->problem_bytes -= 8;
    gpu.image_info.pop_back();
    CHECK_SAYS(create(good, "image"), PA_BAD_ARGUMENT, "not one of this library");
    CHECK(plan == nullptr && gpu.n_modules == 0 && gpu.n_allocations == 0);
    pa_cuda_close(device);
}

void bad_runs() {
    const Case c = make_case({2, 8, 2, 64, 32}, 64, 64, kF16, kQ8, 4, 5);
    SimulatedGpu gpu;
    emulate::Findings findings;
    load<Plain>(gpu, findings, c);
    pa_cuda_device *device = nullptr;
    pa_cuda_plan *plan = nullptr;
    const pa_shape shape = shape_of(c, kF16, kQ8);
    CHECK(open_device(gpu.driver(), 0, &device) == PA_OK);
    CHECK(pa_cuda_plan_create(device, &shape, 2, "image", 6, &plan) == PA_OK);
    CuStream stream = gpu.stream("compute");
    const pa_args good = args_of(c, 0, 2);
    const auto run = [&](auto change, int first = 0, int n_splits = 1, int join = 0) {
        pa_args args = good;
        change(args);
        return pa_cuda_attend(plan, &args, first, n_splits, join, stream);
    };
    CHECK_SAYS(run([](pa_args &a) { a.k.n_pages = 1; }), PA_BAD_ARGUMENT, "K: cell 63 lies on page 1, out of range");
    CHECK_SAYS(run([](pa_args &a) { a.v.pages = nullptr; }), PA_BAD_ARGUMENT, "V: no pages");
    CHECK_SAYS(run([](pa_args &a) { a.k.cell_stride = 8; }), PA_BAD_ARGUMENT, "not multiples of 16");
    CHECK_SAYS(run([](pa_args &a) { a.v.head_stride = 34; }), PA_BAD_ARGUMENT, "not multiples of 4");
    std::vector<const void *> table(good.k.pages, good.k.pages + 2);
    const auto check_pages = [&] {
        pa_args args = good;
        args.k.pages = table.data();
        return pa_cuda_check_pages(plan, &args);
    };
    CHECK(check_pages() == PA_OK);
    table[1] = static_cast<const char *>(table[1]) + 8;
    CHECK_SAYS(check_pages(), PA_BAD_ARGUMENT, "K: page 1 begins at ");
    table[1] = nullptr;
    CHECK_SAYS(check_pages(), PA_BAD_ARGUMENT, "K: page 1 is null");
    CHECK_SAYS(run([](pa_args &a) { a.n_q = 3; }), PA_BAD_ARGUMENT, "the plan is for 2");
    CHECK_SAYS(run([](pa_args &a) { a.q = nullptr; }), PA_BAD_ARGUMENT, "q");
    CHECK_SAYS(run([](pa_args &a) { a.mask.query_pos = nullptr; }), PA_BAD_ARGUMENT, "none of queries");
    CHECK_SAYS(run([](pa_args &a) { a.mask.cell_seq = a.mask.cell_pos; }), PA_BAD_ARGUMENT, "sequences");
    CHECK_SAYS(run([](pa_args &) {}, 1, 2), PA_BAD_ARGUMENT, "slots 1 .. 2 of 2");
    CHECK(gpu.launches.empty());
    pa_cuda_plan_destroy(plan);
    reinterpret_cast<ImageInfo *>(gpu.image_info.data())->most_cells = 40;
    CHECK(pa_cuda_plan_create(device, &shape, 2, "image", 6, &plan) == PA_OK);
    CHECK_SAYS(run([](pa_args &) {}), PA_BAD_ARGUMENT,
               "64 cells in 1 splits: of this plan's heads of 64 values a split has at most 40");
    CHECK(pa_cuda_splits(plan, 2, 64, 1) == 2);
    CHECK_SAYS(pa_cuda_split_cells(plan, 0), PA_BAD_ARGUMENT, "0 cells");
    CHECK(pa_cuda_split_cells(plan, 1000) == PA_OK && pa_cuda_splits(plan, 2, 64, 1) == 2); // the image's limit stays
    CHECK(pa_cuda_split_cells(plan, 20) == PA_OK && pa_cuda_splits(plan, 2, 64, 1) == 4);
    CHECK_SAYS(run([](pa_args &) {}, 0, 2), PA_BAD_ARGUMENT, "a split has at most 20");
    CHECK(pa_cuda_split_cells(plan, 40) == PA_OK);
    gpu.fail_at = "cuLaunchKernel";
    CHECK_SAYS(run([](pa_args &) {}, 0, 2), PA_DEVICE_ERROR, "cuLaunchKernel: simulated error (719)");
    float out[4];
    CHECK_SAYS(pa_cuda_combine(plan, 1, 1, nullptr, nullptr, stream), PA_BAD_ARGUMENT, "output");
    CHECK_SAYS(pa_cuda_combine(plan, 2, 3, nullptr, reinterpret_cast<float *>(64), stream), PA_BAD_ARGUMENT,
               "3 slots of 2");
    CHECK_SAYS(pa_cuda_put_state(plan, 2, 2, out, stream), PA_BAD_ARGUMENT, "slot 2 of 2");
    pa_cuda_plan_destroy(plan);
    pa_cuda_close(device);
    CHECK(gpu.n_pushed == 0);
}

} // namespace

int main() {
    hybrid<Plain>(1, "pa_decode", false); // 4 rows
    hybrid<Plain>(3, "pa_wide", true);    // 12 rows: two decode tiles would not do, three are too many
    hybrid<Narrowing>(1, "pa_decode", false);
    hybrid<Narrowing>(3, "pa_narrow", true);
    hybrid<Narrowing>(9, "pa_wide", true);
    joined<Plain>(1, "pa_wide");
    joined<Plain>(9, "pa_wide");
    joined<Narrowing>(3, "pa_narrow");
    joined<Narrowing>(9, "pa_wide");
    chosen_kernel<Narrowing>(-1, "pa_decode"); // 4 rows
    chosen_kernel<Narrowing>(4, "pa_decode");
    chosen_kernel<Narrowing>(3, "pa_narrow");
    chosen_kernel<Plain>(0, "pa_decode"); // no other for so few
    prepared();
    no_device();
    bad_plans();
    bad_runs();
    std::printf("%d failed checks\n", n_failed_checks);
    return n_failed_checks > 0;
}
