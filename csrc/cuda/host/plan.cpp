// Plan -> run: an image's kernels, device memory for states, and launches.
#include "device.h"
#include "divisor.h"
#include "splits.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

using namespace paged_attn::gpu;

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kMostQueries = 1 << 16, kMostRows = 1 << 30, kMostGridZ = 65535;

struct Kernel {
    CuFunction function = nullptr; // null: the image has none
    int rows = 0, n_threads = 0, shared_bytes = 0;
    int blocks_per_multiprocessor = 0;
};

constexpr int bounds_of(int n_cells) { return (n_cells + kBoundsCells - 1) / kBoundsCells; }
constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
bool blocked(int type) { return type == PA_Q8_0 || type == PA_Q4_0; }

} // namespace

struct pa_cuda_plan {
    pa_cuda_device *device = nullptr;
    pa_shape shape = {};
    ImageInfo info = {};
    CuModule module = nullptr;
    Kernel decode, narrow, wide, combine, bounds;
    CuAddress states = 0, cell_bounds = 0;
    int decode_rows_most = -1; // -1: by the rule of kernel_for
    int split_cells = 0;       // that a split has at most; 0: any number
    size_t state_bytes = 0, bounds_bytes = 0;
    const int32_t *bounded_pos = nullptr, *bounded_seq = nullptr; // what cell_bounds were prepared of; null: of nothing
    int n_bounded = 0;

    int group() const { return shape.n_head / shape.n_kv_head; }
    // floats from slot to slot for n_q queries; slots of one token have the same n_q
    long long slot_stride(int n_q) const {
        return (static_cast<long long>(n_q) * shape.n_head * (shape.d_v + 2) + 3) / 4 * 4;
    }
    // Slots lie side by side, so what holds n_slots of max_q queries holds more of fewer.
    int slots_of(int n_q) const {
        const long long bytes = slot_stride(n_q) * static_cast<long long>(sizeof(float));
        return static_cast<int>(std::min(static_cast<long long>(state_bytes) / bytes, 1LL << 20));
    }
    Slots slots(int n_q) const { return {reinterpret_cast<float *>(states), slot_stride(n_q)}; }

    // Decode reads K/V once per 8 rows; the tile kernels once per 16 or more, at a higher price per row.
    const Kernel &kernel_for(int n_q, bool join) const {
        const int rows = n_q * group(), by_rule = decode.rows * (narrow.function ? 1 : 2);
        const int most = narrow.function && decode_rows_most >= 0 ? decode_rows_most : by_rule;
        if (!join && rows <= most) return decode;
        return narrow.function && rows <= narrow.rows ? narrow : wide;
    }

    pa_status launch(const Kernel &kernel, int x, int y, int z, CuStream stream, void **parameters) {
        return PA_CALL(device->driver, cuLaunchKernel, kernel.function, static_cast<unsigned>(x),
                       static_cast<unsigned>(y), static_cast<unsigned>(z), static_cast<unsigned>(kernel.n_threads), 1,
                       1, static_cast<unsigned>(kernel.shared_bytes), stream, parameters, nullptr);
    }
};

