// Which attention csrc's kernels serve, and how an operation is told to them.
#include "exact.h"

#include "../cuda/problem.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace shim {

namespace {

using namespace paged_attn::gpu;

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

struct RowType {
    ggml_type stored;
    pa_dtype told;
    const char *name; // as files of kernels have it
};
constexpr RowType kRowTypes[] = {{GGML_TYPE_F16, PA_F16, "f16"},
                                 {GGML_TYPE_BF16, PA_BF16, "bf16"},
                                 {GGML_TYPE_Q8_0, PA_Q8_0, "q8_0"},
                                 {GGML_TYPE_Q4_0, PA_Q4_0, "q4_0"}};

const RowType *row_type(const ggml_tensor *rows) { // null: none of those
    const auto same = [rows](const RowType &type) { return type.stored == rows->type; };
    const auto found = std::find_if(std::begin(kRowTypes), std::end(kRowTypes), same);
    return found == std::end(kRowTypes) ? nullptr : found;
}

// What all rows begin at multiples of, in the bytes that there are kernels for: 16 of plain values; of blocks 4, where a
// row has an even number of them, and 2 else. 0: none of these, or values with gaps.
int alignment(const ggml_tensor *rows) {
    if (rows->nb[0] != ggml_type_size(rows->type)) return 0;
    const size_t all = rows->nb[1] | rows->nb[2] | rows->view_offs | ggml_row_size(rows->type, rows->ne[0]);
    if (!ggml_is_quantized(rows->type)) return all % 16 ? 0 : 16;
    return all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 0;
}

enum Parameter { scale, max_bias, softcap };
float parameter(const ggml_tensor *node, Parameter which) {
    float value;
    std::memcpy(&value, &node->op_params[which], sizeof value);
    return value;
}

const char *declined(const ggml_tensor *node) {
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3], *sinks = node->src[4];
    if (!row_type(k) || !row_type(v)) return "K/V are not f16, bf16, q8_0 or q4_0";
    if (!alignment(k) || !alignment(v)) return "rows of K/V have gaps, or are not multiples of 16 bytes";
    if (k->ne[0] % 16 || v->ne[0] % 16) return "heads of another size than a multiple of 16";
    if (q->type != GGML_TYPE_F32 || q->nb[0] != 4 || node->type != GGML_TYPE_F32 || !ggml_is_contiguous(node))
        return "queries or results are not f32";
    if (q->ne[3] != 1 || k->ne[3] != 1 || q->ne[2] % k->ne[2] || k->ne[2] != v->ne[2] || k->ne[1] != v->ne[1])
        return "several sequences apart, or heads that are no groups";
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[2] != 1 || mask->ne[3] != 1 ||
                 mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1]))
        return "a mask that is not f16, or not the same for all heads";
    if (sinks && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks))) return "sinks that are not f32";
    return parameter(node, max_bias) != 0.0f ? "ALiBi" : nullptr;
}

// The file's name (ollama_tiering/kernels/images.py).
std::string image_of(const Engine &engine, const pa_shape &shape, const ggml_tensor *k, const ggml_tensor *v) {
    // query heads of one decode block: those of a K/V head, at most 8, spread evenly (known_models.py)
    const size_t group = static_cast<size_t>(shape.n_head / shape.n_kv_head);
    const size_t rows = divide_up(group, divide_up(group, 8));
    return "sm_" + std::to_string(engine.arch) + "-" + std::to_string(shape.d_k) + "x" + std::to_string(shape.d_v) + "-" +
           row_type(k)->name + "-" + row_type(v)->name + "-rows" + std::to_string(rows) + "-align" +
           std::to_string(std::min(alignment(k), alignment(v))) + ".cubin";
}

int32_t cells_of(const ggml_tensor *rows) { // that there may be
    return static_cast<int32_t>(std::max<size_t>(static_cast<size_t>(rows->ne[1]), ggml_nbytes(root(rows)) / rows->nb[1]));
}

// All cells lie on one page, which is as long as it has to be for its tiles to be whole ones.
pa_rows rows_of(const ggml_tensor *rows) {
    pa_rows r = {};
    r.n_pages = 1;
    r.page_cells = static_cast<int32_t>(divide_up(static_cast<size_t>(rows->ne[1]), kSplitCells)) * kSplitCells;
    r.cell_stride = static_cast<int64_t>(rows->nb[1]);
    r.head_stride = static_cast<int64_t>(rows->nb[2]);
    return r;
}

} // namespace

bool shape_of(const std::string &image, pa_shape &shape) {
    int arch, rows, align, end = 0;
    char k[8], v[8];
    pa_shape s = {};
    const int found = std::sscanf(image.c_str(), "sm_%d-%dx%d-%7[^-]-%7[^-]-rows%d-align%d.cubin%n", &arch, &s.d_k, &s.d_v, k,
                                  v, &rows, &align, &end);
    if (found != 7 || static_cast<size_t>(end) != image.size()) return false;
    const auto type = [](const char *name, pa_dtype &told) {
        const auto same = [name](const RowType &row) { return !std::strcmp(row.name, name); };
        const auto at = std::find_if(std::begin(kRowTypes), std::end(kRowTypes), same);
        if (at != std::end(kRowTypes)) told = at->told;
        return at != std::end(kRowTypes);
    };
    if (!type(k, s.k_type) || !type(v, s.v_type)) return false;
    s.n_head = s.n_kv_head = s.max_q = 1; // the least that a plan is for
    s.max_cells = kSplitCells;
    s.scale = 1.0f;
    shape = s;
    return true;
}

Attention attention_of(const Device &device, const ggml_tensor *node) {
    Attention a;
    a.declined = declined(node);
    if (a.declined) return a;
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3], *sinks = node->src[4];
    pa_shape &s = a.shape;
    s.n_head = static_cast<int32_t>(q->ne[2]);
    s.n_kv_head = static_cast<int32_t>(k->ne[2]);
    s.d_k = static_cast<int32_t>(k->ne[0]);
    s.d_v = static_cast<int32_t>(v->ne[0]);
    s.max_q = static_cast<int32_t>(q->ne[1]);
    s.max_cells = std::max(cells_of(k), cells_of(v));
    s.k_type = row_type(k)->told;
    s.v_type = row_type(v)->told;
    s.scale = parameter(node, scale);
    s.softcap = parameter(node, softcap);
    a.image = image_of(device.engine, s, k, v);
    if (!device.engine.images.count(a.image)) a.declined = "no kernels for its heads";

    a.args.n_q = s.max_q;
    a.args.n_cells = static_cast<int32_t>(k->ne[1]);
    a.args.q = static_cast<const float *>(q->data);
    a.args.q_stride = static_cast<int64_t>(q->nb[1]);
    a.args.q_head_stride = static_cast<int64_t>(q->nb[2]);
    a.args.k = rows_of(k);
    a.args.v = rows_of(v);
    if (mask) {
        a.args.mask.dense = static_cast<const uint16_t *>(mask->data);
        a.args.mask.dense_stride = static_cast<int64_t>(mask->nb[1]);
    }
    a.args.sinks = sinks ? static_cast<const float *>(sinks->data) : nullptr;
    a.args.out = static_cast<float *>(node->data); // [queries][heads][values], as GGML has it
    return a;
}

} // namespace shim
