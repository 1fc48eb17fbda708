// The only file here that knows both ggml and paged_attn: it translates tensors into shapes and addresses, and ggml's thread pool into
// a team. No state but what was said.
//
// A place (docs/exact.md) is the index of a cell: no positions are given. Where each slot has cells of its own, as in Ollama, a cell's
// index is its position. Several slots in one batch are streams, of which each has its own K, V and mask.
#include "exactattn.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "paged_attn/cpu/core.h"
#include "paged_attn/order.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>

namespace kernel = paged_attn::cpu::kernel;

#define EXACTATTN_QUOTED(text) #text
#define EXACTATTN_NAME(macro) EXACTATTN_QUOTED(macro)

namespace {

constexpr size_t scratch_alignment = 64; // bytes, what paged_attn asks for; ggml promises less

// --- what was said -----------------------------------------------------------------------------------------------------

constexpr int most_reasons = 8;
std::atomic<const char *> told[most_reasons]; // reasons are literals: an address is an identity
std::atomic<bool> told_exact;

void tell_exact() {
    if (!told_exact.exchange(true, std::memory_order_relaxed)) {
        GGML_LOG_INFO("attention on the CPU is %s\n", exactattn_state());
    }
}

void tell(const char * why, const ggml_tensor * dst) {
    for (auto & slot : told) {
        const char * known = nullptr;
        if (slot.compare_exchange_strong(known, why)) {
            const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2];
            GGML_LOG_WARN("attention on the CPU is stock where %s (head size %d/%d, heads %d/%d, K %s, V %s)\n",
                          why, (int) k->ne[0], (int) v->ne[0], (int) q->ne[2], (int) k->ne[2], ggml_type_name(k->type),
                          ggml_type_name(v->type));
            return;
        }
        if (known == why) {
            return;
        }
    }
}

// --- tensors -> shape and addresses --------------------------------------------------------------------------------------

bool dtype_of(ggml_type type, pa_dtype & dtype) {
    switch (type) {
        case GGML_TYPE_F32:  dtype = PA_F32;  return true;
        case GGML_TYPE_F16:  dtype = PA_F16;  return true;
        case GGML_TYPE_BF16: dtype = PA_BF16; return true;
        case GGML_TYPE_Q8_0: dtype = PA_Q8_0; return true;
        case GGML_TYPE_Q4_0: dtype = PA_Q4_0; return true;
        default: return false;
    }
}

float param(const ggml_tensor * dst, int index) {
    float value;
    std::memcpy(&value, dst->op_params + index, sizeof value);
    return value;
}

bool has_dense_rows(const ggml_tensor * t) { return t->nb[0] == ggml_type_size(t->type); }

// Null, or why the stock kernel has to run. Looks at types and shapes only: the answer is the same when a graph is planned and when it
// is computed.
const char * describe(const ggml_tensor * dst, pa_shape & shape) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3], * sinks = dst->src[4];
    shape = {};
    if (q->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32) {
        return "queries or output are not f32";
    }
    if (!dtype_of(k->type, shape.k_type) || !dtype_of(v->type, shape.v_type)) {
        return "the data type of K or V is not served";
    }
    if (k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3]) {
        return "queries of several streams share K and V";
    }
    if (k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2] != 0) {
        return "heads of K and V differ in number";
    }
    if (k->ne[0] != q->ne[0] || v->ne[1] != k->ne[1]) {
        return "shapes of Q, K and V disagree";
    }
    if (param(dst, 1) != 0.0f) {
        return "the mask has a slope (ALiBi)";
    }
    if (!has_dense_rows(q) || !has_dense_rows(k) || !has_dense_rows(v) || !ggml_is_contiguous(dst)) {
        return "rows are not dense";
    }
    if (mask != nullptr && (mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || mask->nb[0] != sizeof(ggml_fp16_t) ||
                            mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1] || (mask->ne[3] != 1 && mask->ne[3] != q->ne[3]))) {
        return "the mask is not one f16 matrix for all heads";
    }
    if (sinks != nullptr && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks) || ggml_nelements(sinks) != q->ne[2])) {
        return "sinks are not one f32 a head";
    }
    if (q->ne[1] > std::numeric_limits<int32_t>::max() || k->ne[1] > std::numeric_limits<int32_t>::max()) {
        return "it is too long";
    }
    shape.n_head    = (int32_t) q->ne[2];
    shape.n_kv_head = (int32_t) k->ne[2];
    shape.d_k       = (int32_t) k->ne[0];
    shape.d_v       = (int32_t) v->ne[0];
    shape.max_q     = (int32_t) q->ne[1];
    shape.max_cells = (int32_t) k->ne[1];
    shape.scale     = param(dst, 0);
    shape.softcap   = param(dst, 2);
    return kernel::unsupported(shape);
}