namespace {

pa_status check_shape(const pa_shape &s) {
    if (s.n_head <= 0 || s.n_kv_head <= 0 || s.n_head % s.n_kv_head)
        return fail(PA_BAD_ARGUMENT, "%d heads over %d K/V heads", s.n_head, s.n_kv_head);
    if (s.max_q <= 0 || s.max_q > kMostQueries || s.max_cells <= 0)
        return fail(PA_BAD_ARGUMENT, "at most %d queries and %d cells", s.max_q, s.max_cells);
    if (static_cast<int64_t>(s.max_q) * s.n_head > kMostRows)
        return fail(PA_BAD_ARGUMENT, "%d queries of %d heads: at most %d rows", s.max_q, s.n_head, kMostRows);
    if (!(s.softcap >= 0.0f)) return fail(PA_BAD_ARGUMENT, "a soft-cap of %g", static_cast<double>(s.softcap));
    const auto served = [](pa_dtype t) { return t == PA_F16 || t == PA_BF16 || t == PA_Q8_0 || t == PA_Q4_0; };
    if (!served(s.k_type) || !served(s.v_type))
        return fail(PA_UNSUPPORTED, "K of type %d and V of type %d: f16, bf16, q8_0 and q4_0 are served", s.k_type,
                    s.v_type);
    return PA_OK;
}

pa_status find_kernel(pa_cuda_plan &plan, const char *name, int rows, int n_threads, int shared_bytes, Kernel &kernel) {
    const Driver &driver = plan.device->driver;
    kernel.rows = rows;
    kernel.n_threads = n_threads;
    kernel.shared_bytes = shared_bytes;
    PA_TRY(PA_CALL(driver, cuModuleGetFunction, &kernel.function, plan.module, name));
    if (shared_bytes > 48 * 1024)
        PA_TRY(PA_CALL(driver, cuFuncSetAttribute, kernel.function, kCuFunctionMaxDynamicShared, shared_bytes));
    PA_TRY(PA_CALL(driver, cuOccupancyMaxActiveBlocksPerMultiprocessor, &kernel.blocks_per_multiprocessor,
                   kernel.function, n_threads, static_cast<size_t>(shared_bytes)));
    if (kernel.blocks_per_multiprocessor < 1) return fail(PA_UNSUPPORTED, "%s does not fit this GPU", name);
    return PA_OK;
}

pa_status load_image(pa_cuda_plan &plan, const void *image) {
    const Driver &driver = plan.device->driver;
    const CuResult loaded = driver.cuModuleLoadData(&plan.module, image);
    if (loaded == kCuNoBinaryForGpu)
        return fail(PA_NO_DEVICE, "the image is not for this GPU (compute capability %d.%d), or newer than the driver",
                    plan.device->arch / 10, plan.device->arch % 10);
    PA_TRY(checked(driver, loaded, "cuModuleLoadData"));
    CuAddress at = 0;
    size_t bytes = 0;
    const CuResult found = driver.cuModuleGetGlobal_v2(&at, &bytes, plan.module, "pa_image");
    if (found == kCuNotFound || (found == kCuSuccess && bytes != sizeof(ImageInfo)))
        return fail(PA_BAD_ARGUMENT, "the image is not one of this library");
    PA_TRY(checked(driver, found, "cuModuleGetGlobal_v2"));
    PA_TRY(PA_CALL(driver, cuMemcpyDtoH_v2, &plan.info, at, sizeof(ImageInfo)));
    plan.split_cells = plan.info.most_cells;
    const ImageInfo &info = plan.info;
    const pa_shape &s = plan.shape;
    if (info.version != kImageVersion)
        return fail(PA_BAD_ARGUMENT, "an image of version %d, this library takes %d", info.version, kImageVersion);
    const int sizes[3] = {sizeof(Problem), sizeof(Combination), sizeof(Mask)};
    if (info.problem_bytes != sizes[0] || info.combination_bytes != sizes[1] || info.mask_bytes != sizes[2])
        return fail(PA_BAD_ARGUMENT, "the image lays out its arguments in %d, %d, %d bytes, this library in %d, %d, %d",
                    info.problem_bytes, info.combination_bytes, info.mask_bytes, sizes[0], sizes[1], sizes[2]);
    if (info.d_k != s.d_k || info.d_v != s.d_v || info.k_type != static_cast<int>(s.k_type) ||
        info.v_type != static_cast<int>(s.v_type))
        return fail(PA_BAD_ARGUMENT,
                    "the image is for heads of %d/%d values, types %d/%d; the plan is for %d/%d, %d/%d", info.d_k,
                    info.d_v, info.k_type, info.v_type, s.d_k, s.d_v, s.k_type, s.v_type);
    PA_TRY(find_kernel(plan, "pa_decode", info.decode_rows, info.decode_threads, info.decode_shared, plan.decode));
    PA_TRY(find_kernel(plan, "pa_wide", info.wide_rows, info.wide_threads, info.wide_shared, plan.wide));
    PA_TRY(find_kernel(plan, "pa_combine", 1, info.combine_threads, info.combine_shared, plan.combine));
    PA_TRY(find_kernel(plan, "pa_bounds", kBoundsCells, 128, 0, plan.bounds));
    if (info.narrow_rows > 0)
        PA_TRY(find_kernel(plan, "pa_narrow", info.narrow_rows, info.narrow_threads, info.narrow_shared, plan.narrow));
    // only a run of one or two row tiles takes another kernel than this one
    const int64_t tiles = (static_cast<int64_t>(s.max_q) * plan.group() + info.wide_rows - 1) / info.wide_rows;
    if (tiles > kMostGridZ)
        return fail(PA_UNSUPPORTED, "%d queries of groups of %d heads are %lld tiles; a GPU's grid has %d", s.max_q,
                    plan.group(), static_cast<long long>(tiles), kMostGridZ);
    return PA_OK;
}

pa_status make(pa_cuda_plan &plan, const void *image, size_t n_slots) {
    const Driver &driver = plan.device->driver;
    const Current current(*plan.device);
    PA_TRY(current.status());
    PA_TRY(load_image(plan, image));
    plan.state_bytes = static_cast<size_t>(plan.slot_stride(plan.shape.max_q)) * sizeof(float) * n_slots;
    plan.bounds_bytes = static_cast<size_t>(bounds_of(plan.shape.max_cells)) * sizeof(CellBounds);
    PA_TRY(PA_CALL(driver, cuMemAlloc_v2, &plan.states, plan.state_bytes));
    return PA_CALL(driver, cuMemAlloc_v2, &plan.cell_bounds, plan.bounds_bytes);
}

pa_status check_rows(const pa_cuda_plan &plan, const pa_rows &rows, int n_cells, int type, const char *what) {
    if (n_cells == 0) return PA_OK;
    if (!rows.pages || rows.page_cells <= 0) return fail(PA_BAD_ARGUMENT, "%s: no pages", what);
    if (static_cast<int64_t>(rows.n_pages) * rows.page_cells < n_cells)
        return fail(PA_BAD_ARGUMENT, "%s: cell %d lies on page %d, out of range: there are %d pages of %d cells", what,
                    n_cells - 1, (n_cells - 1) / rows.page_cells, rows.n_pages, rows.page_cells);
    const int align = blocked(type) ? plan.info.row_align : 16;
    if (rows.cell_stride % align || rows.head_stride % align || rows.cell_stride < 0 || rows.head_stride < 0)
        return fail(PA_BAD_ARGUMENT, "%s: strides of %lld and %lld bytes are not multiples of %d", what,
                    static_cast<long long>(rows.cell_stride), static_cast<long long>(rows.head_stride), align);
    return PA_OK;
}

// The page table on the host: what the kernels would fault on.
pa_status check_pages(const pa_cuda_plan &plan, const pa_rows &rows, int n_cells, int type, const char *what) {
    PA_TRY(check_rows(plan, rows, n_cells, type, what));
    const int n_pages = n_cells == 0 ? 0 : divide_up(n_cells, rows.page_cells);
    const unsigned align = blocked(type) ? static_cast<unsigned>(plan.info.row_align) : 16;
    const std::unique_ptr<CuAddress[]> table(new (std::nothrow) CuAddress[static_cast<size_t>(n_pages) + 1]);
    if (!table) return fail(PA_OUT_OF_MEMORY, "no memory for %d addresses of pages", n_pages);
    if (n_pages > 0)
        PA_TRY(PA_CALL(plan.device->driver, cuMemcpyDtoH_v2, table.get(), reinterpret_cast<CuAddress>(rows.pages),
                       static_cast<size_t>(n_pages) * sizeof(CuAddress)));
    for (int i = 0; i < n_pages; i++) {
        const CuAddress at = table[static_cast<size_t>(i)];
        if (at == 0) return fail(PA_BAD_ARGUMENT, "%s: page %d is null", what, i);
        if (at % align)
            return fail(PA_BAD_ARGUMENT, "%s: page %d begins at %#llx, which is no multiple of %u", what, i, at, align);
    }
    return PA_OK;
}

pa_status check_run(const pa_cuda_plan &plan, const pa_args &args, int first, int n_splits) {
    if (args.n_q <= 0 || args.n_q > plan.shape.max_q || args.n_cells < 0 || args.n_cells > plan.shape.max_cells)
        return fail(PA_BAD_ARGUMENT, "%d queries over %d cells; the plan is for %d over %d", args.n_q, args.n_cells,
                    plan.shape.max_q, plan.shape.max_cells);
    if (!args.q || args.q_stride % 4 || args.q_head_stride % 4) return fail(PA_BAD_ARGUMENT, "q: null, or odd strides");
    const int n_slots = plan.slots_of(args.n_q);
    if (first < 0 || n_splits < 1 || first > n_slots - n_splits)
        return fail(PA_BAD_ARGUMENT, "slots %d .. %d of %d", first, first + n_splits - 1, n_slots);
    if (plan.split_cells > 0 && divide_up(args.n_cells, n_splits) > plan.split_cells)
        return fail(PA_BAD_ARGUMENT, "%d cells in %d splits: of this plan's heads of %d values a split has at most %d",
                    args.n_cells, n_splits, plan.shape.d_v, plan.split_cells);
    const pa_mask &mask = args.mask;
    if (mask.dense && mask.cell_pos) return fail(PA_BAD_ARGUMENT, "a dense mask and positions");
    if (mask.dense && mask.dense_stride % 2) return fail(PA_BAD_ARGUMENT, "a dense mask with rows of odd bytes");
    if (mask.cell_pos && !mask.query_pos) return fail(PA_BAD_ARGUMENT, "positions of cells and none of queries");
    if (!mask.cell_seq != !mask.query_seq || (mask.cell_seq && !mask.cell_pos) || mask.window < 0)
        return fail(PA_BAD_ARGUMENT,
                    "sequences of cells need those of queries, and positions; a window is not negative");
    PA_TRY(check_rows(plan, args.k, args.n_cells, plan.shape.k_type, "K"));
    return check_rows(plan, args.v, args.n_cells, plan.shape.v_type, "V");
}

Rows device_rows(const pa_rows &rows) {
    return {reinterpret_cast<const char *const *>(rows.pages),
            make_divisor(static_cast<unsigned>(std::max(rows.page_cells, 1))), rows.cell_stride, rows.head_stride};
}

Problem make_problem(const pa_cuda_plan &plan, const pa_args &args, int first, int n_splits, int join) {
    const pa_shape &s = plan.shape;
    Problem p = {};
    p.n_q = args.n_q;
    p.n_cells = args.n_cells;
    p.n_head = s.n_head;
    p.group = plan.group();
    p.score_scale = s.softcap > 0.0f ? s.scale / s.softcap : s.scale * kLog2e;
    p.cap_log2 = s.softcap * kLog2e;
    p.q = args.q;
    p.q_stride = args.q_stride;
    p.q_head_stride = args.q_head_stride;
    p.k = device_rows(args.k);
    p.v = device_rows(args.v);
    p.mask.dense = args.mask.dense;
    p.mask.dense_stride = args.mask.dense_stride;
    p.mask.cell_pos = args.mask.cell_pos;
    p.mask.cell_seq = args.mask.cell_seq;
    p.mask.query_pos = args.mask.query_pos;
    p.mask.query_seq = args.mask.query_seq;
    p.mask.window = args.mask.window;
    p.mask.bounds = args.mask.cell_pos ? reinterpret_cast<const CellBounds *>(plan.cell_bounds) : nullptr;
    p.slots = plan.slots(args.n_q);
    p.first_slot = first;
    p.n_splits = n_splits;
    p.accumulate = join ? 1 : 0;
    return p;
}

bool is_prepared(const pa_cuda_plan &plan, const pa_mask &mask, int n_cells) {
    return plan.bounded_pos == mask.cell_pos && plan.bounded_seq == mask.cell_seq && plan.n_bounded == n_cells;
}

// What is seen of each 32 cells, into the plan's memory.
pa_status queue_bounds(pa_cuda_plan &plan, Mask mask, int n_cells, CuStream stream) {
    CellBounds *bounds = reinterpret_cast<CellBounds *>(plan.cell_bounds);
    void *parameters[] = {&mask, &n_cells, &bounds};
    return plan.launch(plan.bounds, divide_up(bounds_of(n_cells), 128), 1, 1, stream, parameters);
}

} // namespace

