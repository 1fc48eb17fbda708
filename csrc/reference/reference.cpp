#include "reference/reference.h"

#include "src/check.h"
#include "src/status.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

namespace paged_attn {

namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();
constexpr int kBlock = 32; // values of q8_0 and q4_0

template <class T> T load(const uint8_t *address) {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

float from_f16(uint16_t bits) {
    const int sign = bits >> 15, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    float magnitude;
    if (exponent == 31) {
        magnitude = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    } else if (exponent == 0) {
        magnitude = std::ldexp(static_cast<float>(fraction), -24);
    } else {
        magnitude = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    }
    return sign ? -magnitude : magnitude;
}

float from_bf16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

float element(const uint8_t *row, pa_dtype type, int32_t i) {
    const int32_t block = i / kBlock, within = i % kBlock;
    switch (type) {
    case PA_F32: return load<float>(row + 4 * i);
    case PA_F16: return from_f16(load<uint16_t>(row + 2 * i));
    case PA_BF16: return from_bf16(load<uint16_t>(row + 2 * i));
    case PA_Q8_0: {
        const uint8_t *at = row + 34 * block;
        return from_f16(load<uint16_t>(at)) * static_cast<float>(load<int8_t>(at + 2 + within));
    }
    case PA_Q4_0: {
        const uint8_t *at = row + 18 * block;
        const uint8_t pair = at[2 + within % 16];
        const int nibble = within < 16 ? pair & 15 : pair >> 4;
        return from_f16(load<uint16_t>(at)) * static_cast<float>(nibble - 8);
    }
    }
    return std::numeric_limits<float>::quiet_NaN(); // check_shape lets no other type through
}

struct Head {
    std::vector<float> k, v; // [n_cells][d_k], [n_cells][d_v]
};

double logit(const pa_shape &shape, const float *q, const float *k, double bias) {
    double dot = 0.0;
    for (int32_t x = 0; x < shape.d_k; x++) dot += static_cast<double>(q[x]) * static_cast<double>(k[x]);
    dot *= static_cast<double>(shape.scale);
    const double cap = static_cast<double>(shape.softcap);
    return (cap > 0.0 ? cap * std::tanh(dot / cap) : dot) + bias;
}

// One query and one of its heads: o [d_v].
void attend(const pa_shape &shape, const pa_args &args, const Head &head, int32_t query, int32_t h, double *o) {
    const auto *q = reinterpret_cast<const float *>(reinterpret_cast<const uint8_t *>(args.q) +
                                                    query * args.q_stride + h * args.q_head_stride);
    const double sink = args.sinks ? static_cast<double>(args.sinks[h]) : kHidden;
    std::vector<double> logits(static_cast<size_t>(args.n_cells));
    double largest = sink;
    for (int32_t c = 0; c < args.n_cells; c++) {
        const double bias = mask_bias(args.mask, query, c);
        const float *k = head.k.data() + int64_t{c} * shape.d_k;
        const double s = bias == kHidden ? kHidden : logit(shape, q, k, bias);
        logits[static_cast<size_t>(c)] = s;
        largest = std::max(largest, s);
    }
    std::fill(o, o + shape.d_v, 0.0);
    if (largest == kHidden) return; // nothing is seen
    double total = std::exp(sink - largest);
    for (int32_t c = 0; c < args.n_cells; c++) {
        const double weight = std::exp(logits[static_cast<size_t>(c)] - largest);
        if (weight == 0.0) continue;
        const float *v = head.v.data() + int64_t{c} * shape.d_v;
        total += weight;
        for (int32_t x = 0; x < shape.d_v; x++) o[x] += weight * static_cast<double>(v[x]);
    }
    for (int32_t x = 0; x < shape.d_v; x++) o[x] /= total;
}

} // namespace

void dequantise(const pa_rows &rows, pa_dtype type, int32_t d, int32_t cell, int32_t head, float *values) {
    const auto *page = static_cast<const uint8_t *>(rows.pages[cell / rows.page_cells]);
    const uint8_t *row = page + cell % rows.page_cells * rows.cell_stride + head * rows.head_stride;
    for (int32_t i = 0; i < d; i++) values[i] = element(row, type, i);
}

double mask_bias(const pa_mask &mask, int32_t query, int32_t cell) {
    if (mask.dense) {
        const auto *row = reinterpret_cast<const uint8_t *>(mask.dense) + query * mask.dense_stride;
        const double bias = from_f16(load<uint16_t>(row + int64_t{2} * cell));
        return bias <= -65504.0 ? kHidden : bias;
    }
    if (!mask.cell_pos) return 0.0;
    const int64_t at = mask.cell_pos[cell], from = mask.query_pos[query];
    if (at < 0 || at > from) return kHidden;
    if (mask.cell_seq && mask.cell_seq[cell] != mask.query_seq[query]) return kHidden;
    if (mask.window && from - at >= mask.window) return kHidden;
    return 0.0;
}

void reference(const pa_shape &shape, const pa_args &args, double *out) {
    const int32_t group = shape.n_head / shape.n_kv_head, n_cells = args.n_cells;
    Head head;
    head.k.resize(static_cast<size_t>(n_cells) * static_cast<size_t>(shape.d_k));
    head.v.resize(static_cast<size_t>(n_cells) * static_cast<size_t>(shape.d_v));
    for (int32_t kv_head = 0; kv_head < shape.n_kv_head; kv_head++) {
        for (int32_t c = 0; c < n_cells; c++) {
            dequantise(args.k, shape.k_type, shape.d_k, c, kv_head, head.k.data() + int64_t{c} * shape.d_k);
            dequantise(args.v, shape.v_type, shape.d_v, c, kv_head, head.v.data() + int64_t{c} * shape.d_v);
        }
        for (int32_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
            for (int32_t query = 0; query < args.n_q; query++) {
                attend(shape, args, head, query, h, out + (int64_t{query} * shape.n_head + h) * shape.d_v);
            }
        }
    }
}

} // namespace paged_attn

pa_status pa_reference(const pa_shape *shape, const pa_args *args, double *out) {
    pa_status status = paged_attn::check_shape(shape);
    if (status == PA_OK) status = paged_attn::check_inputs(*shape, args);
    if (status != PA_OK) return status;
    if (!out) return paged_attn::fail(PA_BAD_ARGUMENT, "there is nowhere to put the result: out is null");
    try {
        paged_attn::reference(*shape, *args, out);
        return PA_OK;
    } catch (const std::bad_alloc &) {
        return paged_attn::fail(PA_OUT_OF_MEMORY, "no memory to widen %d cells", args->n_cells);
    }
}
