// The only file that knows both ggml and paged_attn: it translates tensors into shapes and addresses, and ggml's thread
// pool into a team. No state but the setting and what was said.
#include "kvtier-attn.h"
#include "kvtier-attn-headers.h" // Go hashes no header in a subdirectory: this one changes with each of paged_attn's

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "paged_attn/cpu/core.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

namespace kernel = paged_attn::cpu::kernel;

#define KVTIER_QUOTED(text) #text
#define KVTIER_NAME(macro) KVTIER_QUOTED(macro)

namespace {

constexpr size_t SCRATCH_ALIGNMENT = 64; // bytes, what paged_attn asks for; ggml promises less

// As Ollama reads its own variables: spaces and quotes around the value do not count. Other values than "exact" and
// "stock" are named by the server (llm/kvtier_attention.go), where they are read once and not by each runner.
bool is_exact() {
    static const bool exact = [] {
        const char * value = std::getenv("OLLAMA_CPU_ATTENTION");
        std::string text = value ? value : "";
        const char * around = " \t\r\n\"'";
        const size_t first = text.find_first_not_of(around);
        return first != std::string::npos && text.substr(first, text.find_last_not_of(around) - first + 1) == "exact";
    }();
    return exact;
}

// --- what was said -----------------------------------------------------------------------------------------------------

constexpr int MAX_REASONS = 8;
std::atomic<const char *> told[MAX_REASONS]; // reasons are literals: an address is an identity
std::atomic<const char *> last_reason{nullptr};
std::atomic<uint64_t> refused{0};

void tell_exact() {
    static std::atomic<bool> said{false};
    if (!said.exchange(true, std::memory_order_relaxed)) {
        GGML_LOG_INFO("kv tiering: attention on the CPU is exact (%s)\n", KVTIER_NAME(PA_ISA));
    }
}

void tell(const char * why, const ggml_tensor * dst) {
    last_reason.store(why, std::memory_order_relaxed);
    if (dst->src[KVTIER_ATTN_POSITIONS]) {
        refused.fetch_add(1, std::memory_order_relaxed);
    }
    for (auto & slot : told) {
        const char * known = nullptr;
        if (slot.compare_exchange_strong(known, why)) {
            const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2];
            GGML_LOG_WARN("kv tiering: attention on the CPU is stock where %s (head size %d/%d, heads %d/%d, K %s, V %s)\n",
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
    std::memcpy(&value, dst->op_params + index, sizeof(value));
    return value;
}

bool has_dense_rows(const ggml_tensor * t) { return t->nb[0] == ggml_type_size(t->type); }

// Null, or why the stock kernel has to run. Looks at types and shapes only: the answer is the same when a graph is
// planned and when it is computed.
const char * describe(const ggml_tensor * dst, pa_shape & shape) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3], * sinks = dst->src[4];
    shape = {};
    if (q->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32) return "queries or output are not f32";
    if (!dtype_of(k->type, shape.k_type) || !dtype_of(v->type, shape.v_type)) return "the data type of K or V is not served";
    if (q->ne[3] != 1 || k->ne[3] != 1 || v->ne[3] != 1) return "several streams are in one operation";
    if (k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2] != 0) return "heads of K and V differ in number";
    if (k->ne[0] != q->ne[0] || v->ne[1] != k->ne[1]) return "shapes of Q, K and V disagree";
    if (param(dst, 1) != 0.0f) return "the mask has a slope (ALiBi)";
    if (!has_dense_rows(q) || !has_dense_rows(k) || !has_dense_rows(v) || !ggml_is_contiguous(dst)) return "rows are not dense";
    if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || mask->ne[3] != 1 || mask->nb[0] != sizeof(ggml_fp16_t) ||
                 mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1])) {
        return "the mask is not one f16 matrix for all heads";
    }
    if (sinks && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks) || ggml_nelements(sinks) != q->ne[2])) {
        return "sinks are not one f32 a head";
    }
    const ggml_tensor * positions = dst->src[KVTIER_ATTN_POSITIONS];
    if (positions && (!mask || positions->type != GGML_TYPE_I32 || !ggml_is_contiguous(positions) ||
                      ggml_nelements(positions) < k->ne[1])) {
        return "positions are not one number a cell, beside a mask";
    }
    if (q->ne[1] > std::numeric_limits<int32_t>::max() || k->ne[1] > std::numeric_limits<int32_t>::max()) return "it is too long";
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