pa_status pa_cuda_plan_create(pa_cuda_device *device, const pa_shape *shape, int32_t n_slots, const void *image,
                              size_t image_bytes, pa_cuda_plan **plan) {
    if (!device || !shape || !image || image_bytes == 0 || !plan)
        return fail(PA_BAD_ARGUMENT, "null where a device, a shape, an image or the plan's handle goes");
    *plan = nullptr;
    PA_TRY(check_shape(*shape));
    if (n_slots < 1) return fail(PA_BAD_ARGUMENT, "%d slots", n_slots);
    auto *made = new (std::nothrow) pa_cuda_plan;
    if (!made) return fail(PA_OUT_OF_MEMORY, "no memory for a plan");
    made->device = device;
    made->shape = *shape;
    if (const pa_status status = make(*made, image, static_cast<size_t>(n_slots)); status != PA_OK) {
        pa_cuda_plan_destroy(made);
        return status;
    }
    *plan = made;
    return PA_OK;
}

size_t pa_cuda_plan_bytes(const pa_cuda_plan *plan) { return plan->state_bytes + plan->bounds_bytes; }

void pa_cuda_plan_destroy(pa_cuda_plan *plan) {
    if (!plan) return;
    {
        const Driver &driver = plan->device->driver;
        const Current current(*plan->device);
        if (plan->states) driver.cuMemFree_v2(plan->states);
        if (plan->cell_bounds) driver.cuMemFree_v2(plan->cell_bounds);
        if (plan->module) driver.cuModuleUnload(plan->module);
    }
    delete plan;
}