// One page: K and V of a stream are one matrix of cells, whatever its strides.
pa_rows rows_of(const ggml_tensor * t, const void * const * page) {
    return { page, 1, (int32_t) t->ne[1], (int64_t) t->nb[1], (int64_t) t->nb[2] };
}

const char * at_stream(const ggml_tensor * t, int64_t stream) { return static_cast<const char *>(t->data) + stream*t->nb[3]; }

// --- the team ------------------------------------------------------------------------------------------------------------

ggml_threadpool * pool(void * self) { return static_cast<ggml_threadpool *>(self); }
void meet(void * self) { ggml_barrier(pool(self)); }
void restart(void * self) { ggml_threadpool_chunk_set(pool(self), 0); }
int take(void * self) { return ggml_threadpool_chunk_add(pool(self), 1); }

void compute_stream(const ggml_tensor * dst, const pa_shape & shape, int64_t stream, void * scratch, const paged_attn::cpu::Team & team) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3], * sinks = dst->src[4];
    const void * k_page = at_stream(k, stream);
    const void * v_page = at_stream(v, stream);
    pa_args args = {};
    args.n_q           = shape.max_q;
    args.n_cells       = shape.max_cells;
    args.q             = reinterpret_cast<const float *>(at_stream(q, stream));
    args.q_stride      = (int64_t) q->nb[1];
    args.q_head_stride = (int64_t) q->nb[2];
    args.k             = rows_of(k, &k_page);
    args.v             = rows_of(v, &v_page);
    if (mask != nullptr) {
        args.mask.dense        = reinterpret_cast<const uint16_t *>(at_stream(mask, stream % mask->ne[3]));
        args.mask.dense_stride = (int64_t) mask->nb[1];
    }
    args.sinks = sinks != nullptr ? static_cast<const float *>(sinks->data) : nullptr;
    args.out   = reinterpret_cast<float *>(static_cast<char *>(dst->data) + stream*dst->nb[3]);
    kernel::run(shape, args, scratch, team);
}

} // namespace

size_t exactattn_work_size(const ggml_tensor * dst, int n_tasks) {
    pa_shape shape;
    return describe(dst, shape) != nullptr ? 0 : kernel::scratch_bytes(shape, n_tasks) + scratch_alignment;
}

bool exactattn_compute(const ggml_compute_params * params, ggml_tensor * dst) {
    if (params->use_ref) { // a reference implementation was asked for
        return false;
    }
    pa_shape shape;
    const char * why = describe(dst, shape);
    if (why == nullptr && params->wsize < kernel::scratch_bytes(shape, params->nth) + scratch_alignment) {
        why = "the graph was planned without work memory for it";
    }
    if (params->ith == 0) {
        why != nullptr ? tell(why, dst) : tell_exact();
    }
    if (why != nullptr) {
        return false;
    }
    const auto at = reinterpret_cast<uintptr_t>(params->wdata);
    void * scratch = reinterpret_cast<void *>((at + scratch_alignment - 1) & ~(uintptr_t) (scratch_alignment - 1));
    const paged_attn::cpu::Team team = { params->ith, params->nth, params->threadpool, meet, restart, take };
    for (int64_t stream = 0; stream < dst->src[0]->ne[3]; ++stream) { // run() ends with a barrier: they may share the scratch memory
        compute_stream(dst, shape, stream, scratch, team);
    }
    return true;
}

bool exactattn_multiplies_one_column(int weights) {
    return weights == GGML_TYPE_F16 || weights == GGML_TYPE_F32 || weights == GGML_TYPE_BF16;
}

const char * exactattn_state(void) {
    static char text[64];
    static const int length = std::snprintf(text, sizeof text, "exact %d (%s)", paged_attn::kExactVersion, EXACTATTN_NAME(PA_ISA));
    return length > 0 ? text : "exact";
}
