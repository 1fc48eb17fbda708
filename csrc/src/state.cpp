// pa_state_*: the algebra of attn_state.h on arrays.
#include "paged_attn/attn_state.h"
#include "src/status.h"

using paged_attn::fail;

pa_status pa_state_merge(int64_t n, int32_t d_v, float *a_m, float *a_l, float *a_o, const float *b_m,
                         const float *b_l, const float *b_o) {
    if (n < 0 || d_v <= 0) {
        return fail(PA_BAD_ARGUMENT, "%lld states of %d values", static_cast<long long>(n), d_v);
    }
    if (n == 0) return PA_OK;
    if (!a_m || !a_l || !a_o || !b_m || !b_l || !b_o) {
        return fail(PA_BAD_ARGUMENT, "a part of a state is null");
    }
    for (int64_t i = 0; i < n; i++) {
        paged_attn::merge(a_m[i], a_l[i], a_o + i * d_v, b_m[i], b_l[i], b_o + i * d_v, d_v);
    }
    return PA_OK;
}

pa_status pa_state_finish(int64_t n, int32_t d_v, const float *m, const float *l, const float *o, const float *sinks,
                          float *out) {
    if (n < 0 || d_v <= 0) {
        return fail(PA_BAD_ARGUMENT, "%lld states of %d values", static_cast<long long>(n), d_v);
    }
    if (n == 0) return PA_OK;
    if (!m || !l || !o || !out) return fail(PA_BAD_ARGUMENT, "a part of the state, or the output, is null");
    for (int64_t i = 0; i < n; i++) {
        float factor = 1.0f, its_l = l[i];
        if (sinks) paged_attn::merge_sink(factor, its_l, m[i], sinks[i]);
        factor *= paged_attn::inverse_or_zero(its_l);
        for (int32_t c = 0; c < d_v; c++) out[i * d_v + c] = o[i * d_v + c] * factor;
    }
    return PA_OK;
}