int32_t pa_cuda_splits(const pa_cuda_plan *plan, int32_t n_q, int32_t n_cells, int32_t most) {
    const Kernel &kernel = plan->kernel_for(n_q, false);
    const int row_tiles = divide_up(n_q * plan->group(), kernel.rows);
    const int at_once = plan->device->n_multiprocessors * kernel.blocks_per_multiprocessor;
    const int needed = plan->split_cells > 0 ? divide_up(n_cells, plan->split_cells) : 1;
    return best_splits({divide_up(n_cells, kSplitCells), plan->shape.n_kv_head * row_tiles, at_once,
                        std::max(needed, 1), std::min(most, plan->slots_of(n_q))});
}

int32_t pa_cuda_slots(const pa_cuda_plan *plan, int32_t n_q) { return plan->slots_of(std::max(n_q, 1)); }

pa_status pa_cuda_decode_rows(pa_cuda_plan *plan, int32_t most) {
    if (!plan || most < -1) return fail(PA_BAD_ARGUMENT, "no plan, or %d rows", most);
    plan->decode_rows_most = most;
    return PA_OK;
}

pa_status pa_cuda_split_cells(pa_cuda_plan *plan, int32_t most) {
    if (!plan || most < 1) return fail(PA_BAD_ARGUMENT, "no plan, or %d cells", most);
    plan->split_cells = plan->info.most_cells > 0 ? std::min(most, plan->info.most_cells) : most;
    return PA_OK;
}

