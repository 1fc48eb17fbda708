#include "exact.h"

#include "../cuda/host/device.h"
#include "../cuda/problem.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace shim {

namespace {

using namespace paged_attn::gpu;

// Queries whose partial states a plan holds at the least, twice: the number of splits of a run must follow from the run
// alone, not from how large a batch may be.
constexpr int kQueries = 512, kSlots = 2;
constexpr int kMostHeadDim = 128; // longer heads have a limit of cells for each split

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

// What a plan takes on the device (csrc/cuda/host/plan.cpp).
size_t bytes_of(const pa_shape &s) {
    const size_t state = static_cast<size_t>(s.max_q) * s.n_head * (s.d_v + 2);
    return kSlots * divide_up(state, 4) * 4 * sizeof(float) +
           divide_up(static_cast<size_t>(s.max_cells), kBoundsCells) * sizeof(CellBounds);
}

bool same_attention(const pa_shape &a, const pa_shape &b) {
    return a.n_head == b.n_head && a.n_kv_head == b.n_kv_head && a.d_k == b.d_k && a.d_v == b.d_v && a.scale == b.scale &&
           a.softcap == b.softcap;
}

// Rows of 16 bytes' multiples, in f16.
bool fits(const ggml_tensor *rows) {
    return rows->type == GGML_TYPE_F16 && rows->nb[0] == 2 && rows->nb[1] % 16 == 0 && rows->nb[2] % 16 == 0 &&
           rows->view_offs % 16 == 0;
}

enum Parameter { scale, max_bias, softcap };
float parameter(const ggml_tensor *node, Parameter which) {
    float value;
    std::memcpy(&value, &node->op_params[which], sizeof value);
    return value;
}

const char *declined(const ggml_tensor *node) {
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3], *sinks = node->src[4];
    if (k->type != GGML_TYPE_F16 || v->type != GGML_TYPE_F16) return "K/V are not f16";
    if (!fits(k) || !fits(v)) return "rows of K/V are not multiples of 16 bytes";
    if (k->ne[0] % 16 || v->ne[0] % 16 || k->ne[0] > kMostHeadDim || v->ne[0] > kMostHeadDim)
        return "heads of another size than a multiple of 16 up to 128";
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

std::string image_of(const Engine &engine, const pa_shape &shape) {
    // query heads of one decode block: those of a K/V head, at most 8, spread evenly (known_models.py)
    const size_t group = static_cast<size_t>(shape.n_head / shape.n_kv_head);
    const size_t rows = divide_up(group, divide_up(group, 8));
    return "sm_" + std::to_string(engine.arch) + "-" + std::to_string(shape.d_k) + "x" + std::to_string(shape.d_v) +
           "-f16-f16-rows" + std::to_string(rows) + "-align16.cubin";
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
    s.k_type = s.v_type = PA_F16;
    s.scale = parameter(node, scale);
    s.softcap = parameter(node, softcap);
    a.image = image_of(device.engine, s);
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

Exact::~Exact() {
    reset();
    for (ggml_backend_event_t event : {before_, after_}) {
        if (event) event->device->iface.event_free(event->device, event);
    }
    if (!gpu_) return;
    {
        const Current current(*gpu_);
        if (stream_) gpu_->driver.cuStreamDestroy_v2(stream_);
        if (pages_) gpu_->driver.cuMemFree_v2(pages_);
    }
    pa_cuda_close(gpu_);
}

bool Exact::takes(const ggml_tensor *node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
    const Attention attention = attention_of(device_, node);
    if (!attention.declined) return true;
    const std::string what = attention.image.empty() ? attention.declined : attention.declined + (": " + attention.image);
    if (declined_.insert(what).second) {
        GGML_LOG_WARN("paged attention: OLLAMA_PAGED_ENGINE=exact does not serve some attention, which the stock library "
                      "computes: %s\n",
                      what.c_str());
    }
    return false;
}

void Exact::note(const ggml_tensor *node) {
    pa_shape shape = attention_of(device_, node).shape;
    shape.max_q = std::max(shape.max_q, kQueries);
    Plan *plan = plan_of(shape);
    if (!plan) {
        plans_.push_back({shape, nullptr, {}});
        return;
    }
    plan->shape.max_q = std::max(plan->shape.max_q, shape.max_q);
    plan->shape.max_cells = std::max(plan->shape.max_cells, shape.max_cells);
}

Exact::Plan *Exact::plan_of(const pa_shape &shape) {
    const auto same = [&](const Plan &plan) { return same_attention(plan.shape, shape); };
    const auto found = std::find_if(plans_.begin(), plans_.end(), same);
    return found == plans_.end() ? nullptr : &*found;
}

size_t Exact::bytes() const {
    size_t sum = 0;
    for (const Plan &plan : plans_) sum += bytes_of(plan.shape);
    return sum;
}

bool Exact::provide() {
    for (Plan &plan : plans_) {
        const bool has = plan.made && plan.made_for.max_q >= plan.shape.max_q &&
                         plan.made_for.max_cells >= plan.shape.max_cells;
        if (!has && !said(make(plan))) return false;
    }
    return true;
}

void Exact::reset() {
    if (stream_) said(pa_cuda_synchronize(gpu_, stream_));
    for (Plan &plan : plans_) pa_cuda_plan_destroy(plan.made);
    plans_.clear();
}

ggml_status Exact::attend(const ggml_tensor *node, const void *k, const void *v) {
    return said(queue(node, k, v)) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

bool Exact::said(pa_status status) const {
    if (status == PA_OK) return true;
    GGML_LOG_ERROR("paged attention: OLLAMA_PAGED_ENGINE=exact failed on %s: %s\n",
                   device_.inner->iface.get_name(device_.inner), pa_cuda_last_error());
    return false;
}

// The GPU of this number is the same for the driver and for GGML: both number those that CUDA_VISIBLE_DEVICES lets through.
pa_status Exact::open() {
    if (gpu_) return PA_OK;
    pa_cuda_device *opened = nullptr;
    PA_TRY(pa_cuda_open(device_.ordinal, &opened));
    gpu_ = opened;
    const Current current(*gpu_);
    PA_TRY(current.status());
    PA_TRY(PA_CALL(gpu_->driver, cuStreamCreate, &stream_, kCuStreamNonBlocking));
    PA_TRY(PA_CALL(gpu_->driver, cuMemAlloc_v2, &pages_, 2 * sizeof(void *)));
    ggml_backend_dev_t device = device_.inner;
    if (!device->iface.event_new || !compute_->iface.event_record || !compute_->iface.event_wait) return PA_OK;
    before_ = device->iface.event_new(device);
    after_ = before_ ? device->iface.event_new(device) : nullptr;
    return PA_OK;
}

pa_status Exact::make(Plan &plan) {
    PA_TRY(open());
    if (plan.made) { // it may be in use
        PA_TRY(pa_cuda_synchronize(gpu_, stream_));
        pa_cuda_plan_destroy(plan.made);
        plan.made = nullptr;
    }
    const std::string image = read_image(device_.engine, image_of(device_.engine, plan.shape));
    PA_TRY(pa_cuda_plan_create(gpu_, &plan.shape, kSlots, image.data(), image.size(), &plan.made));
    plan.made_for = plan.shape;
    return PA_OK;
}

pa_status Exact::queue(const ggml_tensor *node, const void *k, const void *v) {
    Attention attention = attention_of(device_, node);
    const Plan *plan = plan_of(attention.shape);
    if (!plan || !plan->made) return fail(PA_BAD_ARGUMENT, "attention that no memory was taken for");
    pa_args &args = attention.args;
    const int32_t most = std::max(kSlots, kSlots * kQueries / args.n_q);
    const int32_t n_splits = pa_cuda_splits(plan->made, args.n_q, args.n_cells, most);
    const void *addresses[2] = {k, v};
    PA_TRY(follow());
    {
        const Current current(*gpu_);
        PA_TRY(current.status());
        // the driver takes what is not pinned at once; the kernels before this copy have read what it replaces
        PA_TRY(PA_CALL(gpu_->driver, cuMemcpyHtoDAsync_v2, pages_, addresses, sizeof addresses, stream_));
    }
    args.k.pages = reinterpret_cast<const void *const *>(pages_);
    args.v.pages = args.k.pages + 1;
    PA_TRY(pa_cuda_attend(plan->made, &args, 0, n_splits, 0, stream_));
    PA_TRY(pa_cuda_combine(plan->made, args.n_q, n_splits, args.sinks, args.out, stream_));
    return lead();
}

pa_status Exact::follow() {
    if (!after_) { // slow, and right
        wait_for(compute_);
        return PA_OK;
    }
    compute_->iface.event_record(compute_, before_);
    const Current current(*gpu_);
    PA_TRY(current.status());
    return PA_CALL(gpu_->driver, cuStreamWaitEvent, stream_, before_->context, 0); // a CUDA event, of either interface
}

pa_status Exact::lead() {
    if (!after_) return pa_cuda_synchronize(gpu_, stream_);
    {
        const Current current(*gpu_);
        PA_TRY(current.status());
        PA_TRY(PA_CALL(gpu_->driver, cuEventRecord, after_->context, stream_));
    }
    compute_->iface.event_wait(compute_, after_);
    return PA_OK;
}

} // namespace shim