// One page: ggml's K and V are one matrix of cells, whatever its strides.
pa_rows rows_of(const ggml_tensor * t, const void * const * page) {
    return {page, 1, (int32_t) t->ne[1], (int64_t) t->nb[1], (int64_t) t->nb[2]};
}

// --- the team ------------------------------------------------------------------------------------------------------------

ggml_threadpool * pool(void * self) { return static_cast<ggml_threadpool *>(self); }
void meet(void * self) { ggml_barrier(pool(self)); }
void restart(void * self) { ggml_threadpool_chunk_set(pool(self), 0); }
int take(void * self) { return ggml_threadpool_chunk_add(pool(self), 1); }

} // namespace

size_t kvtier_attn_work_size(const ggml_tensor * dst, int n_tasks) {
    pa_shape shape;
    if (!is_exact() || describe(dst, shape)) {
        return 0;
    }
    return kernel::scratch_bytes(shape, n_tasks) + SCRATCH_ALIGNMENT;
}

bool kvtier_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    if (!is_exact()) {
        return false;
    }
    pa_shape shape;
    const char * why = describe(dst, shape);
    if (!why && params->wsize < kernel::scratch_bytes(shape, params->nth) + SCRATCH_ALIGNMENT) {
        why = "the graph was planned without work memory for it";
    }
    if (why) {
        if (params->ith == 0) {
            tell(why, dst);
        }
        return false;
    }
    if (params->ith == 0) {
        tell_exact();
    }
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3], * sinks = dst->src[4];
    const void * k_page = k->data;
    const void * v_page = v->data;
    pa_args args = {};
    args.n_q           = shape.max_q;
    args.n_cells       = shape.max_cells;
    args.q             = static_cast<const float *>(q->data);
    args.q_stride      = (int64_t) q->nb[1];
    args.q_head_stride = (int64_t) q->nb[2];
    args.k             = rows_of(k, &k_page);
    args.v             = rows_of(v, &v_page);
    if (mask) {
        args.mask.dense        = static_cast<const uint16_t *>(mask->data);
        args.mask.dense_stride = (int64_t) mask->nb[1];
    }
    if (dst->src[KVTIER_ATTN_POSITIONS]) { // beside a mask
        args.mask.cell_pos = static_cast<const int32_t *>(dst->src[KVTIER_ATTN_POSITIONS]->data);
    }
    args.sinks = sinks ? static_cast<const float *>(sinks->data) : nullptr;
    args.out   = static_cast<float *>(dst->data);

    const auto at = reinterpret_cast<uintptr_t>(params->wdata);
    void * scratch = reinterpret_cast<void *>((at + SCRATCH_ALIGNMENT - 1) & ~(uintptr_t) (SCRATCH_ALIGNMENT - 1));
    const paged_attn::cpu::Team team = {params->ith, params->nth, params->threadpool, meet, restart, take};
    kernel::run(shape, args, scratch, team);
    return true;
}

int kvtier_attn_fewest_columns(int weights) {
    const bool plain = weights == GGML_TYPE_F16 || weights == GGML_TYPE_F32 || weights == GGML_TYPE_BF16;
    return plain && is_exact() ? 1 : 2;
}

uint64_t kvtier_attn_refused(void) { return refused.load(std::memory_order_relaxed); }

void * kvtier_attn_function(const char * name) {
    if (std::strcmp(name, "kvtier_attn_state") == 0) {
        return reinterpret_cast<void *>(kvtier_attn_state);
    }
    return std::strcmp(name, "kvtier_attn_refused") == 0 ? reinterpret_cast<void *>(kvtier_attn_refused) : nullptr;
}

const char * kvtier_attn_state(void) {
    if (!is_exact()) {
        return "stock";
    }
    static thread_local char text[160];
    const char * why = last_reason.load(std::memory_order_relaxed);
    std::snprintf(text, sizeof(text), "exact (%s)%s%s", KVTIER_NAME(PA_ISA), why ? ", but stock where " : "", why ? why : "");
    return text;
}
