#include "exact.h"

#include "../cuda/host/device.h"

#include <algorithm>

namespace shim {

namespace {

using namespace paged_attn::gpu;

bool same_heads(const pa_shape &a, const pa_shape &b) {
    return a.n_head == b.n_head && a.n_kv_head == b.n_kv_head && a.scale == b.scale && a.softcap == b.softcap;
}

} // namespace

Exact::~Exact() {
    reset();
    for (ggml_backend_event_t event : {before_, after_}) {
        if (event) event->device->iface.event_free(event->device, event);
    }
    close();
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
    const Attention attention = attention_of(device_, node);
    pa_shape shape = attention.shape;
    shape.max_q = std::max(shape.max_q, kQueries);
    Plan *plan = plan_of(attention);
    if (!plan) {
        plans_.push_back({shape, attention.image, nullptr, {}});
        return;
    }
    plan->shape.max_q = std::max(plan->shape.max_q, shape.max_q);
    plan->shape.max_cells = std::max(plan->shape.max_cells, shape.max_cells);
}

Exact::Plan *Exact::plan_of(const Attention &attention) {
    const auto same = [&](const Plan &plan) {
        return plan.image == attention.image && same_heads(plan.shape, attention.shape);
    };
    const auto found = std::find_if(plans_.begin(), plans_.end(), same);
    return found == plans_.end() ? nullptr : &*found;
}

size_t Exact::bytes() const {
    size_t sum = 0;
    for (const Plan &plan : plans_) sum += plan_bytes(plan.shape);
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

ggml_status Exact::told(pa_status status) const { return said(status) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED; }

bool Exact::said(pa_status status) const {
    if (status == PA_OK) return true;
    GGML_LOG_ERROR("paged attention: OLLAMA_PAGED_ENGINE=exact failed on %s: %s\n",
                   device_.inner->iface.get_name(device_.inner), pa_cuda_last_error());
    return false;
}

// The GPU of this number is the same for the driver and for GGML: both number those that CUDA_VISIBLE_DEVICES lets through.
pa_status Exact::open() {
    if (gpu_) return PA_OK;
    const pa_status status = try_open();
    if (status) close(); // half of it would pass for all: kernels in the default stream, addresses at null
    return status;
}

pa_status Exact::try_open() {
    PA_TRY(pa_cuda_open(device_.ordinal, &gpu_));
    const Current current(*gpu_);
    PA_TRY(current.status());
    PA_TRY(PA_CALL(gpu_->driver, cuStreamCreate, &stream_, kCuStreamNonBlocking));
    PA_TRY(places_.open(gpu_));
    ggml_backend_dev_t device = device_.inner;
    if (!device->iface.event_new || !compute_->iface.event_record || !compute_->iface.event_wait) return PA_OK;
    before_ = device->iface.event_new(device);
    after_ = before_ ? device->iface.event_new(device) : nullptr;
    return PA_OK;
}

void Exact::close() {
    if (!gpu_) return;
    {
        const Current current(*gpu_);
        if (stream_) gpu_->driver.cuStreamDestroy_v2(stream_);
        places_.close();
    }
    stream_ = nullptr;
    pa_cuda_close(gpu_);
    gpu_ = nullptr;
}

pa_status Exact::make(Plan &plan) {
    PA_TRY(open());
    if (plan.made) { // it may be in use
        PA_TRY(pa_cuda_synchronize(gpu_, stream_));
        pa_cuda_plan_destroy(plan.made);
        plan.made = nullptr;
    }
    const std::string &image = device_.engine.images.at(plan.image);
    PA_TRY(pa_cuda_plan_create(gpu_, &plan.shape, kStates, image.data(), image.size(), &plan.made));
    PA_TRY(limit_splits(plan.made));
    plan.made_for = plan.shape;
    return PA_OK;
}

pa_status Exact::find_run(const ggml_tensor *node, Run &run) {
    run.attention = attention_of(device_, node);
    const Plan *plan = plan_of(run.attention);
    if (!plan || !plan->made) return fail(PA_BAD_ARGUMENT, "attention that no memory was taken for");
    run.plan = plan->made;
    run.cut = cut_of(run.plan, run.attention.shape, run.attention.args.n_q, run.attention.args.n_cells);
    return PA_OK;
}

pa_status Exact::queue(const ggml_tensor *node, const void *k, const void *v) {
    PA_TRY(find_run(node, run_));
    PA_TRY(queue_follow());
    const pa_args &args = run_.attention.args;
    const size_t n_cells = static_cast<size_t>(args.n_cells);
    for (const Piece &piece : pieces_of(run_.cut, n_cells, {n_cells, 0, 0})) { // a round each
        const auto from = [&piece](const void *rows, const pa_rows &lie) {
            return static_cast<const char *>(rows) + piece.first_cell * static_cast<size_t>(lie.cell_stride);
        };
        PA_TRY(launch(piece, from(k, args.k), from(v, args.v)));
    }
    PA_TRY(combine());
    return queue_lead();
}

// What is summed does not depend on how a round is cut into pieces: each of its splits has the cells that it has in the
// whole round, because the ones that are a unit longer come first in both (split_range of csrc/cuda/visible.cuh).
pa_status Exact::launch(const Piece &piece, const void *k, const void *v) {
    const Current current(*gpu_);
    PA_TRY(current.status());
    pa_args part = run_.attention.args;
    part.n_cells = static_cast<int32_t>(piece.end_cell - piece.first_cell);
    if (part.mask.dense) part.mask.dense += piece.first_cell;
    PA_TRY(places_.find(k, v, stream_, &part.k.pages));
    part.v.pages = part.k.pages + 1;
    return pa_cuda_attend(run_.plan, &part, piece.first_split, piece.n_splits, piece.round > 0, stream_);
}

pa_status Exact::combine() {
    const pa_args &args = run_.attention.args;
    return pa_cuda_combine(run_.plan, args.n_q, run_.cut.n_splits, args.sinks, args.out, stream_);
}

pa_status Exact::queue_follow() {
    if (!after_) { // slow, and right
        wait_for(compute_);
        return PA_OK;
    }
    compute_->iface.event_record(compute_, before_);
    const Current current(*gpu_);
    PA_TRY(current.status());
    return PA_CALL(gpu_->driver, cuStreamWaitEvent, stream_, before_->context, 0); // a CUDA event, of either interface
}

pa_status Exact::queue_lead() {
    if (!after_) return pa_cuda_synchronize(gpu_, stream_);
    {
        const Current current(*gpu_);
        PA_TRY(current.status());
        PA_TRY(PA_CALL(gpu_->driver, cuEventRecord, after_->context, stream_));
    }
    compute_->iface.event_wait(compute_, after_);
    return PA_OK;
}

// --- one call each, and what fails is said

ggml_status Exact::attend(const ggml_tensor *node, const void *k, const void *v) { return told(queue(node, k, v)); }

Cut Exact::cut(const ggml_tensor *node) {
    Run run;
    GGML_ASSERT(said(find_run(node, run)));
    return run.cut;
}

ggml_status Exact::begin(const ggml_tensor *node) {
    const ggml_status found = told(find_run(node, run_));
    return found ? found : follow();
}

ggml_status Exact::attend(const Piece &piece, const void *k, const void *v) { return told(launch(piece, k, v)); }

ggml_status Exact::end() {
    const ggml_status combined = told(combine());
    return combined ? combined : lead();
}

ggml_status Exact::follow() { return told(queue_follow()); }

ggml_status Exact::lead() { return told(queue_lead()); }

ggml_status Exact::wait(ggml_backend_event_t event) {
    const Current current(*gpu_);
    return told(current.status() ? current.status() : PA_CALL(gpu_->driver, cuStreamWaitEvent, stream_, event->context, 0));
}

ggml_status Exact::record(ggml_backend_event_t event) {
    const Current current(*gpu_);
    return told(current.status() ? current.status() : PA_CALL(gpu_->driver, cuEventRecord, event->context, stream_));
}

} // namespace shim