pa_status pa_cuda_prepare(pa_cuda_plan *plan, const pa_mask *mask, int32_t n_cells, void *stream) {
    if (!plan) return fail(PA_BAD_ARGUMENT, "no plan");
    plan->bounded_pos = nullptr;
    if (!mask || !mask->cell_pos) return PA_OK;
    if (n_cells < 0 || n_cells > plan->shape.max_cells)
        return fail(PA_BAD_ARGUMENT, "%d cells; the plan is for %d", n_cells, plan->shape.max_cells);
    if (n_cells == 0) return PA_OK;
    const Current current(*plan->device);
    PA_TRY(current.status());
    Mask of = {};
    of.cell_pos = mask->cell_pos;
    of.cell_seq = mask->cell_seq;
    PA_TRY(queue_bounds(*plan, of, n_cells, stream));
    plan->bounded_pos = mask->cell_pos;
    plan->bounded_seq = mask->cell_seq;
    plan->n_bounded = n_cells;
    return PA_OK;
}

pa_status pa_cuda_attend(pa_cuda_plan *plan, const pa_args *args, int32_t first, int32_t n_splits, int32_t join,
                         void *stream) {
    if (!plan || !args) return fail(PA_BAD_ARGUMENT, "no plan, or no arguments");
    PA_TRY(check_run(*plan, *args, first, n_splits));
    Problem problem = make_problem(*plan, *args, first, n_splits, join);
    const Current current(*plan->device);
    PA_TRY(current.status());
    if (problem.mask.bounds && args->n_cells > 0 && !is_prepared(*plan, args->mask, args->n_cells)) {
        plan->bounded_pos = nullptr; // overwritten
        PA_TRY(queue_bounds(*plan, problem.mask, problem.n_cells, stream));
    }
    const Kernel &kernel = plan->kernel_for(args->n_q, join != 0);
    void *parameters[] = {&problem};
    return plan->launch(kernel, n_splits, plan->shape.n_kv_head, divide_up(args->n_q * plan->group(), kernel.rows),
                        stream, parameters);
}

