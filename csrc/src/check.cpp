#include "src/check.h"

#include "src/status.h"

#include <cmath>
#include <cstring>
#include <initializer_list>

namespace paged_attn {

namespace {

constexpr int32_t kMaxD = 1024;
// The kernels count rows (query x head), cells and tiles of one by the other in 32 bits.
constexpr int64_t kMaxRows = int64_t{1} << 30, kMaxCells = int64_t{1} << 30, kMaxProducts = int64_t{1} << 40;

struct Type {
    const char *name;
    int block_values, block_bytes, alignment; // alignment: bytes, of the address and of the strides
};

// As a number: a caller may have put anything there, and C++ leaves undefined what an enum beyond its range does.
int number(const pa_dtype &type) {
    int value;
    static_assert(sizeof value == sizeof type, "pa_dtype is an int in C");
    std::memcpy(&value, &type, sizeof value);
    return value;
}

const Type *find_type(const pa_dtype &type) {
    static constexpr Type types[] = {
        {"f32", 1, 4, 4}, {"f16", 1, 2, 2}, {"bf16", 1, 2, 2}, {"q8_0", 32, 34, 2}, {"q4_0", 32, 18, 2}};
    const auto index = static_cast<unsigned>(number(type));
    return index < sizeof types / sizeof *types ? &types[index] : nullptr;
}

bool aligned(const void *address, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

pa_status check_row(const char *what, const char *d_name, const pa_dtype &dtype, int32_t d) {
    const Type *type = find_type(dtype);
    if (!type) return fail(PA_UNSUPPORTED, "%s: %d is no data type", what, number(dtype));
    if (d <= 0) return fail(PA_BAD_ARGUMENT, "%s is %d, it has to be positive", d_name, d);
    if (d > kMaxD) return fail(PA_UNSUPPORTED, "%s is %d, at most %d is supported", d_name, d, kMaxD);
    const int multiple = type->block_values > 16 ? type->block_values : 16;
    if (d % multiple) {
        return fail(PA_UNSUPPORTED, "%s is %d, for %s it has to be a multiple of %d", d_name, d, type->name, multiple);
    }
    return PA_OK;
}

// Strides of a row of `bytes` bytes: `count` of them, no two in the same place, all of it within an address space.
pa_status check_stride(const char *what, const char *name, int64_t stride, int64_t count, int64_t bytes,
                       int64_t alignment) {
    if (count <= 1) return PA_OK; // never used
    if (stride < bytes) {
        return fail(PA_BAD_ARGUMENT, "%s: %s is %lld bytes, less than the %lld of a row", what, name,
                    static_cast<long long>(stride), static_cast<long long>(bytes));
    }
    if (stride % alignment) {
        return fail(PA_BAD_ARGUMENT, "%s: %s is %lld bytes, not a multiple of %lld", what, name,
                    static_cast<long long>(stride), static_cast<long long>(alignment));
    }
    if (stride > (INT64_MAX >> 8) / count) {
        return fail(PA_BAD_ARGUMENT, "%s: %s is %lld bytes, %lld of that do not fit into memory", what, name,
                    static_cast<long long>(stride), static_cast<long long>(count));
    }
    return PA_OK;
}

pa_status check_rows(const char *what, const pa_rows &rows, pa_dtype dtype, int32_t d, int32_t n_head,
                     int32_t n_cells) {
    if (n_cells == 0) return PA_OK;
    if (rows.page_cells <= 0) {
        return fail(PA_BAD_ARGUMENT, "%s: page_cells is %d, it has to be positive", what, rows.page_cells);
    }
    if (!rows.pages) return fail(PA_BAD_ARGUMENT, "%s: there is no page table", what);
    const int32_t used = (n_cells - 1) / rows.page_cells + 1;
    if (used > rows.n_pages) {
        return fail(PA_BAD_ARGUMENT, "%s: cell %d is out of range: %d pages of %d cells", what, n_cells - 1,
                    rows.n_pages, rows.page_cells);
    }
    const int64_t alignment = find_type(dtype)->alignment, bytes = row_bytes(dtype, d);
    pa_status status = check_stride(what, "cell_stride", rows.cell_stride, rows.page_cells, bytes, alignment);
    if (status == PA_OK) status = check_stride(what, "head_stride", rows.head_stride, n_head, bytes, alignment);
    if (status != PA_OK) return status;
    for (int32_t page = 0; page < used; page++) {
        if (!rows.pages[page]) return fail(PA_BAD_ARGUMENT, "%s: page %d of %d is null", what, page, used);
        if (!aligned(rows.pages[page], alignment)) {
            return fail(PA_BAD_ARGUMENT, "%s: page %d does not lie at a multiple of %lld bytes", what, page,
                        static_cast<long long>(alignment));
        }
    }
    return PA_OK;
}

pa_status check_mask(const pa_mask &mask, int32_t n_q, int32_t n_cells) {
    const bool by_position = mask.cell_pos || mask.query_pos || mask.cell_seq || mask.query_seq;
    if (mask.window < 0) return fail(PA_BAD_ARGUMENT, "mask: the window is %d, less than 0", mask.window);
    if (mask.dense) {
        if (mask.query_pos || mask.cell_seq || mask.query_seq || mask.window) {
            return fail(PA_BAD_ARGUMENT, "mask: it is either dense or by position, not both");
        }
        if (!aligned(mask.cell_pos, 4)) return fail(PA_BAD_ARGUMENT, "mask: a position or sequence array is not aligned");
        if (!aligned(mask.dense, 2)) return fail(PA_BAD_ARGUMENT, "mask: it does not lie at a multiple of 2 bytes");
        return check_stride("mask", "dense_stride", mask.dense_stride, n_q, int64_t{2} * n_cells, 2);
    }
    if (n_cells == 0 || (!by_position && !mask.window)) return PA_OK;
    if (!mask.cell_pos || !mask.query_pos) {
        return fail(PA_BAD_ARGUMENT, "mask: %s is missing", mask.cell_pos ? "query_pos" : "cell_pos");
    }
    if (!mask.cell_seq != !mask.query_seq) {
        return fail(PA_BAD_ARGUMENT, "mask: %s is missing", mask.cell_seq ? "query_seq" : "cell_seq");
    }
    for (const int32_t *values : {mask.cell_pos, mask.query_pos, mask.cell_seq, mask.query_seq}) {
        if (!aligned(values, 4)) return fail(PA_BAD_ARGUMENT, "mask: a position or sequence array is not aligned");
    }
    return PA_OK;
}

} // namespace

int64_t row_bytes(pa_dtype type, int32_t d) noexcept {
    const Type *found = find_type(type);
    return int64_t{d} / found->block_values * found->block_bytes;
}

pa_status check_shape(const pa_shape *shape) noexcept {
    if (!shape) return fail(PA_BAD_ARGUMENT, "the shape is null");
    if (shape->n_head <= 0 || shape->n_kv_head <= 0 || shape->n_head % shape->n_kv_head) {
        return fail(PA_BAD_ARGUMENT, "%d query heads over %d K/V heads: not a positive multiple", shape->n_head,
                    shape->n_kv_head);
    }
    if (shape->max_q <= 0 || shape->max_cells <= 0) {
        return fail(PA_BAD_ARGUMENT, "max_q is %d and max_cells %d, both have to be positive", shape->max_q,
                    shape->max_cells);
    }
    const int64_t rows = int64_t{shape->max_q} * shape->n_head;
    if (rows > kMaxRows || shape->max_cells > kMaxCells || rows * shape->max_cells > kMaxProducts) {
        return fail(PA_UNSUPPORTED, "%d queries of %d heads over %d cells are too many for one run", shape->max_q,
                    shape->n_head, shape->max_cells);
    }
    if (!std::isfinite(shape->scale)) return fail(PA_BAD_ARGUMENT, "the scale is not a finite number");
    if (!std::isfinite(shape->softcap) || shape->softcap < 0.0f) {
        return fail(PA_BAD_ARGUMENT, "the softcap is neither 0 nor a positive number");
    }
    const pa_status status = check_row("K", "d_k", shape->k_type, shape->d_k);
    return status == PA_OK ? check_row("V", "d_v", shape->v_type, shape->d_v) : status;
}

pa_status check_inputs(const pa_shape &shape, const pa_args *args) noexcept {
    if (!args) return fail(PA_BAD_ARGUMENT, "the arguments are null");
    if (args->n_q <= 0 || args->n_q > shape.max_q) {
        return fail(PA_BAD_ARGUMENT, "n_q is %d, the plan is for 1 to %d", args->n_q, shape.max_q);
    }
    if (args->n_cells < 0 || args->n_cells > shape.max_cells) {
        return fail(PA_BAD_ARGUMENT, "n_cells is %d, the plan is for 0 to %d", args->n_cells, shape.max_cells);
    }
    if (!args->q) return fail(PA_BAD_ARGUMENT, "q is null");
    if (!aligned(args->q, 4)) return fail(PA_BAD_ARGUMENT, "q does not lie at a multiple of 4 bytes");
    if (args->sinks && !aligned(args->sinks, 4)) {
        return fail(PA_BAD_ARGUMENT, "the sinks do not lie at a multiple of 4 bytes");
    }
    const int64_t query_row = int64_t{4} * shape.d_k;
    pa_status status = check_stride("q", "q_stride", args->q_stride, args->n_q, query_row, 4);
    if (status == PA_OK) {
        status = check_stride("q", "q_head_stride", args->q_head_stride, shape.n_head, query_row, 4);
    }
    if (status == PA_OK) status = check_rows("K", args->k, shape.k_type, shape.d_k, shape.n_kv_head, args->n_cells);
    if (status == PA_OK) status = check_rows("V", args->v, shape.v_type, shape.d_v, shape.n_kv_head, args->n_cells);
    if (status == PA_OK) status = check_mask(args->mask, args->n_q, args->n_cells);
    return status;
}

pa_status check_outputs(const pa_args &args) noexcept {
    const bool state = args.state_m || args.state_l || args.state_o;
    if (state && !(args.state_m && args.state_l && args.state_o)) {
        return fail(PA_BAD_ARGUMENT, "of state_m, state_l and state_o some are null");
    }
    if (state && args.out) return fail(PA_BAD_ARGUMENT, "both an output and a state are asked for");
    if (!state && !args.out) return fail(PA_BAD_ARGUMENT, "there is nowhere to put the result: out is null");
    if (state && args.sinks) {
        return fail(PA_BAD_ARGUMENT, "sinks join when states are finished (pa_state_finish), not before");
    }
    for (const float *to : {args.out, args.state_m, args.state_l, args.state_o}) {
        if (!aligned(to, 4)) return fail(PA_BAD_ARGUMENT, "the result does not lie at a multiple of 4 bytes");
    }
    return PA_OK;
}

} // namespace paged_attn