pa_status pa_cuda_check_pages(pa_cuda_plan *plan, const pa_args *args) {
    if (!plan || !args) return fail(PA_BAD_ARGUMENT, "no plan, or no arguments");
    const Current current(*plan->device);
    PA_TRY(current.status());
    PA_TRY(check_pages(*plan, args->k, args->n_cells, plan->shape.k_type, "K"));
    return check_pages(*plan, args->v, args->n_cells, plan->shape.v_type, "V");
}

pa_status pa_cuda_put_state(pa_cuda_plan *plan, int32_t slot, int32_t n_q, const float *state, void *stream) {
    if (!plan || !state) return fail(PA_BAD_ARGUMENT, "no plan, or no state");
    if (n_q <= 0 || n_q > plan->shape.max_q || slot < 0 || slot >= plan->slots_of(n_q))
        return fail(PA_BAD_ARGUMENT, "slot %d of %d, %d queries of %d", slot, pa_cuda_slots(plan, n_q), n_q,
                    plan->shape.max_q);
    const Current current(*plan->device);
    PA_TRY(current.status());
    const CuAddress to = plan->states + static_cast<CuAddress>(slot * plan->slot_stride(n_q)) * sizeof(float);
    const size_t bytes = static_cast<size_t>(n_q) * plan->shape.n_head * (plan->shape.d_v + 2) * sizeof(float);
    return PA_CALL(plan->device->driver, cuMemcpyHtoDAsync_v2, to, state, bytes, stream);
}

pa_status pa_cuda_combine(pa_cuda_plan *plan, int32_t n_q, int32_t n_slots, const float *sinks, float *out,
                          void *stream) {
    if (!plan || !out || reinterpret_cast<uintptr_t>(out) % 16)
        return fail(PA_BAD_ARGUMENT, "no plan, or no aligned output");
    if (n_q <= 0 || n_q > plan->shape.max_q || n_slots < 1 || n_slots > plan->slots_of(n_q))
        return fail(PA_BAD_ARGUMENT, "%d slots of %d, %d queries of %d", n_slots, pa_cuda_slots(plan, n_q), n_q,
                    plan->shape.max_q);
    const Current current(*plan->device);
    PA_TRY(current.status());
    Combination c = {plan->slots(n_q), n_slots, n_q * plan->shape.n_head, plan->shape.n_head, sinks, out};
    void *parameters[] = {&c};
    return plan->launch(plan->combine, c.n_rows, 1, 1, stream, parameters);
}
